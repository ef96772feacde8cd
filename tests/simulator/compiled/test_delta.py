"""Proposals on the compiled simulator against simulations from the ground up: every task after every edit that is accepted or rejected."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from soap import api
from soap.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.simulator.engine import Engine
from soap.strategies import random_config
from soap.strategy import OpConfig, Strategy, SyncConfig
from soap.topology import Topology
from tests.simulator.compiled.agreement import Played, compiled_tasks, reference_tasks
from tests.strategies import cases, configs


class Edit(NamedTuple):
    """A proposal, and whether it is accepted."""

    operator: str
    config: OpConfig
    accepted: bool


Walk = tuple[OperatorGraph, Topology, Strategy, list[Edit]]


@st.composite
def walks(draw: st.DrawFn, *, max_moves: int = 6, max_tiles: int = 8, max_edits: int = 6) -> Walk:
    """A strategy and a sequence of edits of it."""
    graph, topology, strategy = draw(cases(max_moves=max_moves, max_tiles=max_tiles, servers=True))
    edits = []
    for _ in range(draw(st.integers(1, max_edits))):
        op = draw(st.sampled_from(graph.operators))
        config = draw(configs(op, topology.device_count, max_tiles=max_tiles))
        edits.append(Edit(op.name, config, draw(st.booleans())))
    return graph, topology, strategy, edits


def makespan_of(tasks: dict[int, Played]) -> int:
    return max(end for _, _, _, end, _ in tasks.values())


def check(walk: Walk, *, afresh: bool) -> None:
    """``afresh``: simulate every proposal with another engine as well, from the ground up."""
    graph, topology, strategy, edits = walk
    costs = RooflineCosts(topology)
    engine = Engine(graph, topology, costs)
    full = Engine(graph, topology, costs) if afresh else engine
    engine.load(strategy)
    engine.simulate()
    current = reference_tasks(graph, topology, costs, strategy)
    for edit in edits:
        edited = strategy.with_operator(edit.operator, edit.config)
        expected = reference_tasks(graph, topology, costs, edited)
        assert engine.propose(edit.operator, edit.config) == makespan_of(expected)
        if edit.accepted:
            engine.accept()
            strategy, current = edited, expected
        else:
            engine.reject()
        assert engine.makespan_ns == makespan_of(current)
        assert compiled_tasks(engine) == current
        if afresh:
            full.load(edited)
            assert full.simulate() == makespan_of(expected)
            assert compiled_tasks(full) == expected
    engine.simulate()  # what the edits have left behind is a whole task graph
    assert compiled_tasks(engine) == current


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(walks())
def test_random_walks(walk: Walk) -> None:
    check(walk, afresh=True)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["alexnet", "dlrm", "gpt", "rnntc"])
def test_walks_over_models(model: str) -> None:
    """Data parallelism as the start, half of the parameters with servers, then a dozen edits."""
    graph, topology = api.load(f"zoo:{model}:tiny", plan_only=True).graph, api.load_cluster("p100-4x4")
    draw = random.Random(0)
    start = api.classical("data_parallel", graph, topology)
    strategy = Strategy(start.operators, {t.name: SyncConfig("parameter_server", 2) for t in graph.parameters[::2]})
    edits = []
    for _ in range(12):
        op = draw.choice(graph.operators)
        edits.append(Edit(op.name, random_config(op, topology.device_count, draw), draw.random() < 0.5))
    check((graph, topology, strategy, edits), afresh=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(5))  # parts, for the tests of two processes
@settings(max_examples=2_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(walk=walks(max_moves=2, max_tiles=4, max_edits=2))
def test_many_short_walks(part: int, walk: Walk) -> None:
    check(walk, afresh=False)
