"""What engines share: the same results as with one's own, worked out once, and let go with what it was for."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from soap.profiles.roofline import RooflineCosts
from soap.simulator.compiled import growing, lists
from soap.simulator.compiled.growing import Growing, GrowingColumns
from soap.simulator.cut_operators import alike
from soap.simulator.drawn_engine import DrawnEngine, make_engine
from soap.simulator.draws import Draws
from soap.simulator.engine import Engine
from soap.simulator.memory.memory_sum import MemorySum
from soap.simulator.shared import Shared
from soap.strategy.classical import CLASSICAL
from soap.strategy.config import Strategy
from tests.extent import FEW, USUAL
from tests.graph_builder import mlp, transformer
from tests.simulator.compiled.agreement import compiled_tasks, most_bytes
from tests.simulator.compiled.walks import Walk, check, walks
from tests.simulator.examples import ExampleSpreads
from tests.strategies import CPU, cluster

NAMES = ("data_parallel", "model_parallel", "megatron", "one_weird_trick", "single_device")


class Counted(RooflineCosts):
    """Counts the questions about tiles and updates."""

    asked = 0

    def forward_ns(self, *question) -> int:  # type: ignore[no-untyped-def]
        self.asked += 1
        return super().forward_ns(*question)

    def update_ns(self, *question) -> int:  # type: ignore[no-untyped-def]
        self.asked += 1
        return super().update_ns(*question)


def loaded_ns(engine: Engine, strategy: Strategy) -> int:
    engine.load(strategy)
    return engine.simulate()


@pytest.mark.parametrize("draws", [None, 3])
def test_another_engine_asks_for_nothing_again_and_simulates_the_same(draws: int | None) -> None:
    graph, topology = transformer(), cluster([2, 2], CPU)
    costs = Counted(topology)
    drawn = None if draws is None else Draws(ExampleSpreads(), draws)
    shared = Shared(graph, topology, costs)
    strategies = [CLASSICAL[name](graph, topology) for name in NAMES]
    first = make_engine(shared, drawn)
    times = [loaded_ns(first, strategy) for strategy in strategies]
    assert costs.asked > 0
    asked = costs.asked
    second = make_engine(shared, drawn)
    assert [loaded_ns(second, strategy) for strategy in reversed(strategies)] == times[::-1]  # other numbers of variants and regions
    assert costs.asked == asked
    alone = make_engine(Shared(graph, topology, RooflineCosts(topology)), drawn)
    assert [loaded_ns(alone, strategy) for strategy in strategies] == times
    second.load(strategies[-1])
    second.simulate()
    assert compiled_tasks(second) == compiled_tasks(alone)


def test_engines_of_other_draws_share_all_but_what_is_drawn() -> None:
    graph, topology = mlp(), cluster([2, 2], CPU)
    costs = Counted(topology)
    shared = Shared(graph, topology, costs)
    strategy = CLASSICAL["data_parallel"](graph, topology)
    usual_ns = loaded_ns(Engine(shared), strategy)
    asked = costs.asked
    for count in (2, 5):
        engine = DrawnEngine(shared, Draws(ExampleSpreads(), count))
        alone = DrawnEngine(Shared(graph, topology, RooflineCosts(topology)), Draws(ExampleSpreads(), count))
        assert loaded_ns(engine, strategy) == loaded_ns(alone, strategy)
        assert engine.usual_ns == usual_ns and engine.times_ns().tolist() == alone.times_ns().tolist()
    assert costs.asked == asked


@pytest.mark.slow
def test_draws_that_nobody_has_any_more_are_let_go() -> None:
    graph, topology = mlp(), cluster([2, 2], CPU)
    costs = RooflineCosts(topology)
    shared = Shared(graph, topology, costs)
    draws = Draws(ExampleSpreads(), 2)
    engine = DrawnEngine(shared, draws)
    loaded_ns(engine, CLASSICAL["data_parallel"](graph, topology))
    times = [made.times for made in engine.variants.made]
    assert all(len(own._drawn) == 1 for own in times)
    del draws, engine
    gc.collect()
    assert not any(len(own._drawn) for own in times)


def test_memory_of_variants_is_the_same_with_others_numbers() -> None:
    graph, topology = transformer(), cluster([2, 2])
    costs = RooflineCosts(topology)
    shared = Shared(graph, topology, costs)
    strategies = [CLASSICAL[name](graph, topology) for name in NAMES]

    def bounds(engine: Engine, order: list[Strategy]) -> dict[int, list[int]]:
        memory, found = MemorySum(engine, topology.memory_limits), {}
        for strategy in order:
            loaded_ns(engine, strategy)
            found[strategies.index(strategy)] = most_bytes(memory)
        return found

    one, other = (Engine(shared) for _ in range(2))
    alone = bounds(Engine(Shared(graph, topology, costs)), strategies)
    assert bounds(one, strategies) == alone == bounds(other, strategies[::-1])


def test_threads_that_ask_at_the_same_time_get_the_same() -> None:
    graph, topology = transformer(), cluster([2, 2], CPU)
    costs = RooflineCosts(topology)
    shared, threads = Shared(graph, topology, costs), 4
    strategies = [CLASSICAL[name](graph, topology) for name in NAMES]

    def times(turn: int) -> list[int]:
        engine = Engine(shared)
        found = {i: loaded_ns(engine, strategies[i]) for i in np.roll(range(len(strategies)), turn).tolist()}
        return [found[i] for i in range(len(strategies))]

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(times, range(threads)))
    alone = Engine(Shared(graph, topology, costs))
    assert found == [[loaded_ns(alone, strategy) for strategy in strategies]] * threads


@settings(FEW, suppress_health_check=list(HealthCheck))
@given(walks())
def test_walks_whose_arrays_are_full_again_and_again(walk: Walk) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing, "FIRST_ROOM", 1)
        patch.setattr(lists, "FIRST_TABLE", 2)
        check(walk, afresh=True, draws=Draws(ExampleSpreads(), 2))


def test_room_is_the_same_until_it_is_full() -> None:
    values = Growing(np.int64)
    room = values.room
    values.add(range(growing.FIRST_ROOM))
    assert values.room is room and values.size == growing.FIRST_ROOM
    assert values.add([7]) == growing.FIRST_ROOM and values.room is not room
    assert values.array().tolist() == [*range(growing.FIRST_ROOM), 7]


def test_columns_stay_where_they_are() -> None:
    table, expected = GrowingColumns(2, np.int64), np.zeros((2, 0), np.int64)
    for count in (3, growing.FIRST_ROOM, 5):
        columns = np.arange(2 * count).reshape(2, count)
        table.add(columns)
        expected = np.concatenate([expected, columns], axis=1)
        assert table.room[:, : table.size].tolist() == expected.tolist()


@given(st.integers(1, 3), st.lists(st.lists(st.integers(0, 1), min_size=3, max_size=3), min_size=1, max_size=9))
@USUAL
def test_alike_are_equal_rows(width: int, rows: list[list[int]]) -> None:
    table = np.array(rows, np.int64)[:, :width]
    firsts, place = alike(table)
    distinct = list(dict.fromkeys(map(tuple, table.tolist())))
    assert [tuple(table[first].tolist()) for first in firsts] == distinct
    assert [distinct[kind] for kind in place] == list(map(tuple, table.tolist()))
    assert firsts == sorted(firsts)
