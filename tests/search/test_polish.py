from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given

from benchmarks.optimality import locally_optimal, small_cluster
from benchmarks.oracles.exhaustive import Neighbour, best_neighbour
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.search import search
from soap.search.options import SearchOptions
from soap.search.polish import MOVE, polish, structured_count
from soap.search.space import build_space
from soap.simulator.engine import Engine
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.shared import Shared
from soap.simulator.simulate import Simulator
from soap.strategy.classical import random_strategy, single_device
from soap.strategy.config import OpConfig, Strategy
from tests.extent import FEW, often
from tests.graph_builder import convnet, mlp, transformer
from tests.search.toys import ManyCalls, TileCosts, layers
from tests.simulator.examples import PointCosts
from tests.strategies import cases, cluster


def held(simulator: Simulator, strategy: Strategy) -> Engine:
    engine = Engine(Shared(simulator.graph, simulator.topology, simulator.costs))
    engine.load(strategy)
    engine.simulate()
    return engine


@given(cases(max_moves=3, max_devices=3, max_tiles=4))
@FEW
def test_what_was_polished_has_no_better_neighbour(case: tuple) -> None:  # type: ignore[type-arg]
    graph, topology, strategy = case
    simulator = Simulator(graph, topology, PointCosts(1))
    space = build_space(graph, topology.device_count)
    before_ns = simulator.makespan_ns(strategy)
    taken: list[int] = []
    outcome = polish(held(simulator, strategy), space, simulator.overflow_bytes, accepted=lambda _, cost_ns: taken.append(cost_ns))
    assert outcome.locally_optimal
    assert outcome.cost_ns == simulator.makespan_ns(outcome.strategy) <= before_ns
    assert [before_ns, *taken] == sorted({before_ns, *taken}, reverse=True) and [before_ns, *taken][-1] == outcome.cost_ns
    assert best_neighbour(simulator, space, outcome.strategy) is None


@pytest.mark.slow
@pytest.mark.parametrize("make", often([mlp, convnet], [mlp]))
def test_neighbours_that_do_not_fit_are_left_out(make: Callable[[], OperatorGraph]) -> None:
    graph, topology = make(), cluster([2, 2])
    simulator = Simulator(graph, topology, ManyCalls(topology))
    space = build_space(graph, 4)
    start = single_device(graph, topology, 1)
    first = graph.operators[0].name
    refused: list[Strategy] = []

    class Limited:
        """The first operator is said not to fit on device 0."""

        def makespan_ns(self, strategy: Strategy) -> int:
            return simulator.makespan_ns(strategy)

        def overflow_bytes(self, strategy: Strategy) -> int:
            lacking = int(0 in strategy.operators[first].devices)
            refused.extend([strategy] * lacking)
            return lacking

    limited = Limited()
    outcome = polish(held(simulator, start), space, limited.overflow_bytes)
    assert limited.overflow_bytes(outcome.strategy) == 0 and best_neighbour(limited, space, outcome.strategy) is None
    assert refused


def test_the_best_neighbour_is_the_best_of_all() -> None:
    graph = layers(3, rows=4)
    costs = TileCosts(graph, edge_ns=100)
    space = build_space(graph, 2)
    found = best_neighbour(costs, space, single_device(graph, cluster([2])))
    assert found == Neighbour("layer.0", OpConfig((2,), (0, 1)), 600 + 2 * 1200 + 100)
    split = Strategy(dict.fromkeys(("layer.0", "layer.1", "layer.2"), OpConfig((2,), (0, 1))))
    assert best_neighbour(costs, space, split) is None


@pytest.mark.long
@pytest.mark.slow
def test_polishing_is_the_same_every_time_and_stops_at_its_limit() -> None:
    graph, topology = transformer(), cluster([2, 2])
    simulator = Simulator(graph, topology, RooflineCosts(topology))
    space, start = build_space(graph, 4), random_strategy(graph, topology, random.Random(1))
    runs = [polish(held(simulator, start), space, simulator.overflow_bytes) for _ in range(2)]
    assert runs[0] == runs[1] and runs[0].locally_optimal
    assert runs[0].compared > structured_count(space) - len(graph.operators)
    short = polish(held(simulator, start), space, simulator.overflow_bytes, limit=50)
    assert not short.locally_optimal and short.compared <= 50
    assert runs[0].cost_ns < short.cost_ns <= simulator.makespan_ns(start)


@pytest.mark.slow
def test_a_search_ends_locally_optimal() -> None:
    graph, topology = transformer(layers=1), cluster([4])
    simulator = Simulator(graph, topology, ManyCalls(topology))
    evaluator = IncrementalSimulator(simulator)
    plain = search(graph, topology, evaluator, SearchOptions(budget=20, pipelines=False), polish_up_to=0)
    assert not plain.locally_optimal and plain.polished == 0
    assert best_neighbour(evaluator, build_space(graph, 4), plain.strategy) is not None
    result = search(graph, topology, evaluator, SearchOptions(budget=20, pipelines=False))
    assert result.locally_optimal and result.cost_ns < plain.cost_ns
    assert result.cost_ns == simulator.makespan_ns(result.strategy)
    assert best_neighbour(evaluator, build_space(graph, 4), result.strategy) is None
    rows = [row for row in result.rows if row.phase == MOVE]
    assert rows and all(row.accepted and row.fits and row.best_ns == row.cost_ns for row in rows) and rows[-1].cost_ns == result.cost_ns
    assert result.rows[: -len(rows)] == plain.rows and result.polished > structured_count(build_space(graph, 4))


def test_ctrl_c_while_polishing_keeps_what_was_taken() -> None:
    graph, topology = transformer(layers=1), cluster([4])
    simulator = Simulator(graph, topology, ManyCalls(topology))

    class Stopping(IncrementalSimulator):
        """Presses Ctrl-C when the third better strategy is about to be taken."""

        questions = 0

        def engine_for(self, strategy: Strategy) -> Engine | None:
            engine = super().engine_for(strategy)
            assert engine is not None
            take = engine.accept

            def accept() -> None:
                self.questions += 1
                if self.questions == 3:
                    raise KeyboardInterrupt
                take()

            engine.accept = accept  # type: ignore[method-assign]
            return engine

    result = search(graph, topology, Stopping(simulator), SearchOptions(budget=20, pipelines=False))
    assert result.interrupted and not result.locally_optimal
    assert sum(row.phase == MOVE for row in result.rows) == 2
    assert result.cost_ns == simulator.makespan_ns(result.strategy) == result.rows[-1].cost_ns


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", often(["alexnet", "rnntc", "rnnlm", "lm"], {"alexnet", "rnntc"}))
def test_tiny_zoo_nets_end_locally_optimal(name: str) -> None:
    """``benchmarks.optimality`` looks at all of them, on 8 devices, too."""
    optimal, compared = locally_optimal(f"{name}:tiny", small_cluster(4))
    assert optimal and compared > 0
