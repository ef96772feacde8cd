"""Calls without a rule come apart into calls that have one: names stay, tiles give the whole, and the whole is the module's."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap.errors import SoapWarning
from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel
from soap.tracing.rules import notation
from tests.tracing.emulation import compare, draw_configs
from tests.tracing.programs import Lambda, imported

COMPOUND: dict[str, tuple[Callable[..., Any], int]] = {
    "einsum": (lambda self, x: torch.einsum("bii->b", (x @ self.w).reshape(-1, 2, 2)).sin().sum(), 2),
    "cosine_similarity": (lambda self, x: F.cosine_similarity(x @ self.w, (x @ self.w).sin()).sum(), 5),
    "renorm": (lambda self, x: torch.renorm(x @ self.w, 2.0, 0, 1.0).sum(), 5),
    "kron": (lambda self, x: torch.kron(x @ self.w, self.w).sin().sum(), 5),
    "tensordot": (lambda self, x: torch.tensordot(x @ self.w, self.w, [[1], [1]]).sin().sum(), 5),
    "linalg_multi_dot": (lambda self, x: torch.linalg.multi_dot([x @ self.w, self.w.t(), self.w]).sin().sum(), 5),
    "multi_margin_loss": (lambda self, x: F.multi_margin_loss(x @ self.w, torch.tensor([0, 1, 2, 3, 1])), 5),
    "soft_margin_loss": (lambda self, x: F.soft_margin_loss(x @ self.w, (x @ self.w).sign().detach()), 5),
    "triplet_margin_loss": (lambda self, x: F.triplet_margin_loss(x @ self.w, (x @ self.w).sin(), (x @ self.w).cos() + x[:, :1], 3.0), 5),
    "im2col": (lambda self, x: F.unfold((x @ self.w).reshape(2, 3, 4, 4), 2).sin().sum(), 24),
    "grid_sampler": (lambda self, x: _sampled((x @ self.w).reshape(2, 3, 4, 4)).sin().sum(), 24),
}
"""Kind of call -> a program with it, and the batch."""


def _sampled(x: Tensor) -> Tensor:
    return F.grid_sample(x, torch.tanh(x[:, :2].permute(0, 2, 3, 1)), align_corners=False)


def _model(function: Callable[..., Any], batch: int) -> tuple[nn.Module, Tensor, TracedModel]:
    x = torch.randn(batch, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    module = Lambda(function, w=nn.Parameter(torch.arange(12.0, dtype=torch.float64).reshape(3, 4).sin()))
    return module, x, imported(module, x)


def _exact(module: nn.Module, x: Tensor, model: TracedModel) -> None:
    for seed in range(4):
        compare(model, draw_configs(model.graph, random.Random(seed)))
    expected = module(x)
    expected.backward()
    parameters = {n: p.clone().requires_grad_() for n, p in model.parameters.items()}
    loss = model.reference_loss([x], parameters, TileContext(0, 0, {}))
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(parameters["w"].grad, module.w.grad)


@pytest.mark.parametrize("kind", COMPOUND)
def test_a_call_that_torch_can_take_apart_is_split(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SoapWarning)
        module, x, model = _model(*COMPOUND[kind])
    assert all(op.partitionable for op in model.graph.operators)
    assert model.program.stuck == {}
    _exact(module, x, model)


@pytest.mark.parametrize(
    ("rule", "function"),
    [
        ("aten.softmax", lambda self, x: (torch.softmax(x @ self.w, 1) * x[:, :1]).sum()),
        ("aten.layer_norm", lambda self, x: (F.layer_norm(x @ self.w, (4,), self.w[0]) * x[:, :1]).sum()),
        ("aten.mse_loss", lambda self, x: F.mse_loss(x @ self.w, x[:, :1].expand(-1, 4))),
        ("aten.cross_entropy_loss", lambda self, x: F.cross_entropy(x @ self.w, (x.sum(1) > 0).long())),
    ],
)
def test_without_its_rule_an_operator_still_comes_apart(monkeypatch: pytest.MonkeyPatch, rule: str, function: Callable[..., Any]) -> None:
    monkeypatch.delitem(notation._RULES, rule)
    module, x, model = _model(function, 5)
    kind = rule.removeprefix("aten.")
    assert kind in {call.origin for call in model.program.calls}
    assert kind not in {call.kind for call in model.program.calls}
    assert [op.name for op in model.graph.operators if op.name.startswith(kind)]
    assert all(op.partitionable for op in model.graph.operators)
    _exact(module, x, model)


def test_parts_belong_to_the_module_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(notation._RULES, "aten.renorm")

    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.renorm(x, 2.0, 0, 1.0)

    x = torch.randn(5, 3, dtype=torch.float64)
    model = imported(Lambda(lambda self, x: self.norm(x @ self.w).sum(), norm=Norm(), w=nn.Parameter(torch.ones(3, 4))), x)
    parts = [call for call in model.program.calls if call.origin == "renorm"]
    assert len(parts) > 3
    assert {call.path for call in parts} == {"norm"}
    assert "norm" in {op.name for op in model.graph.operators}


def test_what_stands_in_the_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(notation._RULES, "aten.cdist")
    with pytest.warns(SoapWarning, match=r"aten\.cdist\.default, nor for aten\._cdist_forward\.default in it \(first at cdist\)"):
        _, _, model = _model(lambda self, x: torch.cdist(x @ self.w, self.w).sum(), 5)
    assert model.program.stuck == {"cdist": "aten._cdist_forward.default"}
    assert [op.kind for op in model.graph.operators if not op.partitionable] == ["cdist"]


def test_random_calls_are_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(notation._RULES, "aten.rrelu")
    with pytest.warns(SoapWarning, match=r"no rule for aten\.rrelu"):
        _, _, model = _model(lambda self, x: F.rrelu(x @ self.w, training=True).sum(), 5)
    assert "rrelu" in {call.kind for call in model.program.calls}
