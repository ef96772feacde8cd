"""What each rank keeps of compressed parameters for itself: residuals, momentum, thresholds and their age, signs, the warm-up's position.

A residual is saved for each *place* among a shard's readers (``sync.state.<parameter>.residual@<place>``), as a tensor of the parameter's
shape. As many readers get back just what they had, however the parameter is cut now. Otherwise nothing is lost either: the first reader
goes on from the sum of all places, the others from zero. What means nothing to others (a reused threshold) then begins anew; numbers that
were equal everywhere (steps, whose sign's turn it is) go on.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from soap.errors import SoapWarning
from soap.model.regions import Box, lengths, whole
from soap.runtime.checkpoint.manifest import Manifest, RankStates, place_name, sync_state_name
from soap.runtime.checkpoint.storage import Region
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.compression.seam import State, kept_dtype
from soap.runtime.step.gradients import Gradients
from soap.runtime.sync.shards import ShardStore

Wanted = dict[tuple[int, str, int], Region]
"""(shard, name, place) -> where it is read to."""
COMMON = -1
"""In place of a place: the same for all readers."""


def _states(gradients: Gradients) -> Mapping[int, State]:
    return {} if gradients.compressed is None else gradients.compressed.states


def _readers(store: ShardStore) -> dict[int, tuple[int, ...]]:
    """Compressed shard -> its readers."""
    return {sync.shards[0]: sync.readers for sync in store.plan.syncs if sync.compression is not None}


def states_of(comm: Communicator, store: ShardStore, gradients: Gradients) -> dict[str, RankStates]:
    """Parameter -> what all ranks keep of it; called on all ranks at once."""
    readers, own = _readers(store), []
    for shard, state in _states(gradients).items():
        entry: dict[str, Any] = {"box": [list(side) for side in store.plan.shards[shard].box], "place": readers[shard].index(store.rank)}
        entry["numbers"] = dict(state.numbers)
        entry["own"] = {name: [str(tensor.dtype).removeprefix("torch."), float(tensor)] for name, tensor in state.own.items()}
        common = [common_name(name, store.plan.shards[shard].box) for name in state.common]
        own.append((store.plan.shards[shard].parameter, tuple(state.summed), len(readers[shard]), common, entry))
    found: dict[str, RankStates] = {}
    for parameter, names, peers, common, entry in (each for ranks in comm.gather(own) for each in ranks):
        before = found.get(parameter, RankStates(names, 0))
        every = tuple(dict.fromkeys((*before.common, *common)))
        found[parameter] = RankStates(names, max(before.peers, peers), every, (*before.entries, entry))
    return found


def rank_state_to_save(store: ShardStore, known: Mapping[str, RankStates], gradients: Gradients) -> Iterator[Region]:
    """The regions that this rank saves: those of its own places, and for shards whose first device it is zeros for places that have no
    reader, and what is common."""
    readers, states = _readers(store), _states(gradients)
    for number, tensor in store.tensors.items():
        shard = store.plan.shards[number]
        if shard.parameter not in known:
            continue
        shape, stored, state = store.plan.graph.tensors[shard.parameter].shape, known[shard.parameter], states.get(number)
        for name in stored.names:
            if state is not None:
                value = state.summed[name].view(tensor.shape)
                yield Region(place_name(shard.parameter, name, readers[number].index(store.rank)), shape, shard.box, value)
            if shard.devices[0] == store.rank:
                empty = torch.zeros_like(tensor, dtype=kept_dtype(tensor.dtype), requires_grad=False)
                for place in range(len(readers.get(number, ())), stored.peers):
                    yield Region(place_name(shard.parameter, name, place), shape, shard.box, empty)
        if state is not None and readers[number][0] == store.rank:
            for name, value in state.common.items():
                full = sync_state_name(shard.parameter, common_name(name, shard.box))
                yield Region(full, tuple(value.shape), whole(value.shape), value)


def rank_state_to_read(store: ShardStore, manifest: Manifest, gradients: Gradients) -> Wanted:
    """Empty tensors for what this rank goes on from, as far as the checkpoint has it."""
    readers, found = _readers(store), Wanted()
    for number, state in _states(gradients).items():
        shard = store.plan.shards[number]
        stored = manifest.rank_states.get(shard.parameter)
        if stored is None:
            continue
        place, same = readers[number].index(store.rank), stored.peers == len(readers[number])
        for name in (name for name in stored.names if name in state.summed):
            for other in (place,) if same else range(stored.peers) if place == 0 else ():
                found[number, name, other] = _empty(manifest, place_name(shard.parameter, name, other), shard.box)
        for name, value in state.common.items():
            full = sync_state_name(shard.parameter, common_name(name, shard.box))
            if full in manifest.tensors and manifest.tensors[full].shape == tuple(value.shape):
                found[number, name, COMMON] = _empty(manifest, full, whole(value.shape))
    return found


def _empty(manifest: Manifest, name: str, box: Box) -> Region:
    stored = manifest.tensors[name]
    return Region(name, stored.shape, box, torch.empty(lengths(box), dtype=getattr(torch, stored.dtype)))


def restore_ranks(store: ShardStore, manifest: Manifest, gradients: Gradients, read: Wanted) -> None:
    """Go on from what was read. Says in one line, on rank 0, what was summed up, and what this plan has no use for."""
    readers = _readers(store)
    for number, state in _states(gradients).items():
        stored = manifest.rank_states.get(store.plan.shards[number].parameter)
        if stored is None:
            continue
        for name, tensor in state.summed.items():
            parts = [region.tensor for (shard, own, _), region in sorted(read.items(), key=_order) if (shard, own) == (number, name)]
            tensor.zero_()
            for part in parts:
                tensor.add_(part.to(tensor).reshape(-1))
        for name in state.common:
            if (number, name, COMMON) in read:
                state.common[name].copy_(read[number, name, COMMON].tensor)
        box, place = [list(side) for side in store.plan.shards[number].box], readers[number].index(store.rank)
        mine = [own for own in stored.entries if own["box"] == box and own["place"] == place]
        state.own.clear()
        if stored.peers == len(readers[number]) and mine:
            state.numbers = dict(mine[0]["numbers"])
            state.own |= {name: torch.tensor(value, dtype=getattr(torch, kind)) for name, (kind, value) in mine[0]["own"].items()}
        else:
            first = stored.entries[0]["numbers"] if stored.entries else {}
            state.numbers = {k: v for k, v in first.items() if all(own["numbers"].get(k) == v for own in stored.entries)}
    if store.rank == 0:
        _tell(store, manifest, readers)


def _order(entry: tuple[tuple[int, str, int], Region]) -> int:
    return entry[0][2]


def _tell(store: ShardStore, manifest: Manifest, readers: Mapping[int, tuple[int, ...]]) -> None:
    plan = store.plan
    now = {plan.shards[number].parameter: len(own) for number, own in readers.items()}
    summed = [name for name, stored in manifest.rank_states.items() if name in now and now[name] != stored.peers]
    if summed:
        peers = manifest.rank_states[summed[0]].peers
        warnings.warn(
            f"residuals of {len(summed)} compressed parameters, such as {summed[0]!r}, are of {peers} ranks; of {now[summed[0]]} ranks now "
            "the first goes on from their sum: nothing is lost, but losses differ from those of an uninterrupted run",
            SoapWarning,
            stacklevel=2,
        )
    unused = [name for name in manifest.rank_states if name not in now]
    if unused:
        warnings.warn(
            f"residuals of {len(unused)} parameters, such as {unused[0]!r}, are lost: this plan does not compress them; expected the "
            "compression that they were saved with",
            SoapWarning,
            stacklevel=2,
        )


def common_name(name: str, box: Box) -> str:
    """A state that all readers of a shard share."""
    return f"{name}[{','.join(f'{a}:{b}' for a, b in box)}]"

