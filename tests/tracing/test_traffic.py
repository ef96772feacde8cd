"""What GPUs neither write nor read: views, what they show of a value outside, and copies that products of matrices do without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from soap.api import export
from soap.cluster.presets import device_types
from soap.model.graph import OperatorGraph
from soap.plan.tiling import whole_tile
from soap.profiles.roofline import work_seconds
from soap.profiles.work import backward_work, forward_work
from soap.tracing.calls import Program
from soap.tracing.execute import TracedModel
from soap.tracing.importer import copied_bytes, is_view, scattered
from soap.tracing.load import load_model
from tests.strategies import CPU

B, H, S, D = 4, 2, 6, 8
WIDTH = H * D


class Lambda(nn.Module):
    """A function of a linear layer's output, and of the batch."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.up(x)).square().sum()


def loaded(function: Callable[[Tensor], Tensor], folder: Path) -> TracedModel:
    """For a batch of B samples with S steps."""
    export(Lambda(function), (torch.randn(B, S, WIDTH),), path=folder / "m.pt2", verify=False)
    return load_model(str(folder / "m.pt2"), plan_only=True)


def graph_of(function: Callable[[Tensor], Tensor], folder: Path) -> OperatorGraph:
    """Its operators."""
    return loaded(function, folder).graph


def program_of(function: Callable[[Tensor], Tensor], folder: Path) -> Program:
    """Its calls."""
    return loaded(function, folder).program


def heads(x: Tensor) -> Tensor:
    return x.view(B, S, H, D).transpose(1, 2)


SIZE = 4 * B * S * WIDTH
"""Bytes of the layer's output."""


@pytest.mark.parametrize(
    ("function", "views", "copies"),
    [
        (heads, ["view", "transpose"], []),
        (lambda x: x.flatten(1).unsqueeze(0), ["flatten", "unsqueeze"], []),
        (lambda x: x.transpose(0, 1).unflatten(2, (H, D)), ["transpose", "unflatten"], []),  # no dimensions become one
        (lambda x: x.transpose(1, 2).reshape(B, WIDTH * S), ["transpose"], ["reshape"]),
        (lambda x: x.permute(2, 0, 1).unsqueeze(0).flatten(), ["permute", "unsqueeze"], ["flatten"]),
        (lambda x: x.transpose(1, 2).relu().flatten(), ["transpose", "flatten"], ["relu"]),
        (lambda x: x[:, :1].expand(B, 3, WIDTH), [], ["slice", "expand"]),  # their gradients are written
    ],
)
def test_what_is_a_view(function: Callable[[Tensor], Tensor], views: list[str], copies: list[str], tmp_path: Path) -> None:
    program = program_of(function, tmp_path)
    calls = [call for call in program.calls if call.kind not in ("linear", "square", "pow", "sum")]
    known = scattered(program)
    assert [call.kind for call in calls if is_view(call, program, known)] == views
    assert {call.kind for call in calls if not is_view(call, program, known)} == set(copies)


def test_what_views_show_is_written_once(tmp_path: Path) -> None:
    op = next(op for op in graph_of(heads, tmp_path).operators if op.kind == "linear")
    assert (op.views, op.saved_bytes, op.fused_bytes) == (2, 2 * SIZE, 2 * SIZE)


@pytest.mark.parametrize(
    ("function", "copied"),
    [
        (lambda x: x @ x.transpose(1, 2), 0),  # one dimension of batches
        (lambda x: torch.bmm(x.transpose(1, 2), x), 0),
        (lambda x: heads(x) @ heads(x).transpose(2, 3), 2 * SIZE),  # heads lie apart, and become one dimension of batches with the samples
        (lambda x: x.view(B, S, H, D) @ x.view(B, S, D, H), 0),  # in order
        (lambda x: x @ x[0].t(), 0),
    ],
)
def test_products_copy_only_what_does_not_lie_in_order(function: Callable[[Tensor], Tensor], copied: int, tmp_path: Path) -> None:
    model = loaded(function, tmp_path)
    (call,) = [call for call in model.program.calls if call.kind in ("matmul", "bmm")]
    assert copied_bytes(call, model.program, scattered(model.program)) == copied
    op = next(op for op in model.graph.operators if call.name in op.calls)
    assert op.fused_bytes > 0


def test_a_gpu_does_nothing_for_views_and_a_processor_is_priced_as_before(tmp_path: Path) -> None:
    graph = graph_of(heads, tmp_path)
    position = next(i for i, op in enumerate(graph.operators) if op.kind == "linear")
    op, tile, gpu = graph.operators[position], whole_tile(graph, position), device_types()["h200"]
    plain = replace(op, calls=("linear",), saved_bytes=0, fused_bytes=0, views=0)
    bare = replace(graph, operators=tuple(plain if other is op else other for other in graph.operators))
    for work in (forward_work, backward_work):
        on_gpu, on_cpu = ([work_seconds(work(g, tile), device, "linear", backward=False) for g in (graph, bare)] for device in (gpu, CPU))
        assert on_gpu[0] == on_gpu[1]
        assert on_cpu[0] > on_cpu[1]


def test_what_views_say_is_no_part_of_the_graphs_identity(tmp_path: Path) -> None:
    graph = graph_of(heads, tmp_path)
    changed = replace(graph, operators=tuple(replace(op, views=0, fused_bytes=0) for op in graph.operators))
    assert changed.hash == graph.hash


def test_a_gpu_s_norm_by_the_root_of_means_is_one_kernel(tmp_path: Path) -> None:
    """It keeps its input and one number a row in float32, beside what is squared, and passes nothing on."""
    export(Lambda(lambda x: nn.functional.rms_norm(x, (WIDTH,))), (torch.randn(B, S, WIDTH),), path=tmp_path / "m.pt2", verify=False)
    reading: dict[str, Any] = {"plan_only": True, "dtype": "bfloat16"}
    on_cpu, on_gpu = (load_model(str(tmp_path / "m.pt2"), autocast_device=device, **reading).graph for device in ("cpu", "cuda"))
    (norm,) = (op for op in on_gpu.operators if op.kind == "rms_norm")
    assert norm.fused_bytes == SIZE == norm.saved_bytes - SIZE // 2  # the rest is read by the square behind it
    own = on_gpu.footprints[norm.name][0]
    assert (own.kept_bytes, own.forward_bytes, own.keeps) == (4 * B * S + SIZE // 2, 0, frozenset({0}))
    assert on_cpu.footprints[norm.name][0].kept_bytes > SIZE  # several calls there, in float32


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_of_nothing_is_no_launch(p: float, tmp_path: Path) -> None:
    graph = graph_of(lambda x: nn.functional.dropout(x.sin(), p), tmp_path)
    (op,) = (op for op in graph.operators if any("dropout" in call for call in op.calls))
    assert (op.views, bool(op.drawn)) == ((1, False) if p == 0 else (0, True))
    unwritten = sum("dropout" in call for call in op.calls) * SIZE if p == 0 else 0
    assert op.fused_bytes >= unwritten and (p == 0 or op.fused_bytes == 0)
