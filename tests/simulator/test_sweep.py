"""The sweep over arrays has the curves of the oracle, which goes object by object: every time, byte and kind."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.simulator.lowering import build_plan, lower
from soap.simulator.memory import sweep
from soap.simulator.memory.plan_arrays import plan_arrays
from soap.simulator.memory.played import played_of
from soap.simulator.reference import simulate
from soap.simulator.tasks import Schedule, TaskGraph
from soap.strategy.config import Strategy
from tests.graph_builder import transformer
from tests.micro_batches import drawn_pipeline
from tests.simulator.reference_memory import residency
from tests.strategies import CPU, cases, cluster


def check(tasks: TaskGraph, schedule: Schedule, states: int = 2) -> None:
    expected, found = residency.memory_over_time(tasks, schedule, states), sweep.memory_over_time(tasks, schedule, states)
    for one, other in zip(expected, found, strict=True):
        assert one.times_ns.tolist() == other.times_ns.tolist() and one.bytes_held.tolist() == other.bytes_held.tolist()
        assert dict(one.at_peak) == dict(other.at_peak)
        assert all(held.tolist() == other.by_kind[kind].tolist() for kind, held in one.by_kind.items())
    arrays = plan_arrays(tasks.plan)
    ledger = sweep.swept(tasks.plan, arrays, played_of(tasks, schedule), tasks.topology, states)
    assert ledger.peaks().tolist() == [curve.peak_bytes for curve in expected]


@settings(suppress_health_check=list(HealthCheck))
@given(case=cases(max_moves=6, max_tiles=8, servers=True, ports=True))
def test_any_strategy(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, strategy = case
    tasks = lower(build_plan(graph, strategy, topology), topology, RooflineCosts(topology))
    check(tasks, simulate(tasks))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved:2", "zb-h1"])
def test_pipelines(schedule: str) -> None:
    """Borders, devices and splits inside stages at random; backward passes in two, too."""
    graph, topology = transformer(), cluster([2, 2], CPU)
    strategy = drawn_pipeline(graph, schedule, 4, random.Random(5), 4)
    tasks = lower(build_plan(graph, strategy, topology), topology, RooflineCosts(topology))
    check(tasks, simulate(tasks))
