"""The numbers of which a loss is a sum, and the loss's gradient by each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from soap.tracing.importer import import_program
from tests.tracing.programs import Lambda, export, imported

Loss = Callable[[Any, Tensor, Tensor], Tensor]


def module(loss: Loss) -> tuple[Lambda, Tensor]:
    """Two layers, and a loss of what they make."""
    torch.manual_seed(0)

    def run(self: Any, x: Tensor) -> Tensor:
        a = self.first(x)
        return loss(self, a, self.second(a.tanh()))

    return Lambda(run, first=nn.Linear(3, 4), second=nn.Linear(4, 5), scale=nn.Parameter(torch.ones(()))), torch.randn(6, 3)


SUMS: dict[str, tuple[Loss, list[float]]] = {
    "two": (lambda m, a, b: a.square().mean() + b.abs().mean(), [1.0, 1.0]),
    "scaled": (lambda m, a, b: 0.5 * (b.exp().mean() - a.square().mean() / 4) + a.abs().mean(), [0.5, -0.125, 1.0]),
    "from zero": (lambda m, a, b: sum([a.square().mean(), b.square().mean()]), [1.0, 1.0]),
    "one twice": (lambda m, a, b: (lambda n: n + 3.0 * n)(b.square().mean()), [4.0]),
}
OTHERS: dict[str, Loss] = {
    "not from zero": lambda m, a, b: a.square().mean() + 1.0,
    "one": lambda m, a, b: b.square().mean(),
    "product": lambda m, a, b: a.square().mean() * b.square().mean(),
    "root": lambda m, a, b: (a.square().mean() + b.square().mean()).sqrt(),
    "learned": lambda m, a, b: m.scale * a.square().mean() + b.square().mean(),
    "read elsewhere": lambda m, a, b: (lambda n: n + (b * n).square().mean())(a.square().mean()),
}


@pytest.mark.parametrize("case", SUMS.values(), ids=SUMS)
def test_terms_of_sums(case: tuple[Loss, list[float]]) -> None:
    loss, gradients = case
    graph = imported(*module(loss)).graph
    assert sorted(graph.loss_terms.values()) == pytest.approx(sorted(gradients), rel=1e-15)
    made = {graph.producers[name][0] for name in graph.loss_terms}
    assert graph.known_gradients == made and not made & graph.epilogue
    assert graph.producers[graph.loss][0] in graph.epilogue
    assert {graph.tensors[name].shape for name in graph.loss_terms} == {()}


@pytest.mark.parametrize("loss", OTHERS.values(), ids=OTHERS)
def test_other_losses_have_none(loss: Loss) -> None:
    graph = imported(*module(loss)).graph
    assert not graph.loss_terms and not graph.epilogue
    assert graph.known_gradients == {graph.producers[graph.loss][0]}


def test_a_plan_has_them_as_well() -> None:
    """They are no part of a graph's identity."""
    exported = export(*module(SUMS["scaled"][0]))
    plan, full = (import_program(exported, name="m", plan_only=only).graph for only in (True, False))
    assert plan.loss_terms == full.loss_terms and plan.hash == full.hash
