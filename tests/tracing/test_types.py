"""Types that replace a program's: what torch gives its default type, eager gives the type that is set as default."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram

from soap.errors import ModelError
from soap.tracing.calls import TileContext
from soap.tracing.importer import import_program
from tests.tracing.programs import Lambda, export

WHICH, LENGTHS, MASK = torch.arange(8) % 3, torch.arange(8), torch.arange(8) > 3
TYPES = [torch.float64, torch.bfloat16, torch.float16]


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _histogram(x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    return x.softmax(-1) * torch.zeros(3).scatter_add(0, ids, torch.ones(8))


def _filled_in(x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    counts = torch.zeros(8)
    counts[lengths] = torch.ones(8)
    counts[2] = 0.25
    return x * counts.index_put((ids,), torch.full((8,), 0.5), accumulate=True)[:, None]


def _causal(x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.triu(torch.full((8, 8), float("-inf")), diagonal=1)
    return (x @ x.T + mask).softmax(-1) @ x


def _smallest(x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    kept = torch.ones(8, 8, dtype=torch.bool).tril()
    mask = torch.zeros(8, 8).masked_fill(~kept, torch.finfo(x.dtype).min)
    return ((x @ x.T).masked_fill(~kept, torch.finfo(x.dtype).min) + mask).softmax(-1) @ x


Make = Callable[[Tensor, Tensor, Tensor], Tensor]
CALLS: dict[str, Make] = {
    "histogram": _histogram,
    "places written in place": _filled_in,
    "causal mask of -inf": _causal,
    "mask of the smallest number": _smallest,
    "arange / n": lambda x, ids, lengths: x * (torch.arange(3) / 7),
    "arange of fractions": lambda x, ids, lengths: x * torch.arange(0, 0.3, 0.1),
    "linspace, eye, full": lambda x, ids, lengths: x @ torch.eye(3) * torch.linspace(0.1, 1, 3) + torch.full((3,), 0.3),
    "literals": lambda x, ids, lengths: x * torch.tensor([0.5, 0.25, -2.0]) + torch.scalar_tensor(0.3),
    "ones and zeros like": lambda x, ids, lengths: x * torch.ones_like(x) + x.new_full((3,), 0.1) + torch.empty_like(x).fill_(0.3),
    "one hot": lambda x, ids, lengths: x * F.one_hot(ids, 3).to(x.dtype) + x * (F.one_hot(ids, 3) * 0.1),
    "casts": lambda x, ids, lengths: x.to(torch.get_default_dtype()).softmax(-1).type_as(x) + ids.type_as(x)[:, None] * 0.1,
    "whole numbers times fractions": lambda x, ids, lengths: x * (lengths * 0.1 + ids / 3 + 0.7)[:, None],
    "whole numbers divided": lambda x, ids, lengths: x * (lengths / (ids + 3))[:, None],
    "functions of whole numbers": lambda x, ids, lengths: x + (torch.sin(lengths) + torch.exp(-ids) + torch.sqrt(lengths))[:, None],
    "chosen fractions": lambda x, ids, lengths: x * torch.where(lengths > 3, 0.1, 0.3)[:, None],
    "fractions or whole numbers": lambda x, ids, lengths: x * torch.where(lengths > 3, 0.3, lengths)[:, None],
    "truth times a fraction": lambda x, ids, lengths: x * ((lengths > 3) * 0.1)[:, None],
    "comparisons": lambda x, ids, lengths: x * (x > ids[:, None]) + x * (lengths > 2.5)[:, None] + x.clamp(max=ids[:, None]),
}


@cache
def exported(name: str) -> tuple[nn.Module, Tensor, ExportedProgram]:
    """A module around calls, its first input, and its program."""
    layer = nn.Linear(4, 3)
    module = Lambda(lambda self, x, ids, lengths: CALLS[name](self.layer(x), ids, lengths).square().mean(), layer=layer)
    x = torch.arange(32.0).reshape(8, 4).sin()
    return module, x, export(module, x, WHICH, LENGTHS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the program does not read input")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", CALLS)
def test_a_program_in_another_type_is_eager_with_that_default(name: str, dtype: torch.dtype) -> None:
    module, x, program = exported(name)
    model = import_program(program, name="model", dtype=dtype)
    parameters = {n: p.clone().requires_grad_() for n, p in model.parameters.items()}
    loss = model.reference_loss(model.example_inputs, parameters, TileContext())
    loss.backward()
    with default_type(dtype):
        own = copy.deepcopy(module).to(dtype)
        expected = own(x.to(dtype), WHICH, LENGTHS)
        expected.backward()
    assert {tensor.dtype for tensor in model.constants.values()} <= {dtype, torch.int64, torch.bool}
    assert loss.dtype == dtype
    assert loss.item() == expected.item()
    for parameter, value in parameters.items():
        assert torch.equal(value.grad, own.get_parameter(parameter).grad)


def test_a_program_means_the_same_whatever_the_default_type_is_by_then() -> None:
    """Exported where it was float64, read where it is float32."""
    with default_type(torch.float64):
        module = Lambda(lambda self, x, ids: ((x * self.w).sum(1) * torch.ones(8) * (ids / 3)).mean(), w=nn.Parameter(torch.ones(4)))
        x = torch.arange(32.0).reshape(8, 4).sin()
        exported, expected = export(module, x, WHICH), module(x, WHICH)
    model = import_program(exported, name="model")
    loss = model.reference_loss(model.example_inputs, model.parameters, TileContext())
    assert loss.dtype == torch.float64 and loss.item() == expected.item()


NOISE: dict[str, Callable[[Tensor], Tensor]] = {
    "randn": lambda x: torch.randn(64, 3),
    "rand": lambda x: torch.rand(64, 3),
    "randn_like": torch.randn_like,
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "normal": lambda x: torch.zeros(64, 3).normal_(1.0, 2.0),
}


@pytest.mark.parametrize("name", NOISE)
def test_all_types_draw_the_same_numbers(name: str) -> None:
    """Or float64 could judge nothing that adds noise."""
    module = Lambda(lambda self, x: (x * self.w * NOISE[name](x)).sum(), w=nn.Parameter(torch.ones(3)))
    exported = export(module, torch.ones(64, 3))
    noise: dict[torch.dtype, Any] = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = import_program(exported, name="model", dtype=dtype)
        w = {n: p.clone().requires_grad_() for n, p in model.parameters.items()}
        loss = model.reference_loss(model.example_inputs, w, TileContext(seed=3))
        loss.backward()
        assert loss.dtype == dtype
        noise[dtype] = w["w"].grad.double()
    torch.testing.assert_close(noise[torch.float32], noise[torch.float64], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(noise[torch.bfloat16], noise[torch.float64], rtol=5e-2, atol=5e-2)
    assert noise[torch.float64].abs().max() > 0.1


def test_rounding_makes_no_one_of_what_is_below_one() -> None:
    module = Lambda(lambda self, x: (x * self.w + torch.log(1 - torch.rand(20000))).mean(), w=nn.Parameter(torch.ones(())))
    model = import_program(export(module, torch.ones(20000)), name="model", dtype=torch.bfloat16)
    loss = model.reference_loss(model.example_inputs, model.parameters, TileContext())
    assert bool(loss.isfinite())


def test_a_constant_that_the_type_cannot_hold_is_told_in_one_line() -> None:
    module = Lambda(lambda self, x: (x * self.w).masked_fill(torch.full((3,), 1e6) > 1e5, 0.5).sum(), w=nn.Parameter(torch.ones(3)))
    exported = export(module, torch.ones(2, 3))
    with pytest.raises(ModelError, match=r"^call 'full' of full cannot be computed in float16: value cannot be converted .* overflow: "):
        import_program(exported, name="model", dtype=torch.float16)


def test_memory_taken_as_another_type_cannot_be_of_a_replaced_type() -> None:
    module = Lambda(lambda self, x: (x * self.w * (x.view(torch.int32) & 1)).sum(), w=nn.Parameter(torch.ones(3)))
    exported = export(module, torch.ones(2, 3))
    assert import_program(exported, name="model").graph.operators
    with pytest.raises(ModelError, match=r"takes the memory of a tensor as another type, so that the type of the model cannot be replaced"):
        import_program(exported, name="model", dtype=torch.float64)
