"""Linear layers in float8: which ones, what their products and casts take, and what stays as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

import soap
from soap.api.float8 import FLOAT8, SCALINGS, in_float8
from soap.cli import run, simulate
from soap.errors import ModelError, TopologyError
from soap.model.graph import OperatorGraph
from soap.plan.tiling import tiles_of
from soap.profiles.efficiency import memory_share, shares
from soap.profiles.keys import TileKeys
from soap.profiles.roofline import RooflineCosts
from soap.profiles.work import backward_work, forward_work
from soap.strategy.classical import data_parallel
from soap.strategy.config import OpConfig
from tests.graph_builder import mlp, transformer

H100 = soap.load_cluster("h100-2")
TOKENS, WIDTHS = 4096, (2048, 8192, 512)


def layers() -> OperatorGraph:
    """Three linear layers in bfloat16."""
    graph = mlp(TOKENS, WIDTHS, 48)
    tensors = {name: replace(t, dtype="bfloat16", itemsize=2) if t.dtype == "float32" else t for name, t in graph.tensors.items()}
    operators = tuple(replace(op, arithmetic="bfloat16") if op.kind == "linear" else op for op in graph.operators)
    return replace(graph, tensors=tensors, operators=operators)


def test_all_linear_layers_but_the_last_and_nothing_else() -> None:
    graph = layers()
    made = in_float8(graph, H100, "delayed")
    linear = [op.name for op in graph.operators if op.kind == "linear"]
    assert [op.name for op in made.operators if op.arithmetic == FLOAT8] == linear[:-1]
    assert made.hash == graph.hash  # a strategy for one is for the other
    assert [op for op in made.operators if op.name not in linear[:-1]] == [op for op in graph.operators if op.name not in linear[:-1]]
    odd = in_float8(mlp(8, (64, 72, 64, 48), 16), H100, "mx")
    assert [op.arithmetic for op in odd.operators if op.kind == "linear"] == ["", "", FLOAT8, ""]  # 72 is no multiple of 16


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_work_of_a_layer_by_hand(scaling: str) -> None:
    """Products at the rate of float8; casts read two bytes, or twice as much to scale by what is there, and write two copies of one."""
    graph, made = layers(), in_float8(layers(), H100, scaling)
    tile = tiles_of(made, 0, OpConfig((2, 1, 1), (0, 1)))[0]
    each = {"tensorwise": 2 + 2 + 2}.get(scaling, 2 + 2)
    (forward,), (before,) = forward_work(made, tile), forward_work(graph, tile)
    assert (forward.dtype, forward.flops, forward.calls) == (FLOAT8, before.flops, before.calls + 1)
    moved = forward.traffic_bytes - before.traffic_bytes, forward.apart_bytes - before.apart_bytes
    assert moved == (each * TOKENS // 2 * WIDTHS[0],) * 2
    back, plain = backward_work(made, tile), backward_work(graph, tile)
    assert {kernel.dtype for kernel in back} == {FLOAT8}
    further = [kernel.apart_bytes - own.apart_bytes for kernel, own in zip(back, plain, strict=True)]
    assert further == [each * TOKENS // 2 * WIDTHS[1]]  # nobody wants the gradient of the model's input
    device = H100.devices[0].type
    products = forward.flops / (1979e12 * shares(device, "linear", forward).arithmetic)
    casts = forward.apart_bytes / (device.memory_bandwidth_bytes_per_second * memory_share(device))
    launches = forward.calls * device.kernel_seconds
    assert RooflineCosts(H100).forward_ns(made, tile, device) == pytest.approx(1e9 * (products + casts + launches), abs=1)


def test_gradients_are_narrowed_once_for_both_products() -> None:
    graph, made = layers(), in_float8(layers(), H100, "mx")
    tile = tiles_of(made, 2, OpConfig((1, 1, 1), (0,)))[0]
    moved = [own.apart_bytes - plain.apart_bytes for own, plain in zip(backward_work(made, tile), backward_work(graph, tile), strict=True)]
    assert moved == [(2 + 2) * TOKENS * WIDTHS[2], 0]


def test_what_several_layers_read_is_narrowed_once() -> None:
    made = in_float8(transformer(d=32, heads=2, vocabulary=64), H100, "mx")
    own = {op.name: op.narrowing_bytes for op in made.operators if op.arithmetic == FLOAT8}
    assert [own[f"1.{name}"] for name in ("q", "k", "v", "proj", "fc1")] == [(6, 6), (0, 6), (0, 6), (6, 6), (6, 6)]  # of float32 values


def test_measurements_of_other_arithmetic_are_not_taken() -> None:
    graph, made = layers(), in_float8(layers(), H100, "delayed")
    tile = tiles_of(graph, 0, OpConfig((1, 1, 1), (0,)))[0]
    assert TileKeys(graph).key(tile) != TileKeys(made).key(tile)


def test_a_plan_is_faster_and_holds_as_much() -> None:
    graph = layers()
    strategy = data_parallel(graph, H100)
    plain, narrow = (soap.simulate(own, H100, strategy) for own in (graph, in_float8(graph, H100, "mx")))
    assert narrow.makespan_ns < plain.makespan_ns and narrow.peak_bytes == plain.peak_bytes and narrow.bytes_moved == plain.bytes_moved
    assert narrow.makespan_ns < soap.simulate(in_float8(graph, H100, "tensorwise"), H100, strategy).makespan_ns


def test_what_has_no_float8_is_refused() -> None:
    with pytest.raises(TopologyError, match=r"device type 'a100-80gb' has no rate for float8_e4m3fn; expected one that computes in float8"):
        in_float8(layers(), soap.load_cluster("a100-80gb-8"), "delayed")
    with pytest.raises(ModelError, match=r"has no linear layer for float8; expected one before the last, of multiples of 16"):
        in_float8(mlp(8, (64, 72), 16), H100, "mx")
    with pytest.raises(ModelError, match=r"float8 scaling 'best': expected one of delayed, tensorwise, mx"):
        in_float8(layers(), H100, "best")


def test_commands_price_it_and_none_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["zoo:gpt:tiny", "--cluster", "h100-2", "--builtin", "data_parallel", "--json"]
    found = []
    for more in ([], ["--float8", "tensorwise"]):
        assert simulate.main([*words, *more]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] != found[1]
    assert run.main(["plan.json", "--model", "zoo:gpt:tiny", "--float8", "mx"]) == 2
    assert "soap-run: error: --float8 prices plans alone; expected a run in the model's types: " in capsys.readouterr().err
