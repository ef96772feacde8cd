from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.cluster.topology import Topology
from soap.errors import RuntimeFailure
from soap.model.graph import Footprint, OperatorGraph
from soap.plan.running.order import ExecutionOrder
from soap.plan.syncs.bucketing import sums_of_one
from soap.runtime.program.actions import LEAVING, ActionKind, part_of
from soap.runtime.program.program import Program, compile_program
from soap.runtime.step.step import sync_schedule
from soap.simulator.lowering import build_plan
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.sync import SPARSE_ALL_GATHER, parameter_server
from tests.graph_builder import GraphBuilder, convnet, mlp
from tests.runtime.plans import plan_of, random_order, split, summed
from tests.runtime.traced import traced
from tests.simulator.examples import batch_split, finish
from tests.strategies import cases, cluster

FORTH = {"message": ActionKind.TRANSFER, "exchange": ActionKind.EXCHANGE}
BACK = {"message": ActionKind.RETURN, "exchange": ActionKind.RETURN_EXCHANGE}


def test_data_parallel_is_one_segment_per_rank_and_one_bucket() -> None:
    program = compile_program(plan_of(mlp(), split((0, 1, 2), b=3)))
    assert [segment.device for segment in program.segments] == [0, 1, 2]
    assert [action.kind for action in part_of(program.forward, 1)].count(ActionKind.TILE) == len(program.plan.graph.operators)
    assert [action.kind for action in part_of(program.backward, 1)] == [ActionKind.SEGMENT, ActionKind.SYNC, ActionKind.LOSS]
    (bucket,) = program.plan.syncs
    assert bucket.readers == (0, 1, 2)
    assert sorted(bucket.shards) == list(range(6))


class Unasked(dict[str, tuple[Footprint, ...]]):
    """Footprints that nobody may ask for: to find them operators would have to run."""

    def get(self, *_: object) -> NoReturn:
        raise AssertionError

    __getitem__ = __contains__ = __iter__ = get  # type: ignore[assignment]


def test_a_program_is_made_without_footprints() -> None:
    graph = replace(mlp(), footprints=Unasked())
    assert len(compile_program(plan_of(graph, split((0, 1, 2), b=3))).segments) == 3


def test_segment_begins_at_the_first_consumer_of_what_arrives() -> None:
    program = compile_program(plan_of(mlp(), split((0,)), fc1=split((1,)), act1=split((1,))))
    names = [[program.plan.operator(program.plan.tiles[t]).name for t in segment.tiles] for segment in program.segments]
    assert names == [["fc0", "act0"], ["fc1", "act1"], ["head", "cross_entropy5"]]
    kinds = [action.kind for action in program.backward]
    assert kinds == [ActionKind.SEGMENT, ActionKind.RETURN] * 2 + [ActionKind.SEGMENT, ActionKind.LOSS]


def test_segment_ends_with_what_is_sent() -> None:
    """The second half of the batch stays on device 0, and does not wait for the gradient of the first one, which is sent to device 1."""
    plan = plan_of(mlp(), split((0, 0), b=2), device_count=2, head=split((1, 0), b=2), cross_entropy=split((1, 0), b=2))
    program = compile_program(plan)

    def named(tiles: Iterable[int]) -> list[str]:
        return [f"{plan.operator(plan.tiles[tile]).name}.{plan.tiles[tile].index}" for tile in tiles]

    first, second, *_ = (segment.tiles for segment in program.segments if segment.device == 0)
    assert named(first)[-1] == "act1.0" and named(second)[0] == "act1.1"


def test_segments_run_backward_as_they_are_said_to() -> None:
    """But never before a gradient that they need: the end of the first half is on device 1."""
    plan = plan_of(mlp(), split((0, 0), b=2), device_count=2, head=split((1, 0), b=2), cross_entropy=split((1, 0), b=2))
    tiles = range(len(plan.tiles))
    halves = tuple(sorted(tiles, key=lambda tile: plan.tiles[tile].index))
    ran = []
    for back in ((), halves, tuple(reversed(halves))):
        program = compile_program(plan, ExecutionOrder(halves, back))
        segments = [program.segments[one.subject] for one in program.backward if one.kind is ActionKind.SEGMENT]
        ran.append([(one.device, {plan.tiles[tile].index for tile in one.tiles}) for one in segments])
    there, first, second = (1, {0}), (0, {0}), (0, {1})
    assert ran == [[second, there, first], [there, first, second], [second, there, first]]


def test_single_tiles_for_tracing() -> None:
    program = compile_program(plan_of(convnet(), split((0, 1), b=2)), single_tiles=True)
    assert all(len(segment.tiles) == 1 for segment in program.segments)


def test_tiles_that_wait_for_nothing_come_right_before_their_first_readers() -> None:
    """``of_b`` is read by the loss only, and waits for nothing: it comes behind the others. What others wait for is not put off."""
    g = GraphBuilder()
    b, a = (g.linear(g.input(name, 4, 2), 2, bias=False, name=f"of_{name}") for name in "ba")
    graph = finish(g, g.linear(a, 2, bias=False, name="l1"), b)
    alone, topology = batch_split(graph, [0]), cluster([1, 1])
    for loss, names in ((0, ["of_a", "l1", "of_b", "loss"]), (1, ["of_b", "of_a", "l1", "loss"])):
        chosen = alone.with_operator("loss", OpConfig((1,), (loss,)))
        program = compile_program(build_plan(graph, chosen, topology))
        assert [program.plan.operator(program.plan.tiles[tile]).name for tile in program.order.forward] == names


@pytest.mark.parametrize("local", [False, True])
def test_gradients_go_before_the_backward_pass_is_over(local: bool) -> None:
    """In the order in which they are complete; rows that are collected first are pushed behind it."""
    g = GraphBuilder()
    table = g.parameter("table", 16, 2)
    deep = g.linear(g.linear(g.input("x", 4, 2), 2, bias=False, name="l1"), 2, bias=False, name="l2")
    graph = finish(g, deep, g.embedding(g.input("ids", 4, dtype="int64"), 16, 2, weight=table, name="find"))
    method = parameter_server(2, "host", rows=True) if local else SPARSE_ALL_GATHER
    chosen = batch_split(graph, range(4)).with_parameter("table", method).with_parameter("l2.weight", parameter_server())
    program = compile_program(build_plan(graph, chosen, cluster([2, 2])))
    schedule = sync_schedule(program, 1)
    (segment,) = (i for i, segment in enumerate(program.segments) if segment.device == 1)
    first = ActionKind.COLLECT if local else ActionKind.SYNC
    found = {own.parameter: number for number, own in enumerate(program.plan.syncs)}
    rows, dense, summed = found["table"], found["l2.weight"], found["l1.weight"]
    assert schedule.follow[segment] == ((first, rows), (ActionKind.SYNC, dense), (ActionKind.SYNC, summed))
    assert [schedule.contributions[number] for _, number in schedule.follow[segment]] == [1, 1, 1]
    behind = [(action.kind, action.subject) for action in part_of(program.backward, 1)][1:-1]
    assert behind == [*schedule.follow[segment], *[(ActionKind.SYNC, rows)] * local]


def test_a_sum_need_not_wait_until_a_segment_has_sent_its_gradients_back() -> None:
    """Halves of the first layer are on the other device: their gradients are sent behind the segment of the other layers, whose parameters'
    sum is behind that in the program. Not where all are in one queue."""
    plan = plan_of(mlp(), split((0, 1), b=2), device_count=2, fc0=split((1, 0), b=2))
    first = [number for number, shard in enumerate(plan.shards) if shard.parameter.startswith("fc0")]
    others = [number for number in sorted(plan.synchronized) if number not in first]
    program = compile_program(replace(plan, syncs=(summed(plan, others), summed(plan, first))))
    for rank in (0, 1):
        actions = part_of(program.backward, rank)
        assert {action.kind for action in actions[:-1]} == {ActionKind.SEGMENT, ActionKind.RETURN, ActionKind.SYNC}
        kinds = [action.kind for action in actions]
        long, short = (action.subject for action in actions if action.kind is ActionKind.SEGMENT)
        assert ActionKind.RETURN in kinds[kinds.index(ActionKind.SEGMENT) : kinds.index(ActionKind.SYNC)]
        assert sync_schedule(program, rank).follow == {long: (), short: ((ActionKind.SYNC, 1),)}
        assert sync_schedule(program, rank, messages_apart=True).follow == {long: ((ActionKind.SYNC, 0),), short: ((ActionKind.SYNC, 1),)}


@pytest.mark.parametrize("scattered", [False, True])
def test_sums_of_a_group_stay_in_their_order(scattered: bool) -> None:
    """A gradient that is summed over the same devices comes before the parameters' sum; one that is gathered is made of messages."""
    program = compile_program(plan_of(mlp(), split((0, 1), b=2), device_count=2, fc1=split((0, 1), k=2)))
    number, reduction = next((i, one) for i, one in enumerate(program.plan.reductions) if one.cells)
    if not scattered:
        reductions = tuple(replace(one, cells=()) if one is reduction else one for one in program.plan.reductions)
        program = replace(program, plan=replace(program.plan, reductions=reductions))
    (sync,) = (action for action in program.backward if action.kind is ActionKind.SYNC)
    segment, reduce = part_of(program.backward, 0)[:2]
    assert (segment.kind, reduce.kind, reduce.subject) == (ActionKind.SEGMENT, ActionKind.REDUCE_GRADIENT, number)
    program = replace(program, backward=(segment, reduce, sync))
    assert sync_schedule(program, 0).follow == {segment.subject: ()}
    passing = ((ActionKind.SYNC, sync.subject),) if scattered else ()
    assert sync_schedule(program, 0, messages_apart=True).follow == {segment.subject: passing}


def test_gradients_are_pushed_when_they_are_complete() -> None:
    """By the last readers' segments, on readers and servers alike; through the first reader of each host if they are collected there."""
    graph, topology = mlp(), cluster([2, 2])
    for local in (False, True):
        chosen = batch_split(graph, [2, 3]).with_parameter("fc1.weight", parameter_server(2, "host" if local else "none"))
        program = compile_program(build_plan(graph, chosen, topology))
        ((subject, served),) = ((i, own) for i, own in enumerate(program.plan.syncs) if own.contract.has_servers)
        assert served.readers == (2, 3) and served.leaders == ((2, 2) if local else (2, 3))
        places = {(action.kind, action.subject): place for place, action in enumerate(program.backward)}
        pushed = [action for action in program.backward if action.kind in LEAVING and action.subject == subject]
        assert [action.kind for action in pushed] == [*[ActionKind.COLLECT] * local, ActionKind.SYNC]
        assert all(action.devices == (0, 2, 3) for action in pushed)
        assert all(places[ActionKind.SEGMENT, program.segment_of[tile]] < places[ActionKind.SYNC, subject] for tile, _ in served.uses)
        assert not {ActionKind.ASK, ActionKind.BRING} & {action.kind for action in program.forward}
        brought = [ActionKind.BRING, *[ActionKind.HAND_ON] * local]
        assert [(action.kind, action.subject) for action in program.after_update] == [(kind, subject) for kind in brought]


def test_replica_of_the_loss_has_no_backward_pass() -> None:
    program = compile_program(plan_of(mlp(), split((0,)), cross_entropy=split((0, 1), replicas=2)))
    loss = program.plan.first_tile[-1]
    assert loss in program.activity.tiles
    assert loss + 1 not in program.activity.tiles
    assert [action.kind for action in part_of(program.backward, 1)] == [ActionKind.LOSS]


def test_epilogue_is_not_run_where_every_rank_has_what_enters_it() -> None:
    graph = traced("zoo:rnnlm:tiny", "float64").graph
    assert [graph.operators[position].name for position in graph.epilogue] == ["add"]
    everywhere, partly = (compile_program(plan_of(graph, split((0, 1), b=2), devices)) for devices in (2, 3))
    assert (everywhere.known, partly.known, len(everywhere.number_sums)) == (True, False, 1)
    (last,) = [number for number, tile in enumerate(partly.plan.tiles) if tile.operator in graph.epilogue]
    runs = [[action.subject for action in program.backward if action.kind is ActionKind.TILE] for program in (everywhere, partly)]
    assert runs == [[], [last]]
    assert not compile_program(everywhere.plan, single_tiles=True).known  # as simulated, where each tile has both passes


def test_shards_for_what_no_tile_reads() -> None:
    g = GraphBuilder()
    table = g.parameter("table", 5, 4)
    x = g.input("x", 2, 5, 4)
    rows = g.slice(g.elementwise(x), 1, 0, 3)
    from soap.model.graph import DimMap, Factor, FactorKind

    factors = [Factor("s", 3, FactorKind.ATTRIBUTE), Factor("d", 4, FactorKind.ATTRIBUTE)]
    copy = g.operator("copy", factors, [], [(table, [DimMap(0), DimMap(1)])], [((3, 4), [DimMap(0), DimMap(1)])])[0]
    program = compile_program(plan_of(g.build(g.mean(g.elementwise(rows, copy))), split((1,))))
    read, unread = program.plan.shards
    assert (read.box, read.uses != ()) == (((0, 3), (0, 4)), True)
    assert (unread.box, unread.devices, unread.uses) == (((3, 5), (0, 4)), (1,), ())
    assert program.idle_shards == (1,)


@pytest.mark.parametrize("order", [[0], [0, 0, 1, 2, 3, 4], []])
def test_order_must_have_every_tile_once(order: list[int]) -> None:
    with pytest.raises(RuntimeFailure, match="expected each of the plan's 6 tiles once"):
        compile_program(plan_of(mlp(), split((0,))), order)


def test_order_must_be_topological() -> None:
    with pytest.raises(RuntimeFailure, match="order runs tile 0 of 'fc1' before its input"):
        compile_program(plan_of(mlp(), split((0,))), [0, 2, 1, 3, 4, 5])


@given(cases(), st.randoms(use_true_random=False))
def test_every_action_comes_after_what_it_needs(case: tuple[OperatorGraph, Topology, Strategy], rng: random.Random) -> None:
    graph, topology, strategy = case
    plan = build_plan(graph, strategy, topology)
    back = rng.sample(range(len(plan.tiles)), rng.choice([0, len(plan.tiles)]))
    program = compile_program(plan, ExecutionOrder(tuple(random_order(plan, rng)), tuple(back)))
    places = {(a.kind, a.subject): i for i, a in enumerate((*program.forward, *program.backward))}
    assert len(places) == len(program.forward) + len(program.backward)
    _check_forward(program, places)
    _check_backward(program, places)
    found = {shard for sync in plan.syncs for shard in sync.shards}
    for number, shard in enumerate(plan.shards):  # whatever gets a gradient is summed
        assert number in found or not (shard.trainable and any(tile in program.activity.tiles for tile, _ in shard.uses))


def _check_forward(program: Program, places: dict[tuple[ActionKind, int], int]) -> None:
    plan = program.plan
    summed = {number: places[ActionKind.REDUCE_NUMBERS, i] for i, own in enumerate(program.number_sums) for number in own}
    summed |= {number: place for (kind, number), place in places.items() if kind is ActionKind.REDUCE}
    unrun = plan.graph.epilogue if program.known else frozenset()
    for (kind, number), carrier in program.index.moves.items():
        if any(plan.tiles[tile].operator in unrun for tile, _ in plan.fetches[carrier.parts[0][0]].consumers):
            assert (FORTH[kind], number) not in places
            continue
        here = places[FORTH[kind], number]
        for fetch, piece in carrier.parts:
            held = plan.holdings[plan.fetches[fetch].pieces[piece].holding]
            made = places[ActionKind.TILE, held.tile] if held.reduction is None else summed[held.reduction]
            assert made < here
            assert all(here < places[ActionKind.TILE, tile] for tile, _ in plan.fetches[fetch].consumers)
    for number, reduction in enumerate(plan.reductions):
        assert all(places[ActionKind.TILE, tile] < summed[number] for tile in reduction.tiles)


def _check_backward(program: Program, places: dict[tuple[ActionKind, int], int]) -> None:
    """A gradient leaves after all segments that add to it, and before the segment that waits for it."""
    plan = program.plan

    def of_tile(tile: int) -> int:
        return places[ActionKind.SEGMENT, program.segment_of[tile]]

    for (kind, number), carrier in program.index.moves.items():
        active = [part for part in carrier.parts if part[0] in program.activity.fetches]
        assert ((BACK[kind], number) in places) == bool(active)
        for fetch, piece in active:
            here, held = places[BACK[kind], number], plan.holdings[plan.fetches[fetch].pieces[piece].holding]
            consumers = [tile for tile, _ in plan.fetches[fetch].consumers if tile in program.activity.tiles]
            assert all(of_tile(tile) < here for tile in consumers)
            used = of_tile(held.tile) if held.reduction is None else places[ActionKind.REDUCE_GRADIENT, held.reduction]
            assert here < used
    for number in program.activity.reductions:
        here = places[ActionKind.REDUCE_GRADIENT, number]
        assert all(here < of_tile(tile) for tile in plan.reductions[number].tiles)
    for number, sync in enumerate(plan.syncs):
        kinds = [own for own in (ActionKind.COLLECT, ActionKind.SYNC) if (own, number) in places]
        assert (ActionKind.SYNC in kinds) or (len(sync.readers) == 1 and set(sync.shards) <= sums_of_one(plan))
        assert (ActionKind.COLLECT in kinds) == sync.aggregated
        using = [tile for tile, _ in sync.uses if tile in program.activity.tiles]
        assert all(of_tile(tile) < places[own, number] for own in kinds for tile in using)
        assert [places[own, number] for own in kinds] == sorted(places[own, number] for own in kinds)
