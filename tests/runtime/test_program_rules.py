"""Each rule of a program's order keeps to what it says, on any plan, whatever the others do."""

from __future__ import annotations

import random
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.plan import Plan
from soap.plan.running.activity import PlanIndex
from soap.plan.running.epilogue import LossEpilogue, no_epilogue
from soap.plan.running.order import ExecutionOrder, places_of
from soap.runtime.program.actions import ActionKind, forward_entries, in_order
from soap.runtime.program.program import everyone_knows, set_apart, sum_together
from soap.runtime.program.run_order import run_order
from soap.simulator.lowering import build_plan
from soap.strategy.config import Strategy
from tests.graph_builder import mlp
from tests.runtime.plans import plan_of, random_order, split
from tests.simulator.reference_memory import running
from tests.simulator.reference_memory.running import (
    answered_from_afar,
    cut_segments,
    epilogue_last,
    find_activity,
    find_recomputation,
    forward_order,
    model_order_if_nothing_travels,
    sources_late,
    usable_epilogue,
)
from tests.strategies import cases

Case = tuple[OperatorGraph, Topology, Strategy]


def ending(plan: Plan) -> LossEpilogue:
    """The loss alone as an epilogue, whatever it computes: rules ask only which operators belong to it."""
    producer, _ = plan.graph.producers[plan.graph.loss]
    entering = {operand.tensor: 1.0 for operand in plan.graph.operators[producer].inputs if operand.tensor in plan.graph.producers}
    return LossEpilogue(frozenset({producer}), entering)


def made(case: Case) -> Plan:
    graph, topology, strategy = case
    return build_plan(graph, strategy, topology)


@given(cases(), st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_the_order_of_arrays_is_that_of_the_rules(case: Case, rng: random.Random, known: bool, single_tiles: bool) -> None:
    plan = made(case)
    backward = [tile for tile in random_order(plan, rng) if rng.random() < 0.9] if known else []
    order = ExecutionOrder(tuple(random_order(plan, rng)), tuple(backward))
    found, expected = run_order(plan, order, single_tiles=single_tiles), running.run_order(plan, order, single_tiles=single_tiles)
    for name in ("epilogue", "order", "activity", "segments", "segment_of", "turns"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.recomputed == expected.recomputation.tiles and list(found.second_turns) == list(expected.second_turns)


@given(cases(), st.randoms(use_true_random=False))
def test_sources_come_right_before_their_first_readers(case: Case, rng: random.Random) -> None:
    plan = made(case)
    index, order = PlanIndex(plan), random_order(plan, rng)
    late = sources_late(plan, index, order)
    assert sources_late(plan, index, late) == late
    forward_order(plan, index, ExecutionOrder(late, ()), no_epilogue(plan.graph))  # still a topological order of all tiles
    waiting = {tile for tile, _ in index.fetch_of}
    assert [tile for tile in late if tile in waiting] == [tile for tile in order if tile in waiting]
    places = places_of(late)
    for tile in set(order) - waiting:
        holdings = {place for _, place in index.direct.get(tile, ())}
        fetches = [fetch for place in holdings for fetch in index.fetches_from[place]]
        at_home = all(plan.fetches[fetch].device == plan.tiles[tile].device for fetch in fetches)
        if fetches and at_home and not any(key[0] == tile for key in index.partial):
            first = min(places[reader] for fetch in fetches for reader, _ in plan.fetches[fetch].consumers)
            assert all(between not in waiting for between in late[places[tile] : first])


@given(cases(), st.randoms(use_true_random=False))
def test_the_epilogue_comes_last_and_nothing_else_moves(case: Case, rng: random.Random) -> None:
    plan = made(case)
    epilogue, order = ending(plan), random_order(plan, rng)
    found = epilogue_last(plan, order, epilogue)
    belongs = [plan.tiles[tile].operator in epilogue.operators for tile in found]
    assert [key for key, _ in groupby(belongs)] in ([False, True], [True])
    for own in (False, True):
        assert [tile for tile in found if (plan.tiles[tile].operator in epilogue.operators) is own] == [
            tile for tile in order if (plan.tiles[tile].operator in epilogue.operators) is own
        ]


@given(cases(), st.randoms(use_true_random=False))
def test_what_is_set_apart_is_all_there_in_its_order(case: Case, rng: random.Random) -> None:
    plan = made(case)
    epilogue = usable_epilogue(plan, ending(plan))
    actions = list(in_order(forward_entries(plan, places_of(random_order(plan, rng)))))
    parted = set_apart(plan, epilogue, actions)
    assert sorted(map(id, (*parted.before, *parted.sums, *parted.behind))) == sorted(map(id, actions))
    for part in (parted.before, parted.sums, parted.behind):
        assert part == [action for action in actions if any(action is own for own in part)]
    tiles = {action.subject for action in parted.behind if action.kind is ActionKind.TILE}
    assert tiles == {number for number, tile in enumerate(plan.tiles) if tile.operator in epilogue.operators}
    number_sums, together = sum_together(plan, parted.sums)
    assert sorted(number for own in number_sums for number in own) == sorted(action.subject for action in parted.sums)
    for action, own in zip(together, number_sums, strict=True):
        assert action.kind is ActionKind.REDUCE_NUMBERS and number_sums[action.subject] == own
        assert {plan.reductions[number].devices for number in own} == {action.devices}


@given(cases(), st.randoms(use_true_random=False))
def test_answered_tiles_end_segments_and_the_epilogue_has_its_own(case: Case, rng: random.Random) -> None:
    plan = made(case)
    index, epilogue, order = PlanIndex(plan), ending(plan), random_order(plan, rng)
    activity = find_activity(plan, index, [plan.graph.loss])
    answered = answered_from_afar(plan, activity.fetches, activity.reductions)
    last, again = epilogue_last(plan, order, epilogue), find_recomputation(plan, activity.tiles)
    segments = cut_segments(plan, index, last, single_tiles=False, epilogue=epilogue.operators, answered=answered, run=again.run)
    assert sorted(tile for segment in segments for tile in segment.tiles) == sorted(order)
    for segment in segments:
        assert not answered & set(segment.tiles[:-1]) and len({again.run.get(tile) for tile in segment.tiles}) == 1
        assert len(segment.tiles) == 1 or not again.light & set(segment.tiles)
        assert len({plan.tiles[tile].operator in epilogue.operators for tile in segment.tiles}) == 1
        assert {plan.tiles[tile].device for tile in segment.tiles} == {segment.device} and last[segment.start] == segment.tiles[0]


def test_the_model_s_own_order_where_only_gradients_travel() -> None:
    alone, apart = plan_of(mlp(), split((0, 1), b=2), 2), plan_of(mlp(), split((0, 1), b=2), 2, fc1=split((1, 0), b=2))
    for plan, kept in ((alone, False), (apart, True)):
        given_order = ExecutionOrder(tuple(reversed(range(len(plan.tiles)))), (0,))
        found = model_order_if_nothing_travels(plan, given_order, no_epilogue(plan.graph))
        assert (found is given_order) == kept
        assert kept or found == ExecutionOrder(tuple(range(len(plan.tiles))), ())


def test_everyone_knows_only_what_one_sum_over_all_devices_has() -> None:
    plan = plan_of(mlp(), split((0, 1), b=2), 2)
    (number,) = [i for i, own in enumerate(plan.reductions) if len(own.devices) == 2]
    epilogue = LossEpilogue(frozenset({99}), {plan.graph.loss: 1.0})  # as if something came behind it
    assert everyone_knows(plan, epilogue, ((number,),))
    assert not everyone_knows(plan, no_epilogue(plan.graph), ((number,),))
    assert not everyone_knows(plan, epilogue, ())
    assert not everyone_knows(plan, epilogue, ((number,), (number,)))
    assert not everyone_knows(plan, LossEpilogue(frozenset({99}), {plan.graph.loss: 1.0, "other": 2.0}), ((number,),))
    assert not everyone_knows(plan_of(mlp(), split((0, 1), b=2), 3), epilogue, ((number,),))
