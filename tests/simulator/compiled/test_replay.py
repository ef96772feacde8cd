"""Given tasks, played by the compiled loop: every start and end is the reference's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.planning import build_plan
from soap.simulator.drawn_times import reference_times_ns, replayed_times_ns
from soap.simulator.draws import DrawnTasks, Draws
from soap.simulator.lowering import lower
from soap.simulator.memory.played import played_of
from soap.simulator.reference import simulate
from soap.simulator.replay import Replay
from soap.simulator.simulate import Simulator
from soap.simulator.tasks import TaskGraph, times_of
from soap.strategy.classical import model_parallel
from soap.strategy.config import Strategy
from soap.strategy.named import named
from tests.extent import MANY
from tests.graph_builder import transformer
from tests.simulator.examples import ExampleSpreads, LaunchedCosts
from tests.strategies import GPU, cases, cluster


def check(tasks: TaskGraph) -> None:
    expected = simulate(tasks)
    replay = Replay(played_of(tasks, expected), tasks.topology)
    for _ in range(2):  # nothing of the first time stays
        assert replay.makespan_ns(times_of(tasks)) == expected.makespan_ns
        start, end = replay.play(times_of(tasks))
        assert np.array_equal(start, expected.start_ns) and np.array_equal(end, expected.end_ns)


@settings(MANY, suppress_health_check=list(HealthCheck))
@given(cases(servers=True, ports=True))
def test_random_cases(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    """With ports, cold penalties, servers, launches and whatever strategies have."""
    graph, topology, strategy = case
    check(lower(build_plan(graph, strategy, topology), topology, LaunchedCosts(topology)))


@pytest.mark.parametrize("name", ["data_parallel", "fsdp", "fsdp+recompute", "megatron:2+zero1"])
def test_draws_of_a_plan_and_of_two_of_its_copies(name: str) -> None:
    graph, topology = transformer(), cluster([4, 4], GPU)
    simulator, draws = Simulator(graph, topology, LaunchedCosts(topology)), Draws(ExampleSpreads(), 3)
    strategy = named(name, graph, topology)
    folded = simulator.run_folded(strategy, nearly=True)
    assert not isinstance(folded, str), folded
    for outcome in (simulator.run(strategy), folded):
        found = replayed_times_ns(outcome, draws)
        assert found == reference_times_ns(outcome, draws) and len(set(found)) > 1


def test_a_draw_s_times_are_those_of_its_tasks() -> None:
    graph, topology = transformer(), cluster([2, 2], GPU)
    outcome = Simulator(graph, topology, LaunchedCosts(topology)).run(model_parallel(graph, topology))
    drawn = DrawnTasks(outcome.tasks, Draws(ExampleSpreads(), 3), outcome.between_hosts)
    for draw in range(3):
        for given_ns, own_ns in zip(drawn.times(draw), times_of(drawn.under(draw)), strict=True):
            assert np.array_equal(given_ns, own_ns)
    assert any(ns > 0 for ns in drawn.times(0).launch) and any(ns > 0 for ns in drawn.times(0).latency)
