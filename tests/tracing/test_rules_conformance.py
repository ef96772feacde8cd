"""Small programs around each kind of call, exported, imported and run tile by tile, against the module itself: loss, gradients, and an
upper bound for what is kept for the backward pass. The rules alone, on random calls, are the matter of ``test_rules_drawn``."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from math import prod

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import Tensor, nn

from soap.model.graph import Operator, OperatorGraph
from soap.strategy.config import OpConfig
from soap.tracing.execute import TracedModel
from soap.tracing.importer import import_program
from tests.extent import every
from tests.tracing.cases import CASES, RECURRENT, Case, Probe, weighed
from tests.tracing.emulation import compare, graded, kept_bytes


class _RecurrentProbe(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([weighed(value) for value in self.inner(x)]).sum()


def _model(module: nn.Module, inputs: tuple[Tensor, ...]) -> TracedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(module, inputs, strict=False)
    return import_program(exported, name="case")


def _configs(graph: OperatorGraph) -> Iterator[dict[str, OpConfig]]:
    """Every operator whole; each factor in 2 and 3 (and all its elements apart); all factors in 2 at once."""

    def split(op: Operator, degrees: list[int]) -> OpConfig:
        return OpConfig(tuple(degrees), (0,) * prod(degrees))

    whole = {op.name: split(op, [1] * len(op.factors)) for op in graph.operators}
    yield whole
    for degree in (2, 3, 5):
        most = max((len(op.factors) for op in graph.operators), default=0)
        for position in range(most):
            yield {
                op.name: split(op, [min(degree, f.size) if i == position else 1 for i, f in enumerate(op.factors)])
                for op in graph.operators
            }
    yield {op.name: split(op, [min(2, f.size) for f in op.factors]) for op in graph.operators}


def _agree(model: TracedModel) -> None:
    reference = graded(model, None)
    for configs in _configs(model.graph):
        compare(model, configs, reference=reference)


def _equals_module(model: TracedModel, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """The plain program is the module: loss and gradients."""
    from soap.tracing.calls import TileContext

    module.zero_grad()
    expected = module(*inputs)
    expected.backward()
    parameters = {n: p.detach().clone().requires_grad_() for n, p in model.parameters.items()}
    loss = model.reference_loss(inputs, parameters, TileContext(0, 0, dict(model.buffers)))
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for name, p in module.named_parameters():
        if name not in parameters:
            assert p.grad is None or not p.grad.abs().sum()
            continue
        grad = parameters[name].grad
        torch.testing.assert_close(torch.zeros_like(p) if grad is None else grad, torch.zeros_like(p) if p.grad is None else p.grad)


def _marked() -> list[ParameterSet]:
    """The first case of every third kind of call; all rules, and other forms of calls, are drawn, too (``test_rules_drawn``)."""
    first: dict[str, Case] = {}
    for case in CASES:
        first.setdefault(re.split("[, ]", case.name)[0], case)
    often = {case.name for case in [*first.values()][::3]}
    return [pytest.param(case, id=case.name, marks=() if case.name in often else pytest.mark.long) for case in CASES]


@pytest.mark.slow
@pytest.mark.parametrize("case", _marked())
@pytest.mark.filterwarnings("ignore::soap.errors.SoapWarning")
def test_tiles_give_the_whole(case: Case) -> None:
    module = Probe(case)
    model = _model(module, case.extra)
    _agree(model)
    if not case.random:
        _equals_module(model, module, case.extra)
    kept, bound = kept_bytes(model)
    assert kept <= bound
    assert case.whole != all(op.partitionable for op in model.graph.operators)


@pytest.mark.slow
@pytest.mark.parametrize("name", every(3, [*RECURRENT]))
@pytest.mark.filterwarnings("ignore::soap.errors.SoapWarning")
def test_recurrent_layers(name: str) -> None:
    torch.manual_seed(0)
    module, x = _RecurrentProbe(RECURRENT[name]()), torch.randn(5, 4, 3, dtype=torch.float64)
    model = _model(module, (x,))
    _agree(model)
    if "dropout" not in name:
        _equals_module(model, module, (x,))
    assert all(op.partitionable for op in model.graph.operators)
    kept, bound = kept_bytes(model)
    assert kept <= bound
