"""Time per training iteration, as all ranks together experience it, and the memory that a rank really holds of its tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

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


QUIET = "99"
"""A level of the profiler's own messages above all that it has, so that it prints none."""
RESTART = "soap: restart"
"""Name of an event in the profile."""


@dataclass
class PeakMemory:
    """``bytes``: the most that tensors held at once beyond what was there before. ``with_workspaces_bytes``: with what kernels take while
    they run, the same on GPUs. Both are known when the measurement has ended."""

    bytes: int = 0
    with_workspaces_bytes: int = 0

    def restart(self) -> None:
        """From now on count the most that is held at once; what is held now still counts, what was held at most before does not."""
        with record_function(RESTART):
            pass
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()


class Change(NamedTuple):
    """Memory allocated (``size_bytes`` above 0) or freed. ``call``: the innermost call of an operator at that moment, -1 for none."""

    time_ns: int
    address: int
    size_bytes: int
    call: int


@contextmanager
def peak_memory(device: torch.device) -> Iterator[PeakMemory]:
    """Measure the tensors that this thread allocates on ``device`` within the block. On GPUs: what the caching allocator has given out.
    On CPUs: every allocation of torch's allocator, as its profiler reports them, which slows every call down."""
    found = PeakMemory()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        found.bytes = found.with_workspaces_bytes = torch.cuda.max_memory_allocated(device) - before
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    changes, begin_ns = sorted(_changes(tree)), max((event.start_time_ns for event in tree if event.name == RESTART), default=0)
    found.with_workspaces_bytes = _most(changes, begin_ns)
    found.bytes = _most(without_workspaces(changes), begin_ns)


def without_workspaces(changes: Sequence[Change]) -> list[Change]:
    """The changes without workspaces: what one call of an operator itself, not a call within it, allocates and frees again."""
    taken: dict[int, int] = {}
    left: set[int] = set()
    for place, change in enumerate(changes):
        if change.size_bytes > 0:
            taken[change.address] = place
        elif (began := taken.pop(change.address, None)) is not None and changes[began].call == change.call != -1:
            left |= {began, place}
    return [change for place, change in enumerate(changes) if place not in left]


def _changes(events: Iterable[Any]) -> Iterator[Change]:
    """All changes, found in the profiler's tree of events."""
    waiting, calls = [(event, -1) for event in events], 0
    while waiting:
        event, call = waiting.pop()
        if event.tag == _EventType.Allocation:
            yield Change(event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, call)
            continue
        own, calls = calls if event.tag == _EventType.TorchOp else call, calls + 1
        waiting += [(child, own) for child in event.children]


def _most(changes: Iterable[Change], begin_ns: int) -> int:
    """The most that is held at once from a moment on."""
    held = most = 0
    for change in changes:
        held += change.size_bytes
        most = max(most, held) if change.time_ns >= begin_ns else held
    return most
