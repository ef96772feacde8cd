"""Clipping gradients by their global norm: ``torch.nn.utils.clip_grad_norm_`` over shards that lie on several devices."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from soap.errors import RuntimeFailure
from soap.plan.plan import Plan
from soap.runtime.comm.packing import plain
from soap.runtime.comm.redistribute import Communicator

EPSILON = 1e-6
"""What ``torch.nn.utils.clip_grad_norm_`` adds to the norm that it divides by."""


def require_clippable(plan: Plan, largest: float) -> None:
    """RuntimeFailure in one line if ranks cannot clip their own gradients, which they do where some are compressed: each must have a share
    of all gradients, so that N^(-1/2) of the norm means something, and none may be on its way to an owner. Those of a host are clipped
    together if it compresses as one peer; then all that is compressed must be compressed so."""
    everyone = tuple(range(plan.device_count))
    for sync in plan.syncs:
        if tuple(sorted(sync.readers)) != everyone or sync.contract.by_rows or sync.contract.owned_in_parts:
            raise RuntimeFailure(
                f"clip_norm {largest:g} with compressed gradients, where {sync.parameter!r} is not summed over all devices "
                f"({sync.contract.name}, {len(sync.readers)} of {plan.device_count}); expected data parallelism by all-reduces and "
                "compressed sums: ranks clip their own gradients before they are compressed"
            )
    ways = {sync.leaders: sync.parameter for sync in plan.syncs if sync.contract.compresses}
    if len(ways) > 1:
        raise RuntimeFailure(
            f"clip_norm {largest:g}, where {' and '.join(map(repr, list(ways.values())[:2]))} are compressed by other devices; expected "
            "each device to compress, or one device of each host, the same for all parameters: peers clip what they compress"
        )


def clip(comm: Communicator, plan: Plan, gradients: Mapping[int, torch.Tensor], largest: float) -> float:
    """Scale this rank's complete gradients (by shard) in place so that the norm over all parameters is at most ``largest``.

    Returns the norm before clipping, the same on all ranks. Each shard counts once, on its first device, however many own a copy.
    """
    own = [plain(gradient) for shard, gradient in gradients.items() if plan.shards[shard].devices[0] == comm.rank]
    squared = torch.zeros(1, dtype=torch.float64, device=comm.device)
    if own:
        squared += torch.stack(torch._foreach_norm(own, dtype=torch.float64 if comm.device.type == "cpu" else None)).double().square().sum()
    norm = comm.all_reduce(squared, tuple(range(comm.world_size))).wait().sqrt()
    factor = (largest / (norm + EPSILON)).clamp(max=1.0)
    if gradients:
        torch._foreach_mul_(list(gradients.values()), float(factor))
    return float(norm)
