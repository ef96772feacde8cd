"""Time per training iteration, as all ranks together experience it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns

import torch

from soap.runtime.inputs import Given, mapped
from soap.runtime.system import clock
from soap.runtime.trainer import Trainer

WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Nanoseconds of each step after the warm-up, of the slowest rank, and each step's loss (warm-up included). ``card_counts``: by
    rank, bytes (sent, received) and frames (sent, received) that its host's network card counted in these timed steps; empty if they
    were not asked for. ``input_bytes``: by rank, what it was given of the batch in a step, on average."""

    times_ns: tuple[int, ...]
    losses: tuple[float, ...]
    card_counts: tuple[tuple[int, ...], ...] = ()
    input_bytes: tuple[int, ...] = ()

    @property
    def median_ns(self) -> int:
        """The middle time; 0 if there was no step after the warm-up."""
        return int(median(self.times_ns)) if self.times_ns else 0


def measure_steps(
    trainer: Trainer,
    batch: Callable[[int], Sequence[Given]],
    steps: int,
    warm_up: int = WARM_UP_STEPS,
    on_step: Callable[[int, float], None] | None = None,
    card: Callable[[], tuple[int, ...]] | None = None,
) -> StepTimes:
    """Train ``warm_up + steps`` steps on ``batch(trainer.steps)`` each, on all ranks. ``on_step`` is called with each step's number and
    loss. ``card``: returns the counts of the network card so far; it is called while no step is under way. Beside its own traffic a
    timed step has the two barriers around it, and what ``on_step`` sends."""
    times: list[int] = []
    losses: list[float] = []
    moved: list[tuple[int, ...]] = [(), ()]
    begun = trainer.input_bytes

    def count(place: int) -> None:
        if card is not None:
            trainer.comm.barrier()
            moved[place] = card()
            trainer.comm.barrier()  # otherwise another rank's next step would count

    for number in range(trainer.steps, trainer.steps + warm_up + steps):
        inputs = mapped(batch(number), trainer.place)  # as input pipelines do during the step before
        if len(times) == warm_up:
            count(0)
        trainer.comm.barrier()
        start = perf_counter_ns()
        losses.append(trainer.step(*inputs))
        _finish(trainer)
        times.append(perf_counter_ns() - start)
        trainer.comm.barrier()
        if on_step is not None:
            on_step(number, losses[-1])
    count(1)
    given = (trainer.input_bytes - begun) // max(1, len(times))
    outcomes = trainer.comm.gather((times, given))
    slowest = [max(own) for own in zip(*(own for own, _ in outcomes), strict=True)]
    counts = trainer.comm.gather(moved) if card is not None else []
    crossed = tuple(tuple(now - then for then, now in zip(before, after, strict=True)) for before, after in counts)
    return StepTimes(tuple(slowest[warm_up:]), tuple(losses), crossed, tuple(own for _, own in outcomes))


def _finish(trainer: Trainer) -> None:
    """Wait until the device has finished what this rank has begun. A barrier would do, but takes milliseconds itself."""
    trainer.comm.finish_sends()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
    clock.catch_up()
