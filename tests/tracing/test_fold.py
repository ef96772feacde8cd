from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from soap.model.graph import TensorKind
from soap.tracing.importer import import_program
from tests.tracing.programs import Lambda, export, imported


def _kinds(model: Any) -> list[str]:
    return [call.kind for call in model.program.calls]


def _masked(self: Any, x: Tensor) -> Tensor:
    y = x @ self.w
    mask = torch.ones(3, 3, dtype=torch.bool).tril().logical_not()
    positions = torch.arange(3).unsqueeze(1) * 2
    unused = (y * 5).sin()
    del unused
    return (y.masked_fill(mask, 0.0) + positions).sum()


def test_what_depends_on_constants_alone_is_computed_at_import() -> None:
    model = imported(Lambda(_masked, w=nn.Parameter(torch.ones(2, 3))), torch.ones(3, 2))
    assert _kinds(model) == ["matmul", "masked_fill", "add", "sum"]
    mask, positions = model.constants.values()
    assert torch.equal(mask, torch.ones(3, 3).triu(1).bool())
    assert torch.equal(positions, torch.tensor([[0], [2], [4]]))
    assert {t.name for t in model.graph.tensors.values() if t.kind is TensorKind.CONSTANT} == set(model.constants)


def test_a_plan_keeps_shapes_only() -> None:
    exported = export(Lambda(_masked, w=nn.Parameter(torch.ones(2, 3))), torch.ones(3, 2))
    plan, full = (import_program(exported, name="m", plan_only=only) for only in (True, False))
    assert [t.device.type for t in plan.constants.values()] == ["meta", "meta"]
    assert [tuple(t.shape) for t in plan.constants.values()] == [(3, 3), (3, 1)]
    assert plan.graph.hash == full.graph.hash


def test_random_numbers_are_never_folded() -> None:
    def noisy(self: Any, x: Tensor) -> Tensor:
        noise = torch.rand(3, 3) + torch.empty(3, 3).exponential_() + torch.zeros(3, 3).normal_()
        return (x @ self.w + noise).sum()

    model = imported(Lambda(noisy, w=nn.Parameter(torch.ones(2, 3))), torch.ones(3, 2))
    assert {"rand", "exponential", "normal_functional"} <= set(_kinds(model))


def test_shapes_of_activations_are_constants() -> None:
    def states(self: Any, x: Tensor) -> Tensor:
        y = x @ self.w
        return (y + torch.zeros_like(y) + y.new_ones(3) + torch.full_like(y, 2.0)).sum()

    model = imported(Lambda(states, w=nn.Parameter(torch.ones(2, 3))), torch.ones(3, 2))
    assert _kinds(model) == ["matmul", "add", "add", "add", "sum"]
    assert [float(t.sum()) for t in model.constants.values()] == [0.0, 1.0, 2.0]  # each held once
