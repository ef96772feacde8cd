"""Every operator rule, tile by tile, against the module itself: loss, gradients, and an upper bound for what is kept for the backward
pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from math import prod

import pytest
import torch
from torch import Tensor, nn

from soap.graph import Operator, OperatorGraph
from soap.strategy import OpConfig
from soap.tracing.execute import ExecutableModel
from soap.tracing.importer import import_program
from soap.tracing.rules.registry import registered, target_name
from tests.tracing.cases import CASES, RECURRENT, Case, Probe, weighed
from tests.tracing.emulation import compare, kept_bytes

_seen: set[str] = set()
_models: dict[str, tuple[nn.Module, ExecutableModel]] = {}


class _RecurrentProbe(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([weighed(value) for value in self.inner(x)]).sum()


def _model(module: nn.Module, inputs: tuple[Tensor, ...]) -> ExecutableModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(module, inputs, strict=False)
    model = import_program(exported, name="case")
    for call in model.program.calls:
        name = target_name(call.target)
        _seen.update({name, name.rsplit(".", 1)[0]})
    return model


def _imported(case: Case) -> tuple[nn.Module, ExecutableModel]:
    """The case's module and traced model, made once."""
    if case.name not in _models:
        module = Probe(case)
        _models[case.name] = module, _model(module, case.extra)
    return _models[case.name]


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


def _agree(model: ExecutableModel) -> None:
    for configs in _configs(model.graph):
        compare(model, configs)


def _equals_module(model: ExecutableModel, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """The plain program is the module: loss and gradients."""
    from soap.tracing.model import TileContext

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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore::soap.errors.SoapWarning")
def test_tiles_give_the_whole(case: Case) -> None:
    module, model = _imported(case)
    _agree(model)
    if not case.random:
        _equals_module(model, module, case.extra)
    kept, bound = kept_bytes(model)
    assert kept <= bound
    assert case.whole or all(op.partitionable for op in model.graph.operators)


@pytest.mark.parametrize("name", RECURRENT)
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


def test_every_rule_has_a_case() -> None:
    """Runs last in this file; alone it imports every case itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in CASES:
            _imported(case)
        for make in RECURRENT.values():
            _model(_RecurrentProbe(make()), (torch.randn(5, 4, 3, dtype=torch.float64),))
    missing = [name for name in registered() if name not in _seen]
    print(f"{len(registered())} rules, {len(CASES) + len(RECURRENT)} cases, {len({n for n in _seen if n.count('.') == 2})} overloads")
    assert missing == []
