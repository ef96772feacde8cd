"""Clocks and samples: each step has a time, medians are of one part, and repeating ends when the median is known or the time is over."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import torch

from soap.measure import timing
from soap.measure.timing import LEAST_REPETITIONS, MOST_REPETITIONS, CpuClock, clock_for, is_settled, repeat, sample


def test_every_step_runs_once_and_has_a_time() -> None:
    ran: list[int] = []
    times = CpuClock().times_ns([lambda: ran.append(1), lambda: ran.append(2)])
    assert ran == [1, 2]
    assert len(times) == 2 and all(time > 0 for time in times)


def passes(*ticks_per_step: int) -> Callable[[], int]:
    """A clock of which a look takes 100, beside what steps take that come after those by which it finds that out."""
    steps = [0] * (timing.LOOKS + 1) + [0, *ticks_per_step]
    times = accumulate(100 + step for step in steps)
    return lambda: next(times)


def test_a_process_with_half_a_core_takes_twice_as_long_and_looks_at_the_clock_count_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for share, found in ((1.0, [30, 50]), (0.5, [60, 100])):
        monkeypatch.setattr(timing.time, "thread_time_ns", passes(30, 50))
        assert CpuClock(1, share).times_ns([lambda: None] * 2) == found


def test_what_takes_no_longer_than_a_look_takes_a_nanosecond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.time, "thread_time_ns", passes(-3))
    assert CpuClock().times_ns([lambda: None]) == [1]


def test_several_threads_are_timed_by_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.time, "perf_counter_ns", passes(7))
    assert CpuClock(4).times_ns([lambda: None]) == [7]


def test_a_sample_is_the_median_and_the_interquartile_range_of_one_part() -> None:
    found = sample([10.0, 20.0, 30.0, 40.0, 1000.0], parts=10)
    assert (found.ns, found.spread_ns, found.repetitions) == (3.0, 2.0, 5)
    assert sample([5.0]).spread_ns == 0


def test_a_median_is_settled_when_its_interval_is_narrow() -> None:
    assert is_settled([100.0] * LEAST_REPETITIONS)
    assert not is_settled([100.0] * (LEAST_REPETITIONS - 1))
    noisy = [80.0, 90.0, 100.0, 110.0, 120.0] * 2
    assert not is_settled(noisy)
    assert is_settled(noisy * 40)  # the same spread, known better: 1.57 * 20 / 20 is below 2


def repeated(rows: Sequence[Sequence[float]], most_seconds: float) -> tuple[int, list[list[float]]]:
    calls = 0

    def run() -> Sequence[float]:
        nonlocal calls
        calls += 1
        assert not gc.isenabled()
        return rows[(calls - 1) % len(rows)]

    return calls, [*repeat(run, most_seconds), [float(calls)]]


def test_repeats_until_all_columns_are_settled() -> None:
    _, (first, second, (calls,)) = repeated([(100.0, 7.0)], 1000)
    assert calls == LEAST_REPETITIONS == len(first) == len(second)
    assert gc.isenabled()
    noisy = [(100.0, 1.0), (100.0, 1000.0), (100.0, 5.0)]
    assert repeated(noisy, 1000)[1][-1] == [float(MOST_REPETITIONS)]


def test_what_is_slow_is_repeated_a_few_times() -> None:
    assert repeated([(100.0,), (200.0,)], 0.0)[1][-1] == [float(timing.FEW_REPETITIONS)]


def test_a_gpu_has_a_clock_of_its_own() -> None:
    assert isinstance(clock_for(torch.device("cuda")), timing.CudaClock)
    assert clock_for(torch.device("cpu"), 2, 0.5) == CpuClock(2, 0.5)


class _Gpu:
    """A GPU's stream, its events and the processor's clock, in nanoseconds. A cycle takes two."""

    def __init__(self) -> None:
        self.now_ns, self.done_ns, self.waits = 0, 0, list[int]()

    def launch(self, launch_ns: int, run_ns: int) -> None:
        self.now_ns += launch_ns
        self.done_ns = max(self.done_ns, self.now_ns) + run_ns

    def sleep(self, cycles: int) -> None:
        self.waits.append(2 * cycles)
        self.launch(0, 2 * cycles)

    def synchronize(self) -> None:
        self.now_ns = max(self.now_ns, self.done_ns)

    def event(self) -> _Event:
        return _Event(self)


class _Event:
    def __init__(self, gpu: _Gpu) -> None:
        self.gpu, self.ns = gpu, 0

    def record(self) -> None:
        self.ns = max(self.gpu.now_ns, self.gpu.done_ns)

    def elapsed_time(self, end: _Event) -> float:
        return (end.ns - self.ns) / 1e6


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> _Gpu:
    found = _Gpu()
    monkeypatch.setattr(timing, "_event", found.event)
    monkeypatch.setattr(timing, "_wait", found.sleep)
    monkeypatch.setattr(timing.torch.cuda, "synchronize", found.synchronize)
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: found.now_ns)
    return found


def test_a_gpu_that_waits_first_shows_what_it_computes_and_the_processor_what_it_launches(gpu: _Gpu) -> None:
    steps = [lambda: gpu.launch(3_000_000, 1_000_000), lambda: gpu.launch(500_000, 4_000_000)]
    clock = timing.CudaClock()
    assert clock.times_ns(steps)[2:] == [3_000_000, 500_000]  # it has waited for less than launching takes, this first time
    assert clock.times_ns(steps) == [1_000_000, 4_000_000, 3_000_000, 500_000]
    assert gpu.waits[-1] == 1.5 * 3_500_000


def test_a_gpu_that_does_not_wait_first_waits_for_the_processor(gpu: _Gpu) -> None:
    steps = [lambda: gpu.launch(3_000_000, 1_000_000), lambda: gpu.launch(500_000, 4_000_000)]
    assert timing.CudaClock(ahead=False).times_ns(steps)[:2] == [4_000_000, 4_000_000]
    assert gpu.waits == []
