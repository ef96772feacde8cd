from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from soap.profiles.roofline import RooflineCosts
from soap.search.partial import PartialBound, State
from soap.search.space import build_space
from soap.simulator.simulate import Simulator
from soap.strategy import Strategy
from tests.graph_builder import mlp
from tests.simulator.examples import PointCosts
from tests.strategies import cluster, graphs, topologies


@given(graphs(max_moves=5), topologies(max_devices=3), st.booleans(), st.integers(0, 2**20))
@settings(max_examples=60, deadline=None)
def test_no_strategy_that_begins_so_is_below(graph, topology, points, seed) -> None:  # type: ignore[no-untyped-def]
    costs = PointCosts(1000) if points else RooflineCosts(topology)
    bound = PartialBound(build_space(graph, topology.device_count), topology, costs)
    simulator, rng = Simulator(graph, topology, costs), random.Random(seed)
    for _ in range(8):
        chosen: list[int] = []
        states: list[State] = []
        for choices in bound.choices:
            choice = rng.randrange(len(choices))
            states.append(bound.assign(states, chosen, choice))
            chosen.append(choice)
        configs = [own[i].config for own, i in zip(bound.choices, chosen, strict=True)]
        strategy = Strategy({op.name: config for op, config in zip(graph.operators, configs, strict=True)})
        bounds = [state.bound_ns for state in states]
        assert bounds == sorted(bounds)
        assert bounds[-1] <= simulator.makespan_ns(strategy)


def test_where_nobody_waits_the_bound_is_the_time() -> None:
    graph, topology = mlp(), cluster([2])
    costs = RooflineCosts(topology)
    bound = PartialBound(build_space(graph, 2), topology, costs)
    single = [next(i for i, own in enumerate(choices) if own.config.devices == (1,)) for choices in bound.choices]
    states: list[State] = []
    for position, choice in enumerate(single):
        states.append(bound.assign(states, single[:position], choice))
    strategy = Strategy({op.name: own[i].config for op, own, i in zip(graph.operators, bound.choices, single, strict=True)})
    assert states[-1].bound_ns <= Simulator(graph, topology, costs).makespan_ns(strategy) < 1.25 * states[-1].bound_ns
