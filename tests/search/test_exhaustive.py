from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.oracles.exhaustive import all_strategies, best_neighbour, branch_and_bound, exhaustive_search, strategy_count
from soap.errors import InfeasibleError, StrategyError
from soap.profiles.roofline import RooflineCosts
from soap.search.space import build_space
from soap.simulator.simulate import Simulator
from soap.strategy.classical import single_device
from soap.strategy.config import OpConfig, Strategy
from tests.extent import FEW, so_many
from tests.graph_builder import mlp, transformer
from tests.search.toys import TableCosts, TileCosts, key_of, layers
from tests.simulator.examples import PointCosts, chain
from tests.strategies import cluster, graphs


def test_every_strategy_is_counted_once() -> None:
    space = build_space(layers(2), 2)
    strategies = list(all_strategies(space))
    assert strategy_count(space) == len(strategies) == len({key_of(s) for s in strategies}) == 16
    assert [s.operators["layer.0"] for s in strategies[::4]] == [
        OpConfig((1,), (0,)),
        OpConfig((1,), (1,)),
        OpConfig((2,), (0, 1)),
        OpConfig((1,), (0, 1), 2),
    ]


def test_optimum_is_the_least_of_all() -> None:
    graph, costs = layers(2, rows=3), TableCosts(4)
    found = exhaustive_search(graph, 3, costs)
    every = [costs.cost(s)[0] for s in all_strategies(build_space(graph, 3, every_degree=True))]
    assert found.cost_ns == min(every) and found.evaluations == len(every)
    assert costs.cost(found.strategy) == (found.cost_ns, 0)


def test_degrees_that_divide_nothing_are_tried() -> None:
    found = exhaustive_search(layers(1, rows=5), 5, TileCosts(layers(1, rows=5)))
    assert (found.cost_ns, found.strategy.operators["layer.0"].degrees) == (1200 // 5, (5,))
    space = build_space(layers(1, rows=7), 5, every_degree=True)
    assert {s.operators["layer.0"].degrees for s in all_strategies(space)} == {(1,), (2,), (3,), (4,), (5,)}


def test_what_does_not_fit_is_no_optimum() -> None:
    graph = layers(1)
    assert exhaustive_search(graph, 2, TileCosts(graph, device_bytes=600)).strategy.operators["layer.0"].degrees == (2,)
    with pytest.raises(InfeasibleError, match="the closest lacks 100 bytes; take devices with more memory"):
        exhaustive_search(graph, 2, TileCosts(graph, device_bytes=500))


def test_large_spaces_are_refused() -> None:
    graph = transformer()
    message = r"^model 'transformer' on 4 devices has \d+ strategies or more; expected at most 200000 to try them all"
    with pytest.raises(StrategyError, match=message):
        exhaustive_search(graph, 4, TileCosts(graph))


@pytest.mark.slow
@given(graphs(max_moves=1), st.integers(2, 3), st.booleans(), st.booleans())
@FEW
def test_branch_and_bound_finds_what_enumeration_finds(graph, device_count, points, split_hosts) -> None:  # type: ignore[no-untyped-def]
    topology = cluster([1] * device_count if split_hosts else [device_count])
    costs = PointCosts(1000) if points else RooflineCosts(topology)
    space = build_space(graph, device_count, every_degree=True)
    assume(strategy_count(space) <= so_many(600, 3000))
    simulator = Simulator(graph, topology, costs)
    best = exhaustive_search(graph, device_count, simulator)
    found = branch_and_bound(space, topology, costs, simulator)
    assert found.cost_ns == best.cost_ns == simulator.makespan_ns(found.strategy)
    assert found.evaluations <= best.evaluations
    known = branch_and_bound(space, topology, costs, simulator, incumbent=best.strategy)
    assert known.cost_ns == best.cost_ns and known.strategy == best.strategy


def test_branch_and_bound_leaves_most_out() -> None:
    graph, topology = mlp(), cluster([2])
    costs = RooflineCosts(topology)
    simulator = Simulator(graph, topology, costs)
    space = build_space(graph, 2)
    found = branch_and_bound(space, topology, costs, simulator)
    assert found.evaluations < strategy_count(space) / 20
    assert best_neighbour(simulator, space, found.strategy) is None


@pytest.mark.long
def test_branch_and_bound_minds_memory_and_its_limit() -> None:
    graph, topology = mlp(), cluster([2])
    costs = RooflineCosts(topology)
    space, simulator = build_space(graph, 2), Simulator(graph, topology, costs)

    class Small:
        """Only what does not use device 0 fits."""

        def makespan_ns(self, strategy: Strategy) -> int:
            return simulator.makespan_ns(strategy)

        def overflow_bytes(self, strategy: Strategy) -> int:
            return 7 * any(0 in config.devices for config in strategy.operators.values())

    found = branch_and_bound(space, topology, costs, Small())
    assert found.strategy == single_device(graph, topology, 1)
    with pytest.raises(StrategyError, match=r"^model 'mlp': more than 50 partial strategies to look at"):
        branch_and_bound(space, topology, costs, simulator, limit=50)


def test_branch_and_bound_says_if_nothing_fits() -> None:
    graph, topology = chain(2, 2, 2), cluster([2])
    simulator = Simulator(graph, topology, PointCosts())

    class Full:
        makespan_ns = staticmethod(simulator.makespan_ns)

        def overflow_bytes(self, strategy: Strategy) -> int:
            return 7

    with pytest.raises(InfeasibleError, match=r"^no strategy of model 'model' fits into memory: take devices with more memory"):
        branch_and_bound(build_space(graph, 2), topology, PointCosts(), Full())
