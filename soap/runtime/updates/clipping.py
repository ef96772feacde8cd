"""Clipping gradients by their global norm: ``torch.nn.utils.clip_grad_norm_`` over shards that lie on several devices."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from soap.errors import RuntimeFailure
from soap.plan.plan import Plan
from soap.plan.syncs.clipping import NORM_NAME, refusal
from soap.runtime.comm.packing import plain
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.trace import Watch, watch_nothing
from soap.simulator.tasks import TaskKind

EPSILON = 1e-6
"""What ``torch.nn.utils.clip_grad_norm_`` adds to the norm that it divides by."""


def require_clippable(plan: Plan, largest: float) -> None:
    """RuntimeFailure in one line if ranks cannot clip by this plan."""
    if why := refusal(plan):
        raise RuntimeFailure(f"clip_norm {largest:g} {why}")


def clip(
    comm: Communicator, plan: Plan, gradients: Mapping[int, torch.Tensor], largest: float, watch: Watch = watch_nothing
) -> float:
    """Scale this rank's complete gradients (by shard) in place so that the norm over all parameters is at most ``largest``.

    Returns the norm before clipping, the same on all ranks. Each shard counts once, on its first device, however many own a copy.
    ``watch``: times the sum over the ranks.
    """
    own = [plain(gradient) for shard, gradient in gradients.items() if plan.shards[shard].devices[0] == comm.rank]
    squared = torch.zeros(1, dtype=torch.float64, device=comm.device)
    if own:
        squared += torch.stack(torch._foreach_norm(own, dtype=torch.float64 if comm.device.type == "cpu" else None)).double().square().sum()
    pending = comm.all_reduce(squared, tuple(range(comm.world_size)))
    watch(NORM_NAME, TaskKind.SYNC, pending)
    norm = pending.wait().sqrt()
    factor = (largest / (norm + EPSILON)).clamp(max=1.0)
    if gradients:
        torch._foreach_mul_(list(gradients.values()), float(factor))
    return float(norm)
