"""Gradients scaled: clipped by their global norm, and by dynamic loss scaling, as ``torch.amp.GradScaler`` does it: float16 has no numbers
below 6e-8, so that small gradients would be lost (docs/internals/runtime.md, *Clipping*, *Loss scaling*)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from soap.errors import RuntimeFailure
from soap.plan.plan import Plan
from soap.plan.syncs.clipping import NORM_NAME, compresses, refusal
from soap.runtime.comm.packing import plain
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.trace import Watch, watch_nothing
from soap.simulator.tasks import TaskKind
from soap.tracing.execute import TracedModel

SMALLEST, LARGEST = 2.0**-24, 2.0**127
"""Bounds of the scale, beyond which it says nothing any more: float32's range."""


@dataclass(frozen=True, slots=True)
class LossScaling:
    """``initial``: the first scale. ``growth``: it is multiplied by this after ``interval`` updates in succession, by ``backoff`` when a
    gradient is not finite. The defaults are torch's. RuntimeFailure in one line for an impossible value."""

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        if not (SMALLEST <= self.initial <= LARGEST and self.growth >= 1 and 0 < self.backoff <= 1 and self.interval >= 1):
            raise RuntimeFailure(
                f"{self}: expected an initial scale of 2^-24 to 2^127, growth of at least 1, backoff above 0 and at most 1, and an "
                "interval of at least 1"
            )


def require_scalable(plan: Plan, scaler: LossScaler | None) -> None:
    """RuntimeFailure if ranks cannot scale the loss by this plan: a residual of what is compressed would keep infinite numbers."""
    if scaler is not None and compresses(plan):
        raise RuntimeFailure("a scaled loss (float16) with compressed gradients; expected bfloat16, or a plan that compresses none")


class LossScaler:
    """The scale of one training, the same on all ranks. ``used``: that of the last step. ``skipped``: updates that were left out."""

    def __init__(self, options: LossScaling) -> None:
        self.options = options
        self.scale = self.used = options.initial
        self.since, self.skipped = 0, 0
        self.finite = True

    @classmethod
    def of(cls, model: TracedModel, options: LossScaling | None) -> LossScaler | None:
        """The scaler of a training; None if its numbers need none and nobody asks for one."""
        return cls(options or LossScaling()) if options is not None or model.autocast == "float16" else None

    def unscale(self, gradients: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Divide gradients by the scale, in place. Returns one number, to be summed over ranks: 0 if all of them are finite."""
        found = torch.zeros(1, dtype=torch.float32, device=device)
        inverse = torch.full((1,), 1.0 / self.scale, dtype=torch.float32, device=device)
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for gradient in gradients:
            by_type.setdefault(gradient.dtype, []).append(plain(gradient))
        for alike in by_type.values():
            torch._amp_foreach_non_finite_check_and_unscale_(alike, found, inverse)
        return found.double()

    def update(self, finite: bool) -> None:
        """Take the next scale. ``finite``: whether the gradients of all ranks are."""
        self.used, self.finite = self.scale, finite
        if not finite:
            self.scale, self.since, self.skipped = max(SMALLEST, self.scale * self.options.backoff), 0, self.skipped + 1
            return
        self.since += 1
        if self.since == self.options.interval:
            self.scale, self.since = min(LARGEST, self.scale * self.options.growth), 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"scale": self.scale, "since": self.since, "skipped": self.skipped}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        self.scale = self.used = float(state["scale"])
        self.since, self.skipped, self.finite = int(state["since"]), int(state["skipped"]), True

    def __str__(self) -> str:
        return str(self.options)


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
