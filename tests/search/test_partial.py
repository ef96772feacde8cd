from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.oracles.partial import UNDECIDED, PartialBound
from soap.profiles.roofline import RooflineCosts
from soap.search.space import build_space
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy
from tests.graph_builder import mlp
from tests.simulator.examples import PointCosts
from tests.strategies import cluster, graphs, topologies


def strategy_of(bound: PartialBound, chosen: list[int]) -> Strategy:
    """The strategy of which everything is decided."""
    operators = zip(bound.choices.graph.operators, bound.choices.of, chosen, strict=True)
    return Strategy({op.name: own[choice].config for op, own, choice in operators})


@given(graphs(max_moves=5), topologies(max_devices=3), st.booleans(), st.integers(0, 2**20))
def test_no_strategy_with_these_configurations_is_below(graph, topology, points, seed) -> None:  # type: ignore[no-untyped-def]
    costs = PointCosts(1000) if points else RooflineCosts(topology)
    bound = PartialBound(build_space(graph, topology.device_count), topology, costs)
    simulator, rng = Simulator(graph, topology, costs), random.Random(seed)
    for _ in range(8):
        chosen = [rng.randrange(len(choices)) for choices in bound.choices.of]
        makespan_ns = simulator.makespan_ns(strategy_of(bound, chosen))
        order = rng.sample(range(len(chosen)), len(chosen))
        for position in order:
            assert bound.bound_ns(chosen) <= makespan_ns
            chosen[position] = UNDECIDED
        assert bound.bound_ns(chosen) <= makespan_ns


def test_where_nobody_waits_the_bound_is_the_time() -> None:
    graph, topology = mlp(), cluster([2])
    costs = RooflineCosts(topology)
    bound = PartialBound(build_space(graph, 2), topology, costs)
    single = [next(i for i, own in enumerate(choices) if own.config.devices == (1,)) for choices in bound.choices.of]
    makespan_ns = Simulator(graph, topology, costs).makespan_ns(strategy_of(bound, single))
    assert bound.bound_ns(single) <= makespan_ns < 1.25 * bound.bound_ns(single)


def test_each_operator_is_decided_once_and_beside_those_before() -> None:
    graph, topology = mlp(), cluster([2])
    bound = PartialBound(build_space(graph, 2), topology, RooflineCosts(topology))
    order = bound.order()
    assert sorted(order) == list(range(len(graph.operators)))
    heavy = [work_ns + update_ns for work_ns, update_ns in zip(bound.work_ns, bound.update_ns, strict=True)]
    assert heavy[order[0]] == max(heavy)
    assert all(any(abs(position - known) == 1 for known in order[:i]) for i, position in enumerate(order) if i)  # a chain
