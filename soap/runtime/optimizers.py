"""The optimizers that the command line offers, as it makes them; what is measured of updates is measured of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch


def adam(tensors: Sequence[torch.Tensor], lr: float) -> torch.optim.Adam:
    """On CPUs in one pass over each tensor: torch's usual way goes over them in several calls, which take four times as long, fourteen
    times where gradients have always been zero (as those of rows that nobody looks up), and make two tensors of the largest one's size."""
    fit = all(tensor.device.type == "cpu" and tensor.is_floating_point() for tensor in tensors)  # not complex numbers: torch's kernel
    return torch.optim.Adam(tensors, lr=lr, fused=True if fit else None)


OPTIMIZERS: Mapping[str, Callable[[Sequence[torch.Tensor], float], torch.optim.Optimizer]] = {
    "sgd": lambda tensors, lr: torch.optim.SGD(tensors, lr=lr),
    "adam": adam,
}
"""By name: makes one of tensors, with a learning rate."""
