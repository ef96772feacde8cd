"""Clipping gradients by their global norm: ``torch.nn.utils.clip_grad_norm_`` over shards that lie on several devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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


def squares(comm: Communicator, plan: Plan, gradients: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The sum of squares of this rank's complete gradients (by shard), one number. A shard counts on its first device alone."""
    own = [plain(gradient) for shard, gradient in gradients.items() if plan.shards[shard].devices[0] == comm.rank]
    squared = torch.zeros(1, dtype=torch.float64, device=comm.device)
    if own:
        squared += torch.stack(torch._foreach_norm(own, dtype=torch.float64 if comm.device.type == "cpu" else None)).double().square().sum()
    return squared


def summed(comm: Communicator, numbers: Sequence[torch.Tensor], watch: Watch = watch_nothing) -> list[float]:
    """Numbers of every rank, summed over all of them at once; the same on all ranks. ``watch``: times the sum."""
    pending = comm.all_reduce(torch.cat(list(numbers)), tuple(range(comm.world_size)))
    watch(NORM_NAME, TaskKind.SYNC, pending)
    found: list[float] = pending.wait().tolist()
    return found


def limit(gradients: Iterable[torch.Tensor], norm: float, largest: float) -> None:
    """Scale gradients in place so that the norm over all parameters, which is ``norm``, is at most ``largest``."""
    factor, own = largest / (norm + EPSILON), list(gradients)
    if own:
        torch._foreach_mul_(own, 1.0 if factor > 1 else factor)  # no number stays none, as with torch
