"""Clocks for what a device does, and when a median is known well enough.

On a CPU with one thread per process what counts is the thread's processor time: other programs, which take turns with ours, do not spoil a
figure that is kept for long. Several threads are timed by the clock on the wall, since the processor time of a thread that waits for others
is no less. On a GPU events on its stream are timed: where Python is slower than the kernels, they wait for it as a training step does.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import median, quantiles
from typing import Protocol

import torch

FINE_CLOCK_SECONDS = 1e-4
"""A thread's processor time is used where the system counts it at least this finely."""
PRECISION = 0.02
"""A median is known well enough when its 95% confidence interval is no wider than this on either side."""
LEAST_REPETITIONS, MOST_REPETITIONS = 7, 300
FEW_REPETITIONS = 2
"""Of what takes longer than the time that is allowed for it."""
MOST_SECONDS = 0.5

Step = Callable[[], object]


class Clock(Protocol):
    """Times steps that follow each other."""

    def times_ns(self, steps: Sequence[Step]) -> list[float]:
        """Run the steps; nanoseconds of each."""


@dataclass(frozen=True, slots=True)
class CpuClock:
    """``share``: the part of the time that each process gets, less than 1 if there are more of them than cores."""

    threads: int = 1
    share: float = 1.0

    def times_ns(self, steps: Sequence[Step]) -> list[float]:
        """Run the steps; nanoseconds of each."""
        fine = time.get_clock_info("thread_time").resolution <= FINE_CLOCK_SECONDS
        now = time.thread_time_ns if self.threads == 1 and fine else time.perf_counter_ns
        marks = [now()]
        for step in steps:
            step()
            marks.append(now())
        return [max(end - start, 1) / self.share for start, end in pairwise(marks)]


@dataclass(frozen=True, slots=True)
class CudaClock:
    """Times on the current stream of the current GPU."""

    def times_ns(self, steps: Sequence[Step]) -> list[float]:
        """Run the steps; nanoseconds of each."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark, step in zip(marks[1:], steps, strict=True):
            step()
            mark.record()
        torch.cuda.synchronize()
        return [max(start.elapsed_time(end) * 1e6, 1.0) for start, end in pairwise(marks)]


@dataclass(frozen=True, slots=True)
class Sample:
    """Median and interquartile range of what was repeated so often, in nanoseconds."""

    ns: float
    spread_ns: float
    repetitions: int


def sample(times_ns: Sequence[float], parts: int = 1) -> Sample:
    """What these times say; each is of so many equal parts, and the sample is of one."""
    low, _, high = quantiles(times_ns, n=4, method="inclusive") if len(times_ns) > 1 else (times_ns[0],) * 3
    return Sample(median(times_ns) / parts, (high - low) / parts, len(times_ns))


def is_settled(times_ns: Sequence[float]) -> bool:
    """Whether the median's 95% confidence interval is within ``PRECISION``: 1.57 interquartile ranges over the root of the number of times
    (McGill, Tukey & Larsen, "Variations of Box Plots", 1978)."""
    if len(times_ns) < LEAST_REPETITIONS:
        return False
    found = sample(times_ns)
    return 1.57 * found.spread_ns / sqrt(len(times_ns)) <= PRECISION * found.ns


def repeat(run: Callable[[], Sequence[float]], most_seconds: float = MOST_SECONDS) -> list[list[float]]:
    """Times of each step of ``run``, which is repeated until all medians are settled or the time is over. It should be warm."""
    rows: list[list[float]] = []
    stop = time.perf_counter() + most_seconds
    enabled = gc.isenabled()
    gc.disable()
    try:
        while len(rows) < MOST_REPETITIONS:
            rows.append(list(run()))
            if time.perf_counter() > stop and len(rows) >= FEW_REPETITIONS:
                break
            if len(rows) >= LEAST_REPETITIONS and all(is_settled(column) for column in zip(*rows, strict=True)):
                break
    finally:
        if enabled:
            gc.enable()
    return [list(column) for column in zip(*rows, strict=True)]


def clock_for(device: torch.device, threads: int = 1, share: float = 1.0) -> Clock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else CpuClock(threads, share)
