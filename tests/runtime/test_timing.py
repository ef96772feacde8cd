"""Clocks and samples: each step has a time, medians are of one part, and repeating ends when the median is known or the time is over."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch

from soap.runtime import timing
from soap.runtime.timing import LEAST_REPETITIONS, MOST_REPETITIONS, CpuClock, clock_for, is_settled, repeat, sample


def test_every_step_runs_once_and_has_a_time() -> None:
    ran: list[int] = []
    times = CpuClock().times_ns([lambda: ran.append(1), lambda: ran.append(2)])
    assert ran == [1, 2]
    assert len(times) == 2 and all(time > 0 for time in times)


def test_a_process_with_half_a_core_takes_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 10_000, 100))
    monkeypatch.setattr(timing.time, "thread_time_ns", lambda: next(ticks))
    assert CpuClock(1, 1.0).times_ns([lambda: None]) == [100]
    assert CpuClock(1, 0.5).times_ns([lambda: None]) == [200]


def test_several_threads_are_timed_by_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 10_000, 7))
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: next(ticks))
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
