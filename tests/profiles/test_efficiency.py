"""Shares of peak rates: they are what was measured, and prices follow from them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpu.efficiency import SMALLEST_NS, _rows, all_figures
from soap import api
from soap.cluster.presets import device_types
from soap.cluster.topology import DeviceType
from soap.plan.tiling import tiles_of
from soap.profiles.efficiency import PEAK_SHARE, Shares, figures, memory_share, shares, update_seconds
from soap.profiles.entries import Entry, Timing, decode, encode
from soap.profiles.keys import TileKey
from soap.profiles.roofline import RooflineCosts, work_seconds
from soap.profiles.work import ATTENTION, Kernel, Scores, backward_work, forward_work
from soap.simulator.costs import nanoseconds
from soap.strategy.classical import single_device
from soap.tracing.importer import import_program
from tests.graph_builder import GraphBuilder
from tests.strategies import CPU, cluster

A100, H200, P100 = (device_types()[name] for name in ("a100-80gb", "h200", "p100"))
MEASURED = replace(H200, source="measured")


def plain(dtype: str, **options: Any) -> Kernel:
    return Kernel(dtype, 1e9, 1, 1, **options)


def test_the_file_has_what_was_measured() -> None:
    stored = figures()
    for name, found in all_figures().items():
        for key, value in found.items():
            own = stored[name][key]
            assert (own if not isinstance(value, dict) else {dtype: own[dtype] for dtype in value}) == value, (name, key)


def test_devices_of_which_nothing_is_known() -> None:
    older = figures()["older_memory"]
    assert shares(P100, "conv2d", plain("float32")) == shares(P100, "linear", plain("float64")) == Shares(PEAK_SHARE, older)
    assert shares(replace(P100, source="measured"), "linear", plain("float32")) == Shares(1.0, 1.0)
    assert shares(CPU, "linear", plain("float32")).memory == memory_share(replace(P100, source="measured")) == 1.0
    assert memory_share(P100) == older
    assert update_seconds(CPU, 2) is None


def test_older_products_reach_what_deepbench_has() -> None:
    """By hand: 97.8 of 125 TFLOP/s on a V100's tensor cores, 13.0 of 15.7 in float32; a P100 has no tensor cores, and its peak in float32
    is nearer to a TITAN Xp's."""
    v100, kernels = device_types()["v100-16gb"], [replace(plain(dtype), flops=50.3e9) for dtype in ("float32", "float16")]
    found = [shares(device, "linear", kernel).arithmetic for device in (v100, P100) for kernel in kernels]
    assert found == pytest.approx([13.0 / 15.7, 97.8 / 125, 10.2 / 12.15, 10.2 / 12.15])
    small = [shares(v100, "linear", replace(plain("float16"), flops=flops)).arithmetic for flops in (0.0, 0.8e9, 4.7e9, 1e15)]
    assert small == pytest.approx([34.4 / 125, 34.4 / 125, 62.3 / 125, 103.8 / 125])
    assert shares(v100, "conv2d", plain("float16")).arithmetic == PEAK_SHARE


@pytest.mark.parametrize(
    ("kind", "dtype", "options", "name"),
    [
        ("linear", "bfloat16", {}, "product"),
        ("linear", "bfloat16", {"unaligned": True}, "unaligned_product"),
        ("linear", "float32", {"unaligned": True}, "product"),
        ("conv2d", "tf32", {}, "convolution"),
        ("lstm", "tf32", {}, "recurrent"),
        (ATTENTION, "bfloat16", {}, "attention"),
        (ATTENTION, "float32", {"scores": Scores(8192, 128, True)}, "attention"),
    ],
)
def test_a_kind_has_its_own_share(kind: str, dtype: str, options: dict[str, Any], name: str) -> None:
    own = figures()[name][dtype]
    assert shares(H200, kind, plain(dtype, **options)).arithmetic == own
    assert shares(MEASURED, kind, plain(dtype, **options)).arithmetic == pytest.approx(own / figures()["large_product"][dtype])


def test_attention_of_an_unknown_shape_goes_back_by_what_was_measured() -> None:
    assert shares(H200, ATTENTION, plain("bfloat16"), backward=True).arithmetic == figures()["attention_backward"]["bfloat16"]


def test_flash_attention_is_as_fast_as_its_table_says() -> None:
    """By hand: 182 of 312 TFLOP/s on an A100, 8192 steps of width 128, of which the backward pass counts four products of five."""
    found = [shares(A100, ATTENTION, plain("bfloat16", scores=Scores(8192, 128, True)), backward=way).arithmetic for way in (False, True)]
    assert found == pytest.approx([182 / 312, 182 / 312 * 0.8])
    lengths = (64, 512, 724, 1024, 2**20)
    halfway = [shares(A100, ATTENTION, plain("float16", scores=Scores(keys, 128, False))).arithmetic for keys in lengths]
    assert halfway == pytest.approx([151 / 312, 151 / 312, 162 / 312, 173 / 312, 203 / 312], rel=1e-3)
    assert shares(A100, ATTENTION, plain("bfloat16", scores=Scores(512, 32, True))).arithmetic == pytest.approx(88 / 312)
    hopper = [shares(H200, ATTENTION, plain("bfloat16", scores=Scores(8192, 128, True)), flash2=own).arithmetic for own in (False, True)]
    assert hopper == pytest.approx([644 / 989.5, 333 / 989.5])


@pytest.mark.parametrize(("heads", "keys", "width"), [(32, 128, 64), (8, 512, 64), (8, 1024, 64), (2, 4096, 128), (1, 8192, 128)])
def test_the_table_of_an_h200_has_what_was_measured_there(heads: int, keys: int, width: int) -> None:
    (row,) = [r for r in _rows("attention", "bfloat16") if r["shape"][0] == heads and r["shape"][2:] == [keys, width]]
    kernel = plain("bfloat16", scores=Scores(keys, width, True))
    for way, times in (("forward", 1), ("backward", 2)):
        share = shares(H200, ATTENTION, kernel, backward=way == "backward").arithmetic
        measured = times * row["flops"] / (row[f"{way}_ns"] - SMALLEST_NS) * 1e9 / 989.5e12
        assert share == pytest.approx(measured, rel=0.07), way


class Attended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.mean(nn.functional.scaled_dot_product_attention(q, k, v) * self.weight)


def test_scores_of_an_attention_come_with_its_work_and_through_json() -> None:
    inputs = tuple(torch.zeros(2, 4, steps, 64, dtype=torch.bfloat16) for steps in (128, 256, 256))
    graph = import_program(torch.export.export(Attended(), inputs), name="attended").graph
    (position,) = (i for i, op in enumerate(graph.operators) if op.kind == ATTENTION)
    (tile,) = tiles_of(graph, position, single_device(graph, cluster([1])).operators[graph.operators[position].name])
    assert {kernel.scores for kernel in forward_work(graph, tile)} == {Scores(256, 64, False)}
    usual, older = (RooflineCosts(cluster([1], H200), 2, kernels).forward_ns(graph, tile, H200) for kernels in ("eager", "eager+flash2"))
    assert older > usual
    for scores in (None, Scores(256, 64, True)):
        kernel = Kernel("bfloat16", 2.0, 3, 4, 5, 6, 7, unaligned=True, scores=scores)
        entry = Entry(ATTENTION, TileKey("f", (1,), (), True), Timing(1.0, 0.0), None, 3, (kernel,), (), "2026-01-02T03:04:05+00:00")
        assert decode(json.loads(json.dumps(encode(entry)))) == entry


def test_large_products_of_a_measured_device_reach_nearly_what_was_measured() -> None:
    assert all(0.7 < shares(MEASURED, "linear", plain(dtype)).arithmetic <= 1 for dtype in ("float32", "tf32", "bfloat16", "float16"))
    assert shares(MEASURED, "gelu", plain("float32")).memory == 1.0 > shares(H200, "gelu", plain("float32")).memory


def test_light_calls_have_kernels_of_their_own_on_a_gpu() -> None:
    """By hand: 1 TFLOP of bfloat16, 6 GB read and written by the product itself, 2 GB by light calls, 1 GB never."""
    kernel = Kernel("bfloat16", 1e12, 9 * 10**9, 3, 0, 2 * 10**9, 10**9)
    bandwidth = 4.8e12 * figures()["memory"]
    expected = max(1e12 / (989.5e12 * figures()["product"]["bfloat16"]), 6e9 / bandwidth) + 2e9 / bandwidth + 3 * H200.kernel_seconds
    assert work_seconds([kernel], H200, "linear", backward=False) == pytest.approx(expected)
    joined = max(1e12 / CPU.flops("bfloat16"), 9e9 / CPU.memory_bandwidth_bytes_per_second) + 3 * CPU.kernel_seconds
    assert work_seconds([kernel], replace(CPU, source="measured"), "linear", backward=False) == pytest.approx(joined)


@pytest.mark.parametrize(("width", "unaligned"), [(512, False), (500, True), (501, True)])
def test_rows_of_lower_types_begin_at_multiples_of_16_bytes(width: int, unaligned: bool) -> None:
    g = GraphBuilder()
    graph = g.build(g.mean(g.linear(g.input("x", 64, 256, dtype="bfloat16"), width)))
    wide = replace(graph, operators=tuple(replace(op, arithmetic="bfloat16") for op in graph.operators))
    (tile,) = tiles_of(wide, 0, single_device(wide, cluster([1])).operators[wide.operators[0].name])
    assert forward_work(wide, tile)[0].unaligned is unaligned
    plain = replace(graph, operators=tuple(replace(op, arithmetic="float32") for op in graph.operators))
    assert not forward_work(plain, tile)[0].unaligned


class Scored(nn.Module):
    """A norm before an output layer, as Llama has them: the layer's operator reads the mean, one number a row."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 512, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.head((wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)).float().square().mean()


def test_a_norm_s_factor_is_no_matrix_of_the_product() -> None:
    graph = import_program(torch.export.export(Scored(), (torch.zeros(8, 16, 64, dtype=torch.bfloat16),)), name="scored").graph
    (position,) = (i for i, op in enumerate(graph.operators) if op.parameters)
    op = graph.operators[position]
    assert [graph.tensors[operand.tensor].shape[-1] for operand in op.inputs] == [64, 1] and op.arithmetic == "bfloat16"
    (tile,) = tiles_of(graph, position, single_device(graph, cluster([1])).operators[op.name])
    assert not any(kernel.unaligned for kernel in (*forward_work(graph, tile), *backward_work(graph, tile)))


def test_updates_on_gpus_are_few_kernels() -> None:
    """Seven calls of 5 us for each tensor before: 35 us."""
    costs = RooflineCosts(cluster([1], H200), 2)
    traffic = 7 * 4096 / (4.8e12 * figures()["memory"])
    assert costs.update_ns(4096, H200) == nanoseconds(traffic + figures()["update_seconds"][2])
    assert costs.update_ns(4096, H200) < 3000
    sizes = [update_seconds(H200, states) for states in range(4)]
    assert sizes[2] == sizes[3] and sizes == sorted(size or 0.0 for size in sizes)


def makespan_ns(model: str, device: DeviceType, **reading: str) -> int:
    graph = api.load(model, plan_only=True, **reading).graph  # type: ignore[arg-type]
    return api.simulate(graph, cluster([1], device), "single_device", costs="estimate").makespan_ns


@pytest.mark.slow
def test_bfloat16_is_priced_as_such() -> None:
    cast = {"autocast": "bfloat16", "autocast_device": "cuda"}
    assert makespan_ns("zoo:gpt", H200, **cast) < 0.45 * makespan_ns("zoo:gpt", H200)
