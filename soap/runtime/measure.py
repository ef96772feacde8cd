"""Time per training iteration, as all ranks together experience it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns

import torch

from soap.runtime.trainer import Trainer

WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Nanoseconds of each step after the warm-up, of the slowest rank, and each step's loss (warm-up included)."""

    times_ns: tuple[int, ...]
    losses: tuple[float, ...]

    @property
    def median_ns(self) -> int:
        """The middle time; 0 if there was no step after the warm-up."""
        return int(median(self.times_ns)) if self.times_ns else 0


def measure_steps(
    trainer: Trainer,
    batch: Callable[[int], Sequence[torch.Tensor]],
    steps: int,
    warm_up: int = WARM_UP_STEPS,
    on_step: Callable[[int, float], None] | None = None,
) -> StepTimes:
    """Train ``warm_up + steps`` steps on ``batch(trainer.steps)`` each; on all ranks. ``on_step`` hears each step's number and loss."""
    times, losses = [], []
    for number in range(trainer.steps, trainer.steps + warm_up + steps):
        inputs = batch(number)
        trainer.comm.barrier()
        start = perf_counter_ns()
        losses.append(trainer.step(*inputs))
        trainer.comm.barrier()
        times.append(perf_counter_ns() - start)
        if on_step is not None:
            on_step(number, losses[-1])
    slowest = [max(own) for own in zip(*trainer.comm.gather(times), strict=True)]
    return StepTimes(tuple(slowest[warm_up:]), tuple(losses))
