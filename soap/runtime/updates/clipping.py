"""Clipping gradients by their global norm: ``torch.nn.utils.clip_grad_norm_`` over shards that lie on several devices."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from soap.plan.plan import Plan
from soap.runtime.comm.packing import plain
from soap.runtime.comm.redistribute import Communicator

EPSILON = 1e-6
"""What ``torch.nn.utils.clip_grad_norm_`` adds to the norm that it divides by."""


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
