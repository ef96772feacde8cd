"""``soap.export`` holds a program against the module that it was made of: loss, gradients and buffers of one step in eager PyTorch."""

from __future__ import annotations

import copy
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import soap
from soap import zoo
from soap.errors import ModelError, SoapWarning
from soap.runtime.eager import compare_with_eager
from soap.tracing.example import Example
from soap.tracing.export import exported_program, traced
from soap.tracing.load import load_program
from soap.tracing.record import ExportRecord
from tests.autograd_functions import Clamped, Doubled, Reverse, Sign
from tests.extent import often
from tests.tracing.exporting import Applied, Exports, X, around, mean_square


@pytest.mark.parametrize(("function", "share"), [(Reverse, "300.0%"), (Sign, "100.0%"), (Clamped, "%")])
def test_a_function_with_a_backward_of_its_own_is_refused_by_name(export: Exports, function: Any, share: str) -> None:
    with pytest.raises(ModelError) as caught:
        export(around(Applied(function)), X)
    said = str(caught.value)
    assert "the gradient of '0.weight' is off by" in said and share in said and "(and 1 more)" in said
    assert f"autograd.Function {function.__name__} in module '1' (Applied)" in said
    assert "torch.library.custom_op with register_autograd" in said and "x.detach()" in said and "verify=False" in said
    assert "\n" not in said


def test_the_function_is_found_in_the_loss_and_at_the_top(export: Exports) -> None:
    with pytest.raises(ModelError, match=r"autograd.Function Reverse in the loss"):
        export(around(nn.ReLU()), X, loss=lambda y: Reverse.apply(y).square().mean())  # type: ignore[no-any-return,no-untyped-call]
    with pytest.raises(ModelError, match=r"autograd.Function Sign in Applied"):
        export(_with_weight(Applied(Sign)), X)


def _with_weight(module: nn.Module) -> nn.Module:
    """The module's own forward on its input times a weight."""
    module.register_parameter("weight", nn.Parameter(torch.ones(4)))
    own = module.forward
    module.forward = lambda x: own(x * module.weight)  # type: ignore[method-assign]
    return module


def test_only_functions_that_the_gradient_passes_through_are_named(export: Exports) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = around(Applied(Doubled)), around(Applied(Reverse))

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)  # type: ignore[no-any-return]

    with pytest.raises(ModelError, match=r"the gradient of 'b.0.weight' .* autograd.Function Reverse in module 'b.1' \(Applied\), whose"):
        export(Two(), X)


def test_a_function_whose_gradient_agrees_is_accepted(export: Exports) -> None:
    assert export(around(Applied(Doubled)), X).record == ExportRecord(True, "")


def test_detach_is_the_way_out(export: Exports) -> None:
    class Reversed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach() * 1.5 - x * 0.5

    class Straight(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + (x.sign() - x).detach()

    own = [around(Reversed()), around(Applied(Reverse))]
    for module in own:
        mean_square(module(X)).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(own[0][0].weight.grad, own[1][0].weight.grad)
    for middle in (Reversed(), Straight()):
        assert export(around(middle), X).record.compared


# What is random, and what is not torch's


class Unread(nn.Module):
    """Draws numbers that nobody reads: the program draws fewer than the module."""

    def forward(self, x: Tensor) -> Tensor:
        F.dropout(torch.rand(3, 3))
        return F.dropout(x, 0.3)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return result


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = F.gumbel_softmax(x + torch.randn_like(x) * torch.rand(x.shape), hard=True)
        return x * torch.randperm(6) + torch.bernoulli(torch.sigmoid(x))


RANDOM = [nn.Dropout(0.4), nn.AlphaDropout(0.4), nn.RReLU(), nn.Sequential(nn.Dropout(0.2), nn.ReLU(), nn.Dropout(0.2)), Noise(), Unread()]


@pytest.mark.parametrize("middle", [*RANDOM, Checkpointed()], ids=lambda m: type(m).__name__)
def test_random_numbers_are_equal_in_both(export: Exports, middle: nn.Module) -> None:
    assert export(around(middle), X).record.compared


@pytest.mark.slow
def test_random_numbers_in_fused_calls(export: Exports) -> None:
    x = torch.randn(3, 5, 8)
    assert export(nn.LSTM(8, 6, 2, dropout=0.5, batch_first=True), x, loss=lambda o: o[0].square().mean()).record.compared
    assert export(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), x).record.compared


def test_a_function_behind_dropout_is_refused(export: Exports) -> None:
    with pytest.raises(ModelError, match=r"autograd.Function Reverse"):
        export(around(nn.Sequential(nn.Dropout(0.5), Applied(Reverse))), X)


def test_numbers_that_python_draws_are_told(export: Exports) -> None:
    class Skipped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (1 + random.random())

    drawn = random.getstate()
    exported = exported_program(around(Skipped()), (X,), loss=mean_square)
    before = random.getstate()
    assert before != drawn
    with pytest.raises(ModelError, match="forward draws from Python's random"):
        compare_with_eager(Example(around(Skipped()), (X,), loss=mean_square), exported, load_program(exported, "m"))
    assert random.getstate() == before


# State


@pytest.mark.parametrize("middle", [nn.BatchNorm1d(6), nn.LayerNorm(6), nn.GELU()], ids=lambda m: type(m).__name__)
def test_states_and_counters_stay(export: Exports, middle: nn.Module) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls, self.last = middle, 0, torch.zeros(1)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y: Tensor = self.inner(x)
            return y

    module = around(Counting())
    model = export(module, X)
    assert module[1].calls == 0 and model.record.compared


def test_tied_weights_and_a_loss_with_weights(export: Exports) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.table.weight
            self.fixed = nn.Parameter(torch.ones(10), requires_grad=False)
            self.unused = nn.Linear(3, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.table(ids)) * self.fixed  # type: ignore[no-any-return]

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(10))

        def forward(self, output: Tensor) -> Tensor:
            return (output * self.scale).square().mean()

    model = export(Tied(), torch.arange(6), loss=Weighted())
    assert model.record.compared and set(model.parameters) == {"table.weight", "fixed", "loss.scale"}


def test_other_types(export: Exports) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        model = export(around(nn.GELU()).to(dtype), X.to(dtype))
        assert model.record.compared


def test_the_number_of_samples_may_stay_open(export: Exports) -> None:
    assert export(around(nn.Tanh()), X, dynamic_batch=True).record.compared


# What cannot be compared


def test_a_loss_that_is_not_finite_says_nothing(export: Exports) -> None:
    with pytest.warns(SoapWarning, match="not compared with eager PyTorch: the loss of its example batch was not finite"):
        model = export(around(nn.ReLU()), X, loss=lambda y: y.mean() / 0)
    assert model.record == ExportRecord(False, "the loss of its example batch was not finite")


def test_a_program_that_alone_is_not_finite_is_refused() -> None:
    module = around(nn.ReLU())
    example = Example(module, (X,), loss=mean_square)
    exported = exported_program(module, (X,), loss=lambda y: y.square().mean() / 0)
    with pytest.raises(ModelError, match="the loss is off by all of its size: it is zero, or not finite"):
        compare_with_eager(example, exported, load_program(exported, "m"))


def test_a_module_without_values_is_told_and_goes_on(tmp_path: Path) -> None:
    with torch.device("meta"):
        module, x = around(nn.ReLU()), torch.empty(8, 4)
    with pytest.warns(SoapWarning, match=r"not compared with eager PyTorch: its module has no values \(meta device\)"):
        soap.export(module, (x,), path=tmp_path / "m.pt2", loss=mean_square)
    assert (tmp_path / "m.pt2").exists()


def test_inputs_on_which_the_module_fails(export: Exports) -> None:
    with pytest.raises(ModelError, match=r"one step of Embedding on the example inputs fails in eager PyTorch \(IndexError: index out"):
        export(nn.Embedding(10, 4), torch.full((6,), 20))


def test_who_does_not_want_it_leaves_it_out(export: Exports) -> None:
    model = export(around(Applied(Reverse)), X, verify=False)
    assert model.record == ExportRecord(False, "exported with verify=False")
    assert model.record is not None and "never compared with eager PyTorch: exported with verify=False" in model.record.text


# Defects of what reads programs


def test_a_program_of_another_module_is_refused() -> None:
    """As if the reader had lost a call: the module is compared with the program as it was read."""
    exported = exported_program(around(nn.ReLU()), (X,), loss=mean_square)
    model = load_program(exported, "m")
    relu = next(call for call in model.program.calls if call.kind == "relu")
    model.program.calls[model.program.calls.index(relu)] = copy.copy(relu).__class__(
        relu.name, torch.ops.aten.tanh.default, relu.args, relu.kwargs, relu.outputs
    )
    with pytest.raises(ModelError, match=r"the loss is off by .*look for what depends on Python values"):
        compare_with_eager(Example(around(nn.ReLU()), (X,), loss=mean_square), exported, model)


@pytest.mark.slow
def test_rounding_is_judged_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is all rounding: one process is as far from float64 as the program, which computes in another order."""

    class Cancelling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(0.1, 1, 31))
            self.forwards = True

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.weight * 1e4
            ordered = y if self.forwards else y.flip(1)
            total = torch.zeros(len(x))
            for part in ordered.split(1, 1):
                total = total + part.squeeze(1)
            return ((total - 9.9999e3 * (x * self.weight).sum(1)) * self.weight.sum()).mean()

    module, x = Cancelling(), torch.linspace(-1, 1, 62).reshape(2, 31)
    exported = exported_program(module, (x,))
    module.forwards = False  # the same in exact arithmetic
    example, model = Example(module, (x,)), load_program(exported, "m")
    assert compare_with_eager(example, exported, model).compared
    monkeypatch.setattr(Example, "widened", lambda self: None)
    with pytest.raises(ModelError, match="is off by"):
        compare_with_eager(example, exported, model)


ZOO = [name if ":" in name else f"{name}:tiny" for name in zoo.names()]
OFTEN = {"alexnet:tiny", "dlrm:tiny", "gpt:tiny"}
"""They have the parts of the others."""


@pytest.mark.parametrize("name", often(ZOO, OFTEN, pytest.mark.slow))
def test_programs_of_the_zoo_train_as_their_modules(name: str) -> None:
    model = zoo.build(name)
    exported = traced(model.module, model.args, dict(model.kwargs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = load_program(exported, name)
    assert compare_with_eager(Example(model.module, model.args, model.kwargs), exported, program).compared
