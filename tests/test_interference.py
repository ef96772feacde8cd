"""What communication does to computation: figures between those that were measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from soap.cluster.overheads import NO_COLD_PENALTY, NO_CPU_OVERHEAD, ColdPenalty, CollectiveLatencyFactor, CpuOverhead, Port, Share
from soap.errors import TopologyError


def test_a_share_is_rounded_down() -> None:
    assert [Share(10, 250).busy_ns(ns) for ns in (0, 7, 8)] == [10, 11, 12]


def test_overhead_and_latency_factor_lie_between_what_was_measured() -> None:
    overhead = CpuOverhead(((2, Share(100, 10)), (4, Share(200, 30))), ((4, Share(7, 0)),))
    assert [overhead.of_all_reduce(devices) for devices in (1, 2, 3, 4, 9)] == [(100, 10), (100, 10), (150, 20), (200, 30), (200, 30)]
    assert [overhead.of_exchange(devices) for devices in (2, 8)] == [(7, 0), (7, 0)]
    assert NO_CPU_OVERHEAD.of_all_reduce(4) == NO_CPU_OVERHEAD.of_exchange(4) == Share(0, 0)
    latency_factor = CollectiveLatencyFactor(all_reduce=((2, 1.0), (4, 3.0)))
    assert [latency_factor.of_all_reduce(devices) for devices in (2, 3, 8)] == [1.0, 2.0, 3.0]
    assert latency_factor.of_exchange(4) == 1.0
    quick = CollectiveLatencyFactor(all_reduce=((4, 0.4),))
    assert [quick.of_tree(4, rounds) for rounds in (2, 3)] == [0.5, 0.4]  # all rounds no less than a message


def test_a_cold_penalty_lasts_as_long_as_was_measured() -> None:
    penalty = ColdPenalty(((100, 50), (200, 60)))
    assert [penalty.longer_ns(ns) for ns in (0, 50, 100, 150, 200, 10**9)] == [0, 25, 50, 55, 60, 60]
    assert NO_COLD_PENALTY.longer_ns(10**9) == 0


WRONG: list[Callable[[], object]] = [
    lambda: Port(0, 0, -1, 0),
    lambda: Port(0, 0, 0, -1),
    lambda: CpuOverhead(((2, Share(-1, 0)),)),
    lambda: CpuOverhead(exchange=((2, Share(0, -1)),)),
    lambda: ColdPenalty(((100, 50), (100, 60))),
    lambda: ColdPenalty(((100, 50), (200, 40))),
    lambda: ColdPenalty(((100, -1),)),
]


@pytest.mark.parametrize("make", WRONG)
def test_what_takes_less_than_nothing_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(TopologyError, match="expected"):
        make()
