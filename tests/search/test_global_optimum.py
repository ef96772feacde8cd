"""The search finds the global optimum of small nets: branch and bound says what that is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from soap.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.search import search
from soap.search.dynamic import dynamic_strategy
from soap.search.exhaustive import branch_and_bound, strategy_count
from soap.search.space import build_space
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.simulate import Simulator
from tests.search.small_nets import lenet, rnnlm
from tests.strategies import cluster

SEEDS, ENOUGH = 100, 95


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("net", "device_count", "budget"), [(lenet, 2, 2000), (lenet, 3, 2000), (rnnlm, 2, 500)])
def test_the_global_optimum_is_found(net: Callable[[], OperatorGraph], device_count: int, budget: int) -> None:
    graph, topology = net(), cluster([device_count])
    costs = RooflineCosts(topology)
    simulator = Simulator(graph, topology, costs)
    evaluator, space = IncrementalSimulator(simulator), build_space(graph, device_count)
    dynamic = dynamic_strategy(space, topology, costs)
    assert strategy_count(space) > 10**6
    optimum = branch_and_bound(space, topology, costs, evaluator, incumbent=dynamic)
    assert optimum.cost_ns == simulator.makespan_ns(optimum.strategy)
    found = [
        search(graph, topology, evaluator, budget=budget, seed=seed, further_starts={"dynamic": lambda: dynamic}).cost_ns
        for seed in range(SEEDS)
    ]
    count = sum(cost_ns <= optimum.cost_ns for cost_ns in found)  # a shuffled placement may be better still
    print(f"{graph.name} on {device_count} devices: {optimum.cost_ns} ns found with {count} of {SEEDS} seeds")
    assert count >= ENOUGH
