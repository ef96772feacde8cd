"""Plans: what is fetched from where, what is summed, which shards a parameter has; by hand and for random strategies."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given

from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph, TensorKind
from soap.model.regions import contains, intersect, volume, whole
from soap.plan.plan import (
    Fetch,
    Holding,
    Pattern,
    Piece,
    Reduction,
    Shard,
    local_pieces,
    reduce_name,
    remote_parts,
    sync_name,
    update_name,
)
from soap.plan.planning import PlanBuilder, build_plan
from soap.strategy.config import Strategy, settled
from tests.extent import FEW
from tests.graph_builder import GraphBuilder, mlp, transformer
from tests.simulator.examples import batch_split, chain, finish, on, pairwise_cluster, stencil, strategy
from tests.strategies import cases

FOUR = pairwise_cluster(2, 2)
Case = tuple[OperatorGraph, Topology, Strategy]


def test_rows_that_lie_on_their_device_need_no_transfer() -> None:
    graph = chain(4, 2, 6)
    plan = build_plan(graph, batch_split(graph, [0, 1]), FOUR)
    assert plan.first_tile == (0, 2)
    assert plan.fetches == (
        Fetch("l1", ((0, 2), (0, 6)), 0, (Piece(((0, 2), (0, 6)), 0),), ((2, 0),)),
        Fetch("l1", ((2, 4), (0, 6)), 1, (Piece(((2, 4), (0, 6)), 1),), ((3, 0),)),
    )
    assert plan.holdings[:2] == (Holding("l1", ((0, 2), (0, 6)), 0, 0), Holding("l1", ((2, 4), (0, 6)), 1, 1))
    assert [local_pieces(plan, fetch) for fetch in plan.fetches] == [list(fetch.pieces) for fetch in plan.fetches]


def test_inputs_are_everywhere() -> None:
    graph = chain(4, 2, 6)
    assert {fetch.tensor for fetch in build_plan(graph, batch_split(graph, [0, 1, 2, 3]), FOUR).fetches} == {"l1"}


def test_a_column_split_is_put_together_from_the_own_and_the_other_half() -> None:
    split = strategy(l1=on(0, 1, degrees=(1, 1, 2)), loss=on(1, degrees=(1,)))
    plan = build_plan(chain(4, 2, 6), split, FOUR)
    assert plan.fetches == (Fetch("l1", ((0, 4), (0, 6)), 1, (Piece(((0, 4), (3, 6)), 1), Piece(((0, 4), (0, 3)), 0)), ((2, 0),)),)


def test_tiles_of_several_operators_that_read_the_same_share_one_fetch() -> None:
    g = GraphBuilder()
    x = g.linear(g.input("x", 4, 2), 6, name="l1")
    left, right = g.elementwise(x, name="left"), g.elementwise(x, x, name="right")
    graph = finish(g, left, right)
    split = strategy(l1=on(0, degrees=(1, 1, 1)), left=on(1, 2, degrees=(2, 1)), right=on(1, 1, degrees=(2, 1)), loss=on(1, degrees=(1,)))
    fetches = [f for f in build_plan(graph, split, FOUR).fetches if f.tensor == "l1"]
    top, bottom = ((0, 2), (0, 6)), ((2, 4), (0, 6))
    assert fetches == [
        Fetch("l1", top, 1, (Piece(top, 0),), ((1, 0), (3, 0), (3, 1))),
        Fetch("l1", bottom, 2, (Piece(bottom, 0),), ((2, 0),)),
        Fetch("l1", bottom, 1, (Piece(bottom, 0),), ((4, 0), (4, 1))),
    ]


def test_a_halo_is_fetched_from_the_neighbour_only() -> None:
    g = GraphBuilder()
    graph = finish(g, stencil(g, g.elementwise(g.linear(g.input("x", 2, 3), 8, name="l1"), name="e"), -1, 2, "s"))
    halves = on(0, 1, degrees=(1, 2))
    split = strategy(l1=on(0, degrees=(1, 1, 1)), e=halves, s=halves, loss=on(0, degrees=(1,)))
    plan = build_plan(graph, split, FOUR)
    pieces = {fetch.device: [piece.box[1] for piece in fetch.pieces] for fetch in plan.fetches if fetch.tensor == "e"}
    assert pieces == {0: [(0, 4), (4, 5)], 1: [(4, 8), (3, 4)]}


def test_an_empty_region_is_neither_held_nor_fetched() -> None:
    g = GraphBuilder()
    low, high = g.chunk(g.linear(g.input("x", 2, 3), 8, name="l1"), 1, 5)
    graph = finish(g, g.concat(high, low, 1))
    chunk, concat = (graph.operators[i].name for i in (1, 2))
    split = Strategy({**{op.name: on(0, degrees=(1,) * len(op.factors)) for op in graph.operators}, chunk: on(1, 2, degrees=(1, 2))})
    split = split.with_operator(concat, on(3, 3, 3, 3, degrees=(1, 4)))
    plan = build_plan(graph, split, FOUR)
    assert [(h.tensor, h.box[1], h.device) for h in plan.holdings if h.tensor.startswith(chunk)] == [
        (low, (0, 4), 1),
        (low, (4, 5), 2),
        (high, (0, 3), 2),
    ]
    reads = [(f.tensor, f.box[1], [plan.tiles[t].index for t, _ in f.consumers]) for f in plan.fetches if f.device == 3]
    assert reads == [(high, (0, 2), [0]), (high, (2, 3), [1]), (low, (0, 1), [1]), (low, (1, 3), [2]), (low, (3, 5), [3])]


def test_partial_sums_are_left_on_every_device_of_their_group() -> None:
    split = strategy(l1=on(0, 2, 1, 3, degrees=(2, 2, 1)), loss=on(3, degrees=(1,)))
    plan = build_plan(chain(4, 2, 6), split, FOUR)
    top, bottom = ((0, 2), (0, 6)), ((2, 4), (0, 6))
    assert plan.reductions == (Reduction(0, 0, 0, top, (0, 1), (0, 2)), Reduction(0, 0, 0, bottom, (2, 3), (1, 3)))
    assert plan.holdings[:4] == (
        Holding("l1", top, 0, 0, 0),
        Holding("l1", top, 2, 1, 0),
        Holding("l1", bottom, 1, 2, 1),
        Holding("l1", bottom, 3, 3, 1),
    )
    assert plan.fetches[0].pieces == (Piece(bottom, 3), Piece(top, 1))  # device 2 is on the host of device 3
    assert reduce_name(plan.graph.operators[0], plan.reductions[1]) == "reduce l1[2:4,0:6]#0"
    assert reduce_name(plan.graph.operators[0], plan.reductions[1], gradient=True) == "reduce gradient of l1[2:4,0:6]#0"


def test_partial_sums_of_one_device_are_held_once() -> None:
    plan = build_plan(chain(4, 4, 6), strategy(l1=on(1, 0, 1, 0, degrees=(1, 4, 1)), loss=on(1, degrees=(1,))), FOUR)
    assert plan.reductions == (Reduction(0, 0, 0, ((0, 4), (0, 6)), (0, 1, 2, 3), (0, 1)),)
    assert [(h.device, h.tile) for h in plan.holdings[:2]] == [(0, 1), (1, 0)]
    alone = build_plan(chain(4, 4, 6), strategy(l1=on(1, 1, degrees=(1, 2, 1)), loss=on(1, degrees=(1,))), FOUR)
    assert alone.reductions[0].devices == (1,)
    assert alone.holdings[0] == Holding("l1", ((0, 4), (0, 6)), 1, 0, 0)


def test_replicas_sum_among_themselves() -> None:
    plan = build_plan(chain(4, 2, 6), strategy(l1=on(0, 1, 2, 3, degrees=(1, 2, 1), replicas=2), loss=on(2, degrees=(1,))), FOUR)
    assert [(r.replica, r.tiles, r.devices) for r in plan.reductions] == [(0, (0, 1), (0, 1)), (1, (2, 3), (2, 3))]
    assert plan.holdings[plan.fetches[0].pieces[0].holding].device == 2


def test_consumers_take_the_nearest_replica() -> None:
    plan = build_plan(chain(4, 2, 6), strategy(l1=on(0, 2, degrees=(1, 1, 1), replicas=2), loss=on(1, 3, degrees=(2,))), FOUR)
    assert [(f.device, plan.holdings[f.pieces[0].holding].device) for f in plan.fetches] == [(1, 0), (3, 2)]


def test_data_parallel_parameters_have_one_shard_on_all_devices() -> None:
    graph = chain(4, 2, 6)
    plan = build_plan(graph, batch_split(graph, [3, 1]), FOUR)
    assert plan.shards == (Shard("l1.weight", 0, ((0, 6), (0, 2)), (1, 3), ((0, 0), (1, 0)), True),)
    assert sync_name(plan.syncs[0]) == "sync l1.weight[0]"
    assert update_name(3) == "update @3"


def test_a_shared_parameter_is_cut_along_all_its_users() -> None:
    g = GraphBuilder()
    x = g.linear(g.input("x", 4, 6), 6, bias=False, name="a")
    graph = finish(g, g.linear(x, 6, weight="a.weight", bias=False, name="b"))
    split = strategy(a=on(0, 1, degrees=(1, 1, 2)), b=on(0, 2, 0, degrees=(1, 1, 3)), loss=on(0, degrees=(1,)))
    shards = build_plan(graph, split, FOUR).shards
    assert [(s.box[0], s.devices, s.uses) for s in shards] == [
        ((0, 2), (0,), ((0, 0), (2, 0))),
        ((2, 3), (0, 2), ((0, 0), (3, 0))),
        ((3, 4), (1, 2), ((1, 0), (3, 0))),
        ((4, 6), (0, 1), ((1, 0), (4, 0))),
    ]
    assert [s.index for s in shards] == [0, 1, 2, 3]


def test_frozen_and_unused_parameters() -> None:
    g = GraphBuilder()
    g.parameter("unused", 3)
    frozen = g.parameter("frozen", 6, 2, frozen=True)
    graph = finish(g, g.linear(g.input("x", 4, 2), 6, weight=frozen, bias=False, name="l1"))
    shards = build_plan(graph, batch_split(graph, [0, 1]), FOUR).shards
    assert [(s.parameter, s.trainable, s.devices) for s in shards] == [("frozen", False, (0, 1))]


def test_an_illegal_strategy_is_refused() -> None:
    with pytest.raises(StrategyError, match="device 7 does not exist; expected 0 to 3"):
        build_plan(chain(4, 2, 6), strategy(l1=on(7, degrees=(1, 1, 1)), loss=on(0, degrees=(1,))), FOUR)


def test_a_builder_gives_equal_plans_whatever_it_built_before() -> None:
    graph = transformer(joint=True)
    builder = PlanBuilder(graph, FOUR)
    one, other = batch_split(graph, [0, 1, 2]), batch_split(graph, [3, 0])
    mixed = one.with_operator("0.qkv", on(1, 2, 3, 0, degrees=(2, 1, 1, 2)))
    for wanted in (one, other, mixed, one):
        assert builder.build(wanted) == build_plan(graph, wanted, FOUR)
    assert pickle.loads(pickle.dumps(builder)).build(one) == builder.build(one)


@given(cases())
def test_fetches_cover_what_tiles_read(case: Case) -> None:
    graph, topology, chosen = case
    plan = build_plan(graph, chosen, topology)
    for fetch in plan.fetches:
        assert sum(volume(piece.box) for piece in fetch.pieces) == volume(fetch.box)
        for i, piece in enumerate(fetch.pieces):
            assert contains(fetch.box, piece.box)
            assert contains(plan.holdings[piece.holding].box, piece.box)
            assert plan.holdings[piece.holding].tensor == fetch.tensor
            assert all(intersect(piece.box, other.box) is None for other in fetch.pieces[:i]) or fetch.box == ()
    assert len({(fetch.tensor, fetch.box, fetch.device) for fetch in plan.fetches}) == len(plan.fetches)


@given(cases())
def test_every_non_empty_input_of_a_tile_is_in_exactly_one_fetch(case: Case) -> None:
    graph, topology, chosen = case
    plan = build_plan(graph, chosen, topology)
    found = {use: fetch for fetch in plan.fetches for use in fetch.consumers}
    assert sum(len(fetch.consumers) for fetch in plan.fetches) == len(found)
    wanted = {
        (place, k)
        for place, tile in enumerate(plan.tiles)
        for k, operand in enumerate(plan.operator(tile).inputs)
        if graph.tensors[operand.tensor].kind is TensorKind.ACTIVATION and volume(tile.inputs[k]) > 0
    }
    assert found.keys() == wanted
    for (place, k), fetch in found.items():
        tile = plan.tiles[place]
        assert (fetch.tensor, fetch.box, fetch.device) == (plan.operator(tile).inputs[k].tensor, tile.inputs[k], tile.device)


@given(cases())
def test_holdings_are_the_outputs_of_their_tiles_or_groups(case: Case) -> None:
    graph, topology, chosen = case
    plan = build_plan(graph, chosen, topology)
    covered: dict[str, int] = {}
    for holding in plan.holdings:
        tile = plan.tiles[holding.tile]
        producer, output = graph.producers[holding.tensor]
        assert (tile.operator, tile.device) == (producer, holding.device)
        if holding.reduction is None:
            assert tile.outputs[output] == holding.box
            covered[holding.tensor] = covered.get(holding.tensor, 0) + volume(holding.box)
        else:
            reduction = plan.reductions[holding.reduction]
            assert holding.tile in reduction.tiles and holding.device in reduction.devices
            assert {plan.tiles[place].outputs[output] for place in reduction.tiles} == {reduction.box}
            left = reduction.cells[reduction.devices.index(holding.device)] if reduction.cells else reduction.box
            assert holding.box == left
            assert reduction.devices == tuple(sorted({plan.tiles[place].device for place in reduction.tiles}))
    for tensor, elements in covered.items():
        config = chosen.operators[graph.operators[graph.producers[tensor][0]].name]
        assert elements * graph.tensors[tensor].itemsize == graph.tensors[tensor].bytes * config.replicas


@given(cases())
def test_cells_of_a_sum_are_disjoint_and_cover_it(case: Case) -> None:
    graph, topology, chosen = case
    plan = build_plan(graph, chosen, topology)
    for place, reduction in enumerate(plan.reductions):
        held = [holding for holding in plan.holdings if holding.reduction == place]
        if not reduction.cells:
            assert [(holding.device, holding.box) for holding in held] == [(device, reduction.box) for device in reduction.devices]
            continue
        assert len(reduction.cells) == len(reduction.devices) > 1
        assert sum(volume(cell) for cell in reduction.cells) == volume(reduction.box)
        cells = [cell for cell in reduction.cells if volume(cell)]
        assert all(contains(reduction.box, cell) for cell in cells)
        assert all(intersect(a, b) is None for i, a in enumerate(cells) for b in cells[:i])
        assert [holding.box for holding in held] == cells


@given(cases())
def test_every_piece_from_elsewhere_is_carried_once(case: Case) -> None:
    graph, topology, chosen = case
    plan = build_plan(graph, chosen, topology)
    remote = [
        (number, k)
        for number, fetch in enumerate(plan.fetches)
        for k, piece in enumerate(fetch.pieces)
        if plan.holdings[piece.holding].device != fetch.device
    ]
    assert sorted(part for carrier in (*plan.messages, *plan.exchanges) for part in carrier.parts) == remote
    for message in plan.messages:
        moved = remote_parts(plan, message.parts)
        assert {(source, target) for source, target, _, _ in moved} == {(message.source, message.target)}
        held = [plan.holdings[holding] for *_, holding in moved]
        assert len({h.tile if h.reduction is None else plan.reductions[h.reduction].tiles for h in held}) == 1
        assert len({graph.tensors[h.tensor].dtype for h in held}) == 1
    for exchange in plan.exchanges:
        moved = remote_parts(plan, exchange.parts)
        assert {plan.fetches[number].tensor for number, _ in exchange.parts} == {exchange.tensor}
        assert exchange.devices == tuple(sorted({device for source, target, _, _ in moved for device in (source, target)}))
        assert len(exchange.devices) >= 3
        pairs = {(source, target) for source, target, _, _ in moved}
        if exchange.pattern is Pattern.BROADCAST:
            assert len(pairs) == len(moved) == len(exchange.devices) - 1
            assert len({(box, holding) for _, _, box, holding in moved}) == 1
        else:
            assert len(pairs) == len(exchange.devices) * (len(exchange.devices) - 1)


@given(cases())
def test_shards_partition_what_tiles_need_of_a_parameter(case: Case) -> None:
    graph, topology, chosen = case
    plan = build_plan(graph, chosen, topology)
    for parameter in graph.parameters:
        shards = [shard for shard in plan.shards if shard.parameter == parameter.name]
        assert [shard.index for shard in shards] == list(range(len(shards)))
        assert all(intersect(a.box, b.box) is None for i, a in enumerate(shards) for b in shards[:i])
        for place, tile in enumerate(plan.tiles):
            for k, operand in enumerate(plan.operator(tile).parameters):
                if operand.tensor == parameter.name:
                    mine = [shard for shard in shards if (place, k) in shard.uses]
                    assert sum(volume(shard.box) for shard in mine) == volume(tile.parameters[k])
                    assert all(tile.device in shard.devices and contains(tile.parameters[k], shard.box) for shard in mine)
        if shards and parameter.requires_grad:  # unread parts are kept too
            assert sum(volume(shard.box) for shard in shards) == volume(whole(parameter.shape))
        for shard in shards:
            users = tuple(sorted({plan.tiles[place].device for place, _ in shard.uses}))
            assert shard.devices == (users or shards[0].devices[:1])
            assert shard.uses == tuple(sorted(shard.uses))


@FEW
@given(cases())
def test_an_edit_in_a_kept_builder_equals_a_fresh_plan(case: Case) -> None:
    graph, topology, chosen = case
    builder = PlanBuilder(graph, topology)
    one = Strategy({op.name: on(0, degrees=(1,) * len(op.factors)) for op in graph.operators})
    builder.build(settled(graph, one, topology.device_count))
    assert builder.build(chosen) == build_plan(graph, chosen, topology)


def test_a_model_without_edges_between_devices_moves_nothing() -> None:
    graph = mlp()
    plan = build_plan(graph, batch_split(graph, [0, 1, 2, 3]), FOUR)
    assert all(len(local_pieces(plan, fetch)) == len(fetch.pieces) for fetch in plan.fetches)
