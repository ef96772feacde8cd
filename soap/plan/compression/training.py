"""What a training adds to a plan, as far as memory and time depend on it. A step's time is that of steps behind a warm-up, which are
most; memory has to hold for all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from soap.strategy.wrapped import USUAL, Wrapped


@dataclass(frozen=True, slots=True)
class PlannedTraining:
    """``kept``, ``made``: tensors of a compressed parameter's size that its momentum keeps from step to step, and makes in a step.
    ``densest``: the largest density of a warm-up; 0: none. ``dense``: whether a warm-up begins with steps that send everything.
    ``clips``: gradients are clipped by their norm (``plan.syncs.clipping``): by each rank before it sends anything, if some are compressed,
    which is known behind its whole backward pass; else by all together, before the update. With a scaled loss all ranks learn whether
    their gradients are finite in the same way (``for_scaling``). ``wrapped``: how another trainer gathers values and sums gradients; such
    plans are simulated, by ``Simulator.predict``, and run there."""

    kept: int = 0
    made: int = 0
    densest: float = 0.0
    dense: bool = False
    clips: bool = False
    wrapped: Wrapped = USUAL


def for_scaling(training: PlannedTraining, autocast: str | None) -> PlannedTraining:
    """The same with a scaled loss, if autocast is to float16: before they update, all ranks sum a number, as for clipping."""
    return replace(training, clips=True) if autocast == "float16" else training


PLAIN = PlannedTraining()
"""Neither momentum correction nor a warm-up nor clipping."""
