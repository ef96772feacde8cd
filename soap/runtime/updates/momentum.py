"""Momentum correction and the optimizer: compressed parameters have momentum before they are compressed, all others as ever."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from soap.errors import RuntimeFailure
from soap.plan.plan import Plan
from soap.plan.syncs.compressed import compressed_names
from soap.runtime.compression.dgc import Momentum
from soap.runtime.updates.parts import Part

DECAY_MOMENTUM = "decay_momentum"
"""Name of the optimizer's state."""


def require_correctable(plan: Plan) -> None:
    """RuntimeFailure in one line if a parameter's momentum would be corrected in some regions only: those with a single reader are not
    compressed, and an optimizer has one momentum for a parameter."""
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
