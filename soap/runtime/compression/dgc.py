"""What Deep Gradient Compression adds to an optimizer, so that elements sent late count as if they had been sent in time.

- *Momentum correction*: momentum is applied on each rank, before compression: u = m u + g, and u is added to the residual. (Nesterov:
  u = m (u + g), and u + g is added.) The update is then plain SGD.
- *Factor masking*: where an element is sent, its u becomes zero, so that stale momentum does not carry on. At a density of one that makes
  it plain SGD (Nesterov: with m + 1 times the learning rate); without masking it is SGD with momentum.
- *Local clipping*: a rank's gradients are clipped before they are added to residuals, at N^(-1/2) of the norm for all N ranks' sum. Local
  gradients carry their share 1/N, so that they are summed; N independent ones of norm x have a sum of norm N^(1/2) x. N is the number of
  compressing peers: where a host's ranks add up first, hosts, and what is clipped is the host's sum.
- *Weight decay* stays out of residuals. It has a momentum of its own, equal on all ranks (``updates.momentum``).
- *Warm-up*: dense steps first (RedSync), or densities that fall by a factor of four at a time (DGC: 25%, 6.25%, 1.5625%, 0.4%, 0.1%).

Parameters that are not compressed have ordinary momentum of the same size (``updates.momentum``). Adam may be given the compressed sums
instead; that is a heuristic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

import torch

from soap.errors import RuntimeFailure
from soap.runtime.compression.seam import Selected
from soap.runtime.updates.clipping import EPSILON

FALL = 0.25
"""From one density of a warm-up to the next."""
STAGES = 5
"""Densities of a warm-up: the paper's."""


@dataclass(frozen=True, slots=True)
class Momentum:
    """``factor``: m, from 0 to below 1. ``masking``: whether what is sent loses its momentum. RuntimeFailure for other factors."""

    factor: float = 0.9
    nesterov: bool = False
    masking: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.factor < 1:
            raise RuntimeFailure(f"momentum {self.factor}; expected a number from 0 to below 1")

    def corrected(self, kept: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """What is added to the residual for a gradient. ``kept``: u, which becomes that of the next step."""
        if self.nesterov:
            kept.add_(gradient).mul_(self.factor)
            return kept + gradient
        return kept.mul_(self.factor).add_(gradient)

    def mask(self, kept: torch.Tensor, sent: Selected | None) -> None:
        """Take away the momentum of what was sent. ``kept``: u, flat."""
        if self.masking and sent is not None:
            sent.clear(kept)

    def decayed(self, kept: torch.Tensor, weight: torch.Tensor, decay: float) -> torch.Tensor:
        """What momentum adds to weight decay, itself ``decay * weight``. ``kept``: its own momentum, which becomes the next step's."""
        kept.mul_(self.factor)
        earlier = kept.clone()
        kept.add_(weight, alpha=decay)
        return self.factor * kept if self.nesterov else earlier


@dataclass(frozen=True, slots=True)
class WarmUp:
    """``dense_steps``: so many steps send everything. Then ``stage_steps`` steps at each of STAGES falling densities; 0: none."""

    dense_steps: int = 0
    stage_steps: int = 0

    def __post_init__(self) -> None:
        if self.dense_steps < 0 or self.stage_steps < 0:
            raise RuntimeFailure(f"warm-up of {self.dense_steps} dense steps and {self.stage_steps} a density; expected 0 or more")

    @property
    def phases(self) -> tuple[tuple[int, float | None], ...]:
        """(number of steps, their least density; None: everything is sent), one after the other."""
        dense: list[tuple[int, float | None]] = [(self.dense_steps, None)]
        return tuple(own for own in dense + [(self.stage_steps, FALL ** (stage + 1)) for stage in range(STAGES)] if own[0])

    def density(self, step: int, final: float) -> float | None:
        """The density of a step, counted from 0; None: everything is sent, by an all-reduce."""
        if step < self.dense_steps:
            return None
        stage = (step - self.dense_steps) // self.stage_steps if self.stage_steps else STAGES
        return max(final, FALL ** (stage + 1)) if stage < STAGES else final


def local_limit(norm: float, peers: int) -> float:
    """At which norm each of so many compressing peers clips (hosts, if a host's devices add up their gradients first)."""
    return norm / sqrt(peers)


def clip_locally(gradients: Sequence[torch.Tensor], norm: float, peers: int) -> list[torch.Tensor]:
    """One rank's gradients, scaled down together if their common norm exceeds ``local_limit``. They are left as they are."""
    return clipped(gradients, local_limit(norm, peers))


def clipped(gradients: Sequence[torch.Tensor], norm: float) -> list[torch.Tensor]:
    """Gradients, scaled down together if their common norm exceeds this one. They are left as they are."""
    scale = scale_of(gradients, norm)
    return [gradient * scale.to(gradient.dtype) for gradient in gradients]


def scale_of(gradients: Iterable[torch.Tensor], norm: float) -> torch.Tensor:
    """By how much gradients are scaled down so that their common norm does not exceed this one; at most 1."""
    return (norm / (norm_of(gradients) + EPSILON)).clamp_max(1)


def norm_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of several tensors together, in float64."""
    return torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]).square().sum().sqrt()
