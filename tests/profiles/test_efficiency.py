"""Shares of peak rates: they are what was measured, and prices follow from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpu.efficiency import all_figures
from soap import api
from soap.cluster.presets import device_types
from soap.cluster.topology import DeviceType
from soap.plan.tiling import tiles_of
from soap.profiles.efficiency import PEAK_SHARE, Shares, figures, memory_share, shares, update_seconds
from soap.profiles.roofline import RooflineCosts, work_seconds
from soap.profiles.work import Kernel, backward_work, forward_work
from soap.simulator.costs import nanoseconds
from soap.strategy.classical import single_device
from soap.tracing.importer import import_program
from tests.graph_builder import GraphBuilder
from tests.strategies import CPU, cluster

H200, P100 = device_types()["h200"], device_types()["p100"]
MEASURED = replace(H200, source="measured")


def test_the_file_has_what_was_measured() -> None:
    stored = figures()
    for name, found in all_figures().items():
        for key, value in found.items():
            own = stored[name][key]
            assert (own if not isinstance(value, dict) else {dtype: own[dtype] for dtype in value}) == value, (name, key)


def test_devices_of_which_nothing_is_known() -> None:
    older = figures()["older_memory"]
    assert shares(P100, "conv2d", "float32") == shares(P100, "linear", "float16") == Shares(PEAK_SHARE, older)
    assert shares(replace(P100, source="measured"), "linear", "float32") == Shares(1.0, 1.0)
    assert shares(CPU, "linear", "float32").memory == memory_share(replace(P100, source="measured")) == 1.0
    assert memory_share(P100) == older
    assert update_seconds(CPU, 2) is None


@pytest.mark.parametrize(
    ("kind", "dtype", "options", "name"),
    [
        ("linear", "bfloat16", {}, "product"),
        ("linear", "bfloat16", {"unaligned": True}, "unaligned_product"),
        ("linear", "float32", {"unaligned": True}, "product"),
        ("conv2d", "tf32", {}, "convolution"),
        ("lstm", "tf32", {"backward": True}, "recurrent"),
        ("scaled_dot_product_attention", "bfloat16", {}, "attention"),
        ("scaled_dot_product_attention", "bfloat16", {"backward": True}, "attention_backward"),
    ],
)
def test_a_kind_has_its_own_share(kind: str, dtype: str, options: dict[str, bool], name: str) -> None:
    own = figures()[name][dtype]
    assert shares(H200, kind, dtype, **options).arithmetic == own
    assert shares(MEASURED, kind, dtype, **options).arithmetic == pytest.approx(own / figures()["large_product"][dtype])


def test_large_products_of_a_measured_device_reach_nearly_what_was_measured() -> None:
    assert all(0.7 < shares(MEASURED, "linear", dtype).arithmetic <= 1 for dtype in ("float32", "tf32", "bfloat16", "float16"))
    assert shares(MEASURED, "gelu", "float32").memory == 1.0 > shares(H200, "gelu", "float32").memory


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
