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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch

from soap.errors import RuntimeFailure
from soap.plan.plan import Plan
from soap.plan.syncs.compressed import compressed_names
from soap.runtime.compression.seam import Selected
from soap.runtime.updates.loss_scaling import EPSILON
from soap.runtime.updates.parts import Part

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


DECAY_MOMENTUM = "decay_momentum"
"""Name of the optimizer's state."""


def require_correctable(plan: Plan) -> None:
    """RuntimeFailure if a parameter's momentum would be corrected in some regions only: those with one reader are not compressed."""
    compressed = compressed_names(plan)
    for sync in plan.syncs:
        for shard in sync.shards if sync.compression is None else ():
            name = plan.shards[shard].parameter
            if name in compressed:
                box = ", ".join(f"{a}:{b}" for a, b in plan.shards[shard].box)
                raise RuntimeFailure(
                    f"momentum correction of {name!r}, of which one device alone keeps [{box}], which is not compressed; expected a plan "
                    "that compresses all of a parameter or nothing: train without correction, or do not compress it"
                )


def wrong_momentum(plan: Plan, rule: Momentum, optimizer: torch.optim.Optimizer | None, parts: Iterable[Part]) -> str:
    """One line about a parameter whose optimizer has another momentum than ``rule`` asks for; empty if all are right."""
    compressed, names = compressed_names(plan), {id(part.tensor): part.parameter for part in parts}
    for group in optimizer.param_groups if optimizer is not None else ():
        for tensor in group["params"]:
            name = names.get(id(tensor))
            if name in compressed and group.get("momentum") != 0:
                return (
                    f"momentum correction of {name!r}, whose optimizer has {_own(group)}; expected SGD with momentum 0 for compressed "
                    "parameters: their momentum is applied before they are compressed"
                )
            if name is not None and name not in compressed and not _has(group, rule):
                wanted = f"expected SGD with momentum {rule.factor:g}{', nesterov' * rule.nesterov}"
                return (
                    f"momentum correction beside {name!r}, which is not compressed and whose optimizer has {_own(group)}; {wanted} for "
                    "such parameters: groups=lambda name, shape: {'momentum': …}"
                )
    return ""


class DecayMomentum:
    """Momentum of the weight decay of compressed parameters, which stays out of residuals: it is the same on all ranks. The optimizer, SGD
    without momentum, adds the decay itself; this adds what earlier ones have left. ``tensors``: compressed shard -> what is updated.

    The momentum is part of the optimizer's state (``DECAY_MOMENTUM``), so checkpoints have it.
    """

    def __init__(self, rule: Momentum, optimizer: torch.optim.Optimizer | None, tensors: Mapping[int, torch.Tensor]) -> None:
        self._rule, self._optimizer = rule, optimizer
        self._numbers = {id(tensor): number for number, tensor in tensors.items()}

    @torch.no_grad()
    def added(self, gradients: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The gradients with it. They are left as they are."""
        found, optimizer = dict(gradients), self._optimizer
        for group in optimizer.param_groups if optimizer is not None else ():
            for tensor in group["params"]:
                number, decay = self._numbers.get(id(tensor)), group.get("weight_decay", 0.0)
                if optimizer is None or number not in found or not (decay or DECAY_MOMENTUM in optimizer.state[tensor]):
                    continue
                kept = optimizer.state[tensor].setdefault(DECAY_MOMENTUM, torch.zeros_like(tensor, requires_grad=False))
                found[number] = found[number] + self._rule.decayed(kept, tensor.detach(), float(decay))
        return found


def _has(group: dict[str, Any], rule: Momentum) -> bool:
    plain = rule.factor == 0 or (group.get("dampening") == 0 and group.get("nesterov") == rule.nesterov)
    return group.get("momentum") == rule.factor and plain


def _own(group: dict[str, Any]) -> str:
    if "momentum" not in group:
        return "no option 'momentum'"
    more = [f"dampening {group['dampening']:g}"] * bool(group.get("dampening")) + ["nesterov"] * bool(group.get("nesterov"))
    return ", ".join([f"momentum {group['momentum']:g}", *more])
