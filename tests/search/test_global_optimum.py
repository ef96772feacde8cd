"""The search finds the global optimum of small nets: branch and bound says what that is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from soap.graph import FactorKind, OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.search import search
from soap.search.dynamic import dynamic_strategy
from soap.search.exhaustive import branch_and_bound, strategy_count
from soap.search.space import OperatorSpace, Space, build_space
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.simulate import Simulator
from tests.search.small_nets import lenet, rnnlm
from tests.strategies import cluster

SEEDS, ENOUGH = 100, 95


def without_attributes(space: Space) -> Space:
    """The configurations that split samples and parameters only, without replicas."""
    kinds = (FactorKind.SAMPLE, FactorKind.PARAMETER)
    operators = []
    for op, own in zip(space.graph.operators, space.operators, strict=True):
        kept = [g for g in own.grids if g[0] == 1 and all(n == 1 or f.kind in kinds for f, n in zip(op.factors, g[1:], strict=True))]
        operators.append(OperatorSpace(kept, space.device_count))
    return replace(space, operators=tuple(operators))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("net", "device_count", "budget", "restrict"),
    [(lenet, 2, 2000, None), (lenet, 3, 2000, None), (rnnlm, 2, 500, None), (lenet, 4, 6000, without_attributes)],
)
def test_the_global_optimum_is_found(
    net: Callable[[], OperatorGraph], device_count: int, budget: int, restrict: Callable[[Space], Space] | None
) -> None:
    """With ``restrict`` branch and bound looks at a part of the space, which would take too long as a whole; the search is not told."""
    graph, topology = net(), cluster([2, 2] if device_count == 4 else [device_count])
    costs = RooflineCosts(topology)
    simulator = Simulator(graph, topology, costs)
    evaluator, space = IncrementalSimulator(simulator), build_space(graph, device_count)
    space = restrict(space) if restrict else space
    dynamic = dynamic_strategy(space, topology, costs)
    assert strategy_count(space) > 10**6
    optimum = branch_and_bound(space, topology, costs, evaluator, incumbent=dynamic)
    assert optimum.cost_ns == simulator.makespan_ns(optimum.strategy)
    found = [
        search(graph, topology, evaluator, budget=budget, seed=seed, further_starts={"dynamic": lambda: dynamic}).cost_ns
        for seed in range(SEEDS)
    ]
    count = sum(cost_ns <= optimum.cost_ns for cost_ns in found)  # what lies outside (a shuffled placement) may be better still
    print(f"{graph.name} on {device_count} devices: {optimum.cost_ns} ns found with {count} of {SEEDS} seeds")
    assert count >= ENOUGH
