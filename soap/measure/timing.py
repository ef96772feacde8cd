"""Clocks for devices, and when a median is known well enough.

On a CPU with one thread per process the thread's processor time counts (even, if ``reference_work`` makes it so): other programs, which
take turns with ours, do not spoil a figure that is kept for long. Several threads are timed by the wall clock, since a thread that
waits for others has no less processor time.

On a GPU events on its stream are timed, and beside it the time that the processor takes to launch the kernels: it runs ahead of the GPU
as in a long step, so that neither waits for the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import median, quantiles
from typing import Protocol

import torch

from soap import collector
from soap.emulation import reference_work

FINE_CLOCK_SECONDS = 1e-4
"""A thread's processor time is used if the system counts it at least this finely."""
PRECISION = 0.02
"""A median is known well enough when its 95% confidence interval is no wider than this on either side."""
LEAST_REPETITIONS, MOST_REPETITIONS = 7, 300
FEW_REPETITIONS = 2
"""Repetitions of a step that takes longer than its allowed time."""
MOST_SECONDS = 0.5

LOOKS = 99
"""Readings of the clock to find how long one takes."""

MOST_AHEAD_NS = 10**9
"""Seconds for which a GPU is kept waiting at most, so that the processor is ahead of it."""

Step = Callable[[], object]


class Clock(Protocol):
    """Times several steps that follow each other."""

    def times_ns(self, steps: Sequence[Step]) -> list[float]:
        """Run the steps; nanoseconds of each. On a GPU, then, nanoseconds that the processor took to launch each."""


@dataclass(slots=True)
class CpuClock:
    """``share``: each process's part of the time, below 1 with more processes than cores. The time for reading the clock is taken off."""

    threads: int = 1
    share: float = 1.0
    _own_ns: float | None = None

    def times_ns(self, steps: Sequence[Step]) -> list[float]:
        """Run the steps; nanoseconds of each."""
        if self._own_ns is None:
            self._own_ns = median(self._read([_nothing] * LOOKS))
        return [max(found - self._own_ns, 1.0) / self.share for found in self._read(steps)]

    def _read(self, steps: Sequence[Step]) -> list[int]:
        fine = time.get_clock_info("thread_time").resolution <= FINE_CLOCK_SECONDS
        now = reference_work.thread_time_ns if self.threads == 1 and fine else time.perf_counter_ns
        marks = [now()]
        for step in steps:
            step()
            marks.append(now())
        return [end - start for start, end in pairwise(marks)]


def _nothing() -> None:
    pass


@dataclass(slots=True)
class CudaClock:
    """Times on the current stream of the current GPU. ``ahead``: the GPU gets something to wait for first, for as long as launching
    took the last time; the first few times of a step are then too long. Otherwise kernels wait for the processor where it is slower."""

    ahead: bool = True
    _wait_ns: float = 1e6
    _cycles_per_ns: float = 0.0

    def times_ns(self, steps: Sequence[Step]) -> list[float]:
        """Run the steps; nanoseconds of each, then those of launching each."""
        marks = [_event() for _ in range(len(steps) + 1)]
        if self.ahead:
            self._keep_waiting()
        marks[0].record()
        launched = [time.perf_counter_ns()]
        for mark, step in zip(marks[1:], steps, strict=True):
            step()
            mark.record()
            launched.append(time.perf_counter_ns())
        torch.cuda.synchronize()
        self._wait_ns = min(MOST_AHEAD_NS, max(1e5, 1.5 * (launched[-1] - launched[0])))
        times = [max(start.elapsed_time(end) * 1e6, 1.0) for start, end in pairwise(marks)]
        return [*times, *(float(end - start) for start, end in pairwise(launched))]

    def _keep_waiting(self) -> None:
        if not self._cycles_per_ns:
            marks, cycles = (_event(), _event()), 10**7
            for mark in marks:
                _wait(cycles)
                mark.record()
            torch.cuda.synchronize()
            self._cycles_per_ns = cycles / (1e6 * marks[0].elapsed_time(marks[1]))
        _wait(int(self._wait_ns * self._cycles_per_ns))


def _wait(cycles: int) -> None:
    """Keep the GPU's stream waiting for so many cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Sample:
    """Median and interquartile range of what was repeated so often, in nanoseconds."""

    ns: float
    spread_ns: float
    repetitions: int


def sample(times_ns: Sequence[float], parts: int = 1) -> Sample:
    """The sample of one part, from times of so many equal parts together."""
    low, _, high = quantiles(times_ns, n=4, method="inclusive") if len(times_ns) > 1 else (times_ns[0],) * 3
    return Sample(median(times_ns) / parts, (high - low) / parts, len(times_ns))


def is_settled(times_ns: Sequence[float]) -> bool:
    """Whether the median's 95% interval is within ``PRECISION``: 1.57 interquartile ranges / sqrt(times) (McGill, Tukey, Larsen 1978)."""
    if len(times_ns) < LEAST_REPETITIONS:
        return False
    found = sample(times_ns)
    return 1.57 * found.spread_ns / sqrt(len(times_ns)) <= PRECISION * found.ns


def repeat(run: Callable[[], Sequence[float]], most_seconds: float = MOST_SECONDS) -> list[list[float]]:
    """Times of each step of ``run``, which is repeated until all medians are settled or the time is over. Warm up before."""
    rows: list[list[float]] = []
    stop = time.perf_counter() + most_seconds
    with collector.paused():
        while len(rows) < MOST_REPETITIONS:
            rows.append(list(run()))
            if time.perf_counter() > stop and len(rows) >= FEW_REPETITIONS:
                break
            if len(rows) >= LEAST_REPETITIONS and all(is_settled(column) for column in zip(*rows, strict=True)):
                break
    return [list(column) for column in zip(*rows, strict=True)]


def clock_for(device: torch.device, threads: int = 1, share: float = 1.0, *, ahead: bool = True) -> Clock:
    """The clock of a device. ``ahead``: see ``CudaClock``."""
    return CudaClock(ahead) if device.type == "cuda" else CpuClock(threads, share)
