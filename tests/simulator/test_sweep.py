"""The sweep over arrays has the curves of the oracle, which goes object by object: every time, byte and kind."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from soap.cluster.topology import Topology
from soap.model.graph import Footprint, OperatorGraph
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


@st.composite
def with_footprints(draw: st.DrawFn) -> tuple[OperatorGraph, Topology, Strategy]:
    """A case in which it is known of some operators what autograd keeps for them, takes as it is, and gives few numbers to, and which of
    their outputs have the memory of inputs."""
    graph, topology, chosen = draw(cases(max_moves=6, max_tiles=8, servers=True, ports=True))
    found: dict[str, tuple[Footprint, ...]] = {}
    for op in graph.operators:
        places = st.sets(st.integers(0, len(op.inputs) + len(op.parameters) + len(op.outputs) - 1)).map(frozenset)
        keeps, in_rows, spread = draw(places), draw(places), draw(places)
        pairs = st.sampled_from([(output, place) for output in range(len(op.outputs)) for place in range(len(op.inputs))])
        views = draw(st.sets(pairs).map(frozenset)) if op.inputs else frozenset()
        if draw(st.booleans()):
            found[op.name] = (Footprint(32, 16, draw(st.integers(-16, 16)), keeps, in_rows=in_rows, spread=spread, views=views),)
    return replace(graph, footprints=found), topology, chosen


@settings(suppress_health_check=list(HealthCheck))
@given(case=st.one_of(cases(max_moves=6, max_tiles=8, servers=True, ports=True), with_footprints()))
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
