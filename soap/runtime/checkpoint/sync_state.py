"""The state that methods of synchronization keep from step to step (``RankSync.state``), saved by parameter so that other plans can use it.

Each tensor is a region of one that has the parameter's shape, like the optimizer's state. A plan whose methods have no state of that name
ignores it. A method whose state is missing in a checkpoint starts fresh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from soap.model.regions import lengths
from soap.plan.plan import Plan
from soap.runtime.checkpoint.manifest import Manifest, sync_state_name
from soap.runtime.checkpoint.storage import Region
from soap.runtime.sync.shards import ShardStore


def kept_names(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Parameter -> names of the states that its methods keep."""
    found: dict[str, dict[str, None]] = {}
    for sync in plan.syncs:
        for number in sync.shards if sync.contract.state else ():
            found.setdefault(plan.shards[number].parameter, {}).update(dict.fromkeys(sync.contract.state))
    return {parameter: tuple(names) for parameter, names in found.items()}


def state_to_save(
    store: ShardStore, names: Mapping[str, tuple[str, ...]], kept: Mapping[int, Mapping[str, torch.Tensor]]
) -> Iterator[Region]:
    """The regions that this rank saves: of shards whose first device it is. Shards without a state are saved as zeros. ``kept``: shard ->
    name -> tensor."""
    plan = store.plan
    for number, tensor in store.tensors.items():
        shard = plan.shards[number]
        if shard.devices[0] == store.rank:
            shape, own = plan.graph.tensors[shard.parameter].shape, kept.get(number, {})
            for name in names.get(shard.parameter, ()):
                value = own[name] if name in own else torch.zeros_like(tensor, requires_grad=False)
                yield Region(sync_state_name(shard.parameter, name), shape, shard.box, value)


def state_to_read(store: ShardStore, manifest: Manifest) -> dict[tuple[int, str], Region]:
    """(shard, name) -> empty tensor for a state that this plan's methods keep of this rank's shards, if the checkpoint has it."""
    plan, found = store.plan, dict[tuple[int, str], Region]()
    for sync in plan.syncs:
        for number in sync.shards if sync.contract.state else ():
            shard = plan.shards[number]
            for name in sync.contract.state if number in store.tensors else ():
                if name in manifest.sync_states.get(shard.parameter, ()):
                    stored = manifest.tensors[sync_state_name(shard.parameter, name)]
                    dtype: torch.dtype = getattr(torch, stored.dtype)
                    empty = torch.empty(lengths(shard.box), dtype=dtype, device=store.tensors[number].device)
                    found[number, name] = Region(sync_state_name(shard.parameter, name), stored.shape, shard.box, empty)
    return found


def by_shard(kept: Mapping[tuple[int, str], Region]) -> dict[int, dict[str, torch.Tensor]]:
    """Shard -> name -> tensor."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for (number, name), region in kept.items():
        found.setdefault(number, {})[name] = region.tensor
    return found
