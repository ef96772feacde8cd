"""The roofline: prices worked out by hand, and what every cost model must keep."""

from __future__ import annotations

import pickle
from dataclasses import replace
from math import ceil, prod

import pytest
from hypothesis import given

from soap.cluster.presets import device_types, preset
from soap.cluster.topology import DeviceType, Topology
from soap.model.graph import WHOLE, DimMap, Drawn, Factor, FactorKind, OperatorGraph
from soap.plan.tiling import Tile, tiles_of
from soap.profiles import roofline, work
from soap.profiles.roofline import PEAK_SHARE, TILE_CALLS, RooflineCosts
from soap.profiles.work import DRAWN_PER_CALL, LSTM_CALLS, PLACE_TRAFFIC, ROW_CALLS, STEP_CALLS
from soap.simulator.simulate import Simulator
from soap.strategy.config import OpConfig, Strategy
from tests.extent import FEW
from tests.graph_builder import GraphBuilder, mlp, transformer
from tests.simulator.examples import batch_split
from tests.strategies import cases, cluster

# A floating-point operation takes 1 ns, as does a byte; a call 100 ns.
SLOW_COMPUTE = DeviceType("slow-compute", "cpu", {"float32": 1e9}, 1e15, 2**30, 0.0, "measured in a thought experiment")
SLOW_MEMORY = DeviceType("slow-memory", "cpu", {"float32": 1e18}, 1e9, 2**30, 0.0, "measured in a thought experiment")
SLOW_CALLS = DeviceType("slow-calls", "cpu", {"float32": 1e18}, 1e18, 2**30, 1e-7, "measured in a thought experiment")
RUNTIME_NS = 100 * TILE_CALLS

COSTS = RooflineCosts(cluster([2], SLOW_COMPUTE))


def whole(graph: OperatorGraph, name: str) -> Tile:
    position = graph.index[name]
    return tiles_of(graph, position, OpConfig((1,) * len(graph.operators[position].factors), (0,)))[0]


def two_layers(saved_bytes: int = 0) -> OperatorGraph:
    """[4, 8] -> first [4, 16] -> second [4, 2] -> mean; nothing saved besides operands unless said."""
    g = GraphBuilder()
    x = g.linear(g.input("x", 4, 8), 16, bias=False, name="first")
    graph = g.build(g.mean(g.linear(x, 2, bias=False, name="second"), name="loss"))
    return replace(graph, operators=tuple(replace(op, saved_bytes=saved_bytes) for op in graph.operators))


def recurrent(kind: str, steps: int, samples: int, layers: int) -> OperatorGraph:
    """A stack of recurrent layers, split over samples only, of 8 units each."""
    g = GraphBuilder()
    names = [f"layer.{i}" for i in range(2 * layers)]
    parameters = [(g.parameter(name, 8, 8), [WHOLE, WHOLE]) for name in names]
    sequence = [WHOLE, DimMap(0), WHOLE]
    x, factors = g.linear(g.input("x", steps, samples, 8), 8), [Factor("b", samples, FactorKind.SAMPLE)]
    out = g.operator(kind, factors, [(x, sequence)], parameters, [((steps, samples, 8), sequence)], name="layer")[0]
    return g.build(g.mean(g.elementwise(out)))


def test_operations_decide_where_compute_is_slow() -> None:
    graph = two_layers()
    first, second = whole(graph, "first"), whole(graph, "second")
    assert COSTS.forward_ns(graph, first, SLOW_COMPUTE) == 2 * 4 * 8 * 16
    assert COSTS.backward_ns(graph, first, SLOW_COMPUTE) == 2 * 4 * 8 * 16  # the model's input needs no gradient
    assert COSTS.backward_ns(graph, second, SLOW_COMPUTE) == 2 * COSTS.forward_ns(graph, second, SLOW_COMPUTE)


def test_bytes_decide_where_memory_is_slow() -> None:
    graph = two_layers()
    x, w, y = 4 * (4 * 16), 4 * (2 * 16), 4 * (4 * 2)
    second = whole(graph, "second")
    assert COSTS.forward_ns(graph, second, SLOW_MEMORY) == x + w + y
    assert COSTS.backward_ns(graph, second, SLOW_MEMORY) == (y + x + w + x) + (y + x + w)


def test_what_lies_between_fused_calls_is_written_and_read() -> None:
    plain, fused = two_layers(), two_layers(saved_bytes=100)
    for ask in (COSTS.forward_ns, COSTS.backward_ns):
        more = ask(fused, whole(fused, "second"), SLOW_MEMORY) - ask(plain, whole(plain, "second"), SLOW_MEMORY)
        assert more == 200


def test_every_call_costs() -> None:
    graph = two_layers()
    called = replace(graph, operators=tuple(replace(op, calls=("a", "b", "c")) for op in graph.operators))
    assert COSTS.forward_ns(graph, whole(graph, "second"), SLOW_CALLS) == pytest.approx(100 + RUNTIME_NS, abs=1)
    assert COSTS.forward_ns(called, whole(called, "second"), SLOW_CALLS) == pytest.approx(300 + RUNTIME_NS, abs=1)
    assert COSTS.backward_ns(called, whole(called, "second"), SLOW_CALLS) == pytest.approx(600 + RUNTIME_NS, abs=1)


def test_the_runtime_costs_nothing_where_the_host_runs_ahead() -> None:
    graph = two_layers()
    assert COSTS.forward_ns(graph, whole(graph, "second"), replace(SLOW_CALLS, kind="cuda")) == pytest.approx(100, abs=1)


@pytest.mark.parametrize(("kind", "calls"), [("lstm", 1 + 2 * LSTM_CALLS), ("gru", 1 + 2 * 6 * STEP_CALLS)])
def test_recurrent_layers_call_much(kind: str, calls: int) -> None:
    graph = recurrent(kind, steps=6, samples=4, layers=2)
    layer = whole(graph, "layer")
    assert COSTS.forward_ns(graph, layer, SLOW_CALLS) == pytest.approx(100 * calls + RUNTIME_NS, abs=1)
    assert COSTS.backward_ns(graph, layer, SLOW_CALLS) == pytest.approx(200 * calls + RUNTIME_NS, abs=1)
    assert COSTS.forward_ns(graph, layer, replace(SLOW_CALLS, kind="cuda")) == pytest.approx(100, abs=1)


def test_frozen_weights_need_no_gradient() -> None:
    g = GraphBuilder()
    x = g.linear(g.input("x", 4, 8), 16, bias=False, name="first")
    frozen = g.parameter("frozen", 2, 16, frozen=True)
    graph = g.build(g.mean(g.linear(x, 2, weight=frozen, bias=False, name="second")))
    second = whole(graph, "second")
    assert COSTS.backward_ns(graph, second, SLOW_COMPUTE) == COSTS.forward_ns(graph, second, SLOW_COMPUTE)


def test_attention_goes_backward_to_both_sides() -> None:
    graph = transformer()
    name = next(op.name for op in graph.operators if op.kind == "attention")
    forward, backward = (ask(graph, whole(graph, name), SLOW_COMPUTE) for ask in (COSTS.forward_ns, COSTS.backward_ns))
    assert backward == 2 * forward


def test_a_lookup_reads_rows_and_fills_a_dense_gradient() -> None:
    g = GraphBuilder()
    rows = g.embedding(g.input("ids", 4, dtype="int64"), 1000, 8, name="table")
    graph = g.build(g.mean(rows))
    graph = replace(graph, operators=tuple(replace(op, saved_bytes=0) for op in graph.operators))
    ids, out, weight = 4 * 8, 4 * 8 * 4, 1000 * 8 * 4
    table = whole(graph, "table")
    assert COSTS.forward_ns(graph, table, SLOW_MEMORY) == ids + out + out
    assert COSTS.backward_ns(graph, table, SLOW_MEMORY) == out + ids + weight


def test_masks_are_drawn_in_whole_blocks_number_by_number() -> None:
    """16 samples of 1000 features: eight blocks of two samples."""
    g = GraphBuilder()
    graph = g.build(g.mean(g.linear(g.input("x", 16, 1000), 1000, bias=False, name="first")))
    (first, *others), drawing = graph.operators, 1e-7 * 1e9 / DRAWN_PER_CALL
    plain = COSTS.forward_ns(graph, whole(graph, "first"), SLOW_CALLS)
    for dim, at_once in ((first.outputs[0].dims[0], False), (WHOLE, True)):
        masked = replace(graph, operators=(replace(first, drawn=(Drawn(dim, 16, 16_000),)), *others))
        assert masked.hash == graph.hash  # no part of the model
        costs = RooflineCosts(cluster([2], SLOW_CALLS))
        for degrees, drawn in (((1, 1, 1), 16_000), ((4, 1, 1), 4_000), ((16, 1, 1), 2_000), ((1, 2, 1), 16_000), ((1, 1, 2), 16_000)):
            tile = tiles_of(masked, 0, OpConfig(degrees, tuple(range(prod(degrees)))))[0]
            expected = (16_000 if at_once else drawn) * drawing
            assert costs.forward_ns(masked, tile, SLOW_CALLS) == pytest.approx(plain + expected, abs=1)
            assert costs.backward_ns(masked, tile, SLOW_CALLS) == COSTS.backward_ns(graph, whole(graph, "first"), SLOW_CALLS)


def lookups(alpha: float | None = None) -> OperatorGraph:
    """Four samples look up eight rows each of a table of 1000."""
    g = GraphBuilder()
    rows = g.embedding(g.input("ids", 4, 8, dtype="int64"), 1000, 8, name="table")
    graph = g.build(g.mean(rows), alpha)
    return replace(graph, operators=tuple(replace(op, saved_bytes=0) for op in graph.operators))


def test_on_rows_a_lookup_finds_copies_and_fills_just_these() -> None:
    graph = lookups(alpha=0.01)  # 10 of 32 rows are different ones
    table = replace(whole(graph, "table"), sparse_lookup=True)
    ids, out, rows = 32 * 8, 32 * 8 * 4, 10 * 8 * 4
    assert COSTS.forward_ns(graph, table, SLOW_MEMORY) == (32 * PLACE_TRAFFIC + 2 * rows) + (ids + out + rows)
    assert COSTS.backward_ns(graph, table, SLOW_MEMORY) == out + ids + rows
    assert COSTS.forward_ns(graph, table, SLOW_CALLS) == pytest.approx(100 * (1 + ROW_CALLS) + RUNTIME_NS, abs=1)
    assert COSTS.backward_ns(graph, table, SLOW_CALLS) == pytest.approx(100 + RUNTIME_NS, abs=1)


def test_a_part_of_the_rows_has_its_part_of_those_looked_up() -> None:
    graph = lookups(alpha=0.01)
    tile = replace(tiles_of(graph, 0, OpConfig((1, 1, 2, 1), (0, 0)))[0], sparse_lookup=True)
    ids, out, rows = 32 * 8, 32 * 8 * 4, 5 * 8 * 4
    assert COSTS.backward_ns(graph, tile, SLOW_MEMORY) == out + ids + rows


def test_what_is_known_of_rows_tells_answers_apart() -> None:
    few, many = lookups(alpha=0.01), lookups(alpha=0.03)
    assert few.hash == many.hash
    table = whole(few, "table")
    assert COSTS.backward_ns(few, table, SLOW_MEMORY) == COSTS.backward_ns(many, table, SLOW_MEMORY)
    table = replace(table, sparse_lookup=True)
    assert COSTS.backward_ns(many, table, SLOW_MEMORY) - COSTS.backward_ns(few, table, SLOW_MEMORY) == 20 * 8 * 4


def test_a_split_divides_the_operations() -> None:
    graph = two_layers()
    position = graph.index["first"]
    tiles = tiles_of(graph, position, OpConfig((3, 1, 2), (0,) * 6))
    assert sum(COSTS.forward_ns(graph, tile, SLOW_COMPUTE) for tile in tiles) == 2 * 4 * 8 * 16


def test_data_sheets_are_not_taken_at_their_word() -> None:
    graph = two_layers()
    sheet = replace(SLOW_COMPUTE, source="a data sheet")
    first = whole(graph, "first")
    assert COSTS.forward_ns(graph, first, sheet) == ceil(COSTS.forward_ns(graph, first, SLOW_COMPUTE) / PEAK_SHARE)


def test_computation_type_sets_the_rate() -> None:
    graph = two_layers()
    double = replace(graph, tensors={n: replace(t, dtype="float64", itemsize=8) for n, t in graph.tensors.items()})
    first = whole(graph, "first")
    assert COSTS.forward_ns(double, first, SLOW_COMPUTE) == 2 * COSTS.forward_ns(graph, first, SLOW_COMPUTE)


def test_parts_of_sums_of_a_lower_type_are_computed_in_float32() -> None:
    graph = two_layers()
    graph = replace(graph, tensors={n: replace(t, dtype="bfloat16", itemsize=2) for n, t in graph.tensors.items()})
    quick = replace(SLOW_COMPUTE, flops_per_second={"float32": 1e9, "bfloat16": 4e9})
    position = graph.index["first"]
    by_samples, by_sums = (tiles_of(graph, position, OpConfig(degrees, (0, 0)))[0] for degrees in ((2, 1, 1), (1, 2, 1)))
    assert COSTS.forward_ns(graph, by_sums, quick) == 4 * COSTS.forward_ns(graph, by_samples, quick) == 2 * 2 * 8 * 16


def test_update_reads_and_writes_states() -> None:
    topology = cluster([1], SLOW_MEMORY)
    assert RooflineCosts(topology, 0).update_ns(1000, SLOW_MEMORY) == 3000
    assert RooflineCosts(topology, 2).update_ns(1000, SLOW_MEMORY) == 7000
    assert RooflineCosts(topology, 2).update_ns(1000, SLOW_CALLS) == pytest.approx(700, abs=1)


def test_description_says_where_the_numbers_come_from() -> None:
    assert RooflineCosts(preset("p100-4x4")).description == "estimate (roofline of data sheet)"
    assert COSTS.description == "measured rates of this machine"
    mixed = cluster([2])
    measured = replace(mixed.devices[1], type=SLOW_COMPUTE)
    assert "some rates measured" in RooflineCosts(replace(mixed, devices=(mixed.devices[0], measured))).description


def test_hash_follows_the_figures() -> None:
    base = RooflineCosts(cluster([2], SLOW_COMPUTE))
    assert base.hash == RooflineCosts(cluster([2], SLOW_COMPUTE)).hash
    others = [
        RooflineCosts(cluster([2], SLOW_MEMORY)),
        RooflineCosts(cluster([2], SLOW_COMPUTE), 1),
        RooflineCosts(cluster([2], replace(SLOW_COMPUTE, kernel_seconds=1e-6))),
        RooflineCosts(cluster([2], replace(SLOW_COMPUTE, source="a data sheet"))),
    ]
    assert len({base.hash, *(costs.hash for costs in others)}) == 5
    assert len(base.hash) == 16


@pytest.mark.parametrize(
    "constant",
    ["TILE_CALLS", "UPDATE_CALLS_PER_STATE", "LSTM_CALLS", "STEP_CALLS", "ROW_CALLS", "PLACE_TRAFFIC", "DRAWN_PER_CALL"],
)
def test_hash_follows_the_constants(constant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = COSTS.hash
    monkeypatch.setattr(roofline if hasattr(roofline, constant) else work, constant, 10**6)
    assert COSTS.hash != before


def test_survives_pickling() -> None:
    graph = two_layers()
    COSTS.forward_ns(graph, whole(graph, "first"), SLOW_COMPUTE)
    copy = pickle.loads(pickle.dumps(COSTS))
    assert copy.hash == COSTS.hash
    assert copy.forward_ns(graph, whole(graph, "first"), SLOW_COMPUTE) == 1024


def test_splitting_a_large_model_pays_on_a_cluster() -> None:
    graph, topology = mlp(4096, (4096, 4096), 1000), preset("h200-8")
    made = Simulator(graph, topology, RooflineCosts(topology))
    one, eight = (made.cost(batch_split(graph, range(n)))[0] for n in (1, 8))
    assert one / 8 < eight < one


@pytest.mark.parametrize("name", sorted(device_types()))
def test_every_device_has_prices(name: str) -> None:
    device, graph = device_types()[name], transformer()
    costs = RooflineCosts(cluster([1], device))
    for op in graph.operators:
        assert 1 <= costs.forward_ns(graph, whole(graph, op.name), device) < 10**9


@given(cases(max_moves=4))
@FEW
def test_answers_are_positive_whole_and_repeatable(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, chosen = case
    costs, again = RooflineCosts(topology), RooflineCosts(topology)
    device = topology.devices[0].type
    for position, op in enumerate(graph.operators):
        for tile in tiles_of(graph, position, chosen.operators[op.name]):
            answers = [ask(graph, tile, device) for ask in (costs.forward_ns, costs.backward_ns)]
            assert all(type(answer) is int and answer >= 1 for answer in answers)
            assert answers == [ask(graph, tile, device) for ask in (costs.forward_ns, costs.backward_ns)]
            assert answers == [ask(graph, tile, device) for ask in (again.forward_ns, again.backward_ns)]


def test_halves_of_a_backward_pass_make_one_side_each_and_both_go_through_light_calls() -> None:
    """``second``: 4 x 16 x 2 products by 2; 1000 bytes pass to light calls, written and read."""

    def halves(device: DeviceType, graph: OperatorGraph, name: str = "second") -> tuple[int, int, int]:
        costs, tile = RooflineCosts(cluster([1], device)), whole(graph, name)
        return costs.half_ns(graph, tile, device, "I"), costs.half_ns(graph, tile, device, "W"), costs.backward_ns(graph, tile, device)

    assert halves(SLOW_COMPUTE, two_layers()) == (256, 256, 512)
    alone, light = halves(SLOW_MEMORY, two_layers()), halves(SLOW_MEMORY, two_layers(saved_bytes=1000))
    assert alone[0] + alone[1] == alone[2]
    assert [b - a for a, b in zip(alone, light, strict=True)] == [2000, 2000, 2000]
    inputs, weights, together = halves(SLOW_CALLS, two_layers())
    assert [inputs, weights, together] == pytest.approx([100 + RUNTIME_NS, 100 + RUNTIME_NS, 200 + RUNTIME_NS], abs=1)
    graph = recurrent("lstm", 2, 4, 1)
    inputs, weights, together = halves(SLOW_COMPUTE, graph, "layer")
    assert weights == together >= inputs  # back through all steps once more
