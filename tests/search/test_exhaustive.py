from __future__ import annotations

import pytest

from soap.errors import InfeasibleError, StrategyError
from soap.search.exhaustive import all_strategies, exhaustive_search, strategy_count
from soap.search.space import build_space
from soap.strategy import OpConfig
from tests.graph_builder import transformer
from tests.search.toys import TableCosts, TileCosts, key_of, layers


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
