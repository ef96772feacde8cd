"""Calls that change tensors in place become calls that do not, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from soap.errors import ModelError
from soap.tracing.calls import TileContext
from soap.tracing.importer import import_program
from tests.tracing.eager import equals_eager
from tests.tracing.programs import Lambda, export, imported, square

IN_PLACE: dict[str, Callable[..., Any]] = {
    "chain": lambda self, x: (x @ self.w).mul_(2).add_(1).sum(),
    "later uses mean the new value": lambda self, x: _later(x @ self.w),
    "through a view that is not read again": lambda self, x: (x @ self.w).view(-1).add_(1).sin().sum(),
    "on a copy": lambda self, x: _on_copy(x @ self.w),
    "on what contiguous has copied": lambda self, x: _on_contiguous(x @ self.w),
    "on what contiguous has not copied": lambda self, x: _on_same(x @ self.w),
    "on a cast": lambda self, x: _on_cast(x @ self.w),
    "on the input": lambda self, x: (x.add_(1) @ self.w).sum(),
    "copy": lambda self, x: (x @ self.w).copy_(self.w[0]).sin().sum(),
}


def _later(y: Tensor) -> Tensor:
    z = y * 2
    z.add_(y)
    return (z * y).sum()


def _on_copy(y: Tensor) -> Tensor:
    z = y.clone()
    z.mul_(3)
    return (y.sin() + z).sum()


def _on_contiguous(y: Tensor) -> Tensor:
    z = y.t().contiguous()
    z.add_(1)
    return (y.sin() + z.t()).sum()


def _on_same(y: Tensor) -> Tensor:
    z = y.contiguous()
    z.add_(1)
    return (y.sin() + z).sum()


def _on_cast(y: Tensor) -> Tensor:
    z = y.float()
    z.add_(1)
    return (y.sin() + z).sum()


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_calls_become_functional(name: str) -> None:
    equals_eager(Lambda(IN_PLACE[name], w=square()), torch.linspace(0, 1, 6).reshape(2, 3))


def test_a_cast_that_the_program_no_longer_needs_is_still_a_copy() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x @ self.w
        z = y.double()
        z.add_(1)
        return (y.sin() + z).sum()

    model = imported(Lambda(forward, w=square()), torch.linspace(0, 1, 6, dtype=torch.float32).reshape(2, 3))
    y = model.example_inputs[0] @ model.parameters["w"]
    loss = model.reference_loss(model.example_inputs, model.parameters, TileContext(0, 0, {}))
    torch.testing.assert_close(loss, (y.sin() + y + 1).sum())


IN_PLACE_ON_VIEWS: dict[str, Callable[..., Any]] = {
    "a view's base is read": lambda self, x: _read(x @ self.w, lambda y: y.view(-1).add_(1)),
    "a view's view": lambda self, x: _read(x @ self.w, lambda y: y.view(-1).view(4, 2).mul_(2)),
    "a slice": lambda self, x: _read(x @ self.w, lambda y: y[:, :2].add_(1)),
    "a slice with a step": lambda self, x: _read(x @ self.w, lambda y: y[:, 1::2].mul_(y[:, ::2].clone())),
    "a column": lambda self, x: _read(x @ self.w, lambda y: y[:, -1].mul_(3)),
    "a slice of a slice of a transpose": lambda self, x: _read(x @ self.w, lambda y: y.t()[1:][:2].sin_()),
    "a diagonal": lambda self, x: _read(x @ self.w, lambda y: y.diagonal(1).fill_(2)),
    "one part of several": lambda self, x: _read(x, lambda y: y.chunk(2, 1)[1].exp_()) * self.w.sum(),
    "one row of several": lambda self, x: _read(x, lambda y: y.unbind(0)[1].cos_()) * self.w.sum(),
    "copied into a slice": lambda self, x: _read(x @ self.w, lambda y: y[:, 1:].copy_(y[:, :-1].clone())),
    "a number into a column": lambda self, x: _read(x @ self.w, lambda y: y.__setitem__((slice(None), 0), 7.0)),
    "masked": lambda self, x: _read(x @ self.w, lambda y: y[1:].masked_fill_(y[1:] > 0, -1.0)),
    "by index": lambda self, x: _read(x @ self.w, lambda y: y[:, 1:].index_fill_(1, torch.tensor([0, 2]), 5.0)),
    "twice": lambda self, x: _read(x @ self.w, lambda y: (y[:1].add_(y[1:].clone()), y.t()[2].mul_(y.t()[0].clone()))),
    "views taken before the change": lambda self, x: _before(x @ self.w),
    "parts taken before the change": lambda self, x: _parts_before(x) * self.w.sum(),
    "the base changed, a view read": lambda self, x: _base_changed(x @ self.w),
    "outputs of one call do not share memory": lambda self, x: _outputs(x @ self.w),
    "shifted to the right": lambda self, x: _shifted(x @ self.w),
    "under no_grad": lambda self, x: _without_gradient(x @ self.w),
    "of another type": lambda self, x: _read(x > 0, lambda y: y[:, 1:].logical_not_()) * self.w.sum(),
}


def _read(y: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    y = y.clone()
    change(y)
    return (y * torch.arange(1.0, y.numel() + 1, dtype=torch.float64).reshape(y.shape)).sum()


def _before(y: Tensor) -> Tensor:
    transposed, part, row = y.t(), y[:, 1:3], y[0]
    part.mul_(2)
    row.add_(part[1, 0])
    return (transposed.sin() * transposed).sum() + (part * 3).sum() + row.exp().sum()


def _parts_before(y: Tensor) -> Tensor:
    first, second = y.split(2, 1)
    y.mul_(y.clone())
    first.add_(y[:, 1:])
    return first.sin().sum() + second.cos().sum() + (y * y).sum()


def _base_changed(y: Tensor) -> Tensor:
    z = y.t()
    y.add_(1)
    return (z.sin() * 2).sum()


def _outputs(y: Tensor) -> Tensor:
    values, places = torch.topk(y, 2)
    values /= values.sum(-1, keepdim=True)
    return (values * places).sum()


def _shifted(y: Tensor) -> Tensor:
    shifted = y.new_zeros(y.shape)
    shifted[..., 1:] = y[..., :-1].clone()
    shifted[..., 0] = 4.0
    return (shifted * y).sum()


def _without_gradient(y: Tensor) -> Tensor:
    with torch.no_grad():
        mask = torch.zeros_like(y)
        mask[:, 1:].add_(y[:, :-1])
        scaled = mask * 2
    return (mask * y + scaled).sum()


@pytest.mark.parametrize("name", IN_PLACE_ON_VIEWS)
def test_in_place_calls_on_views_change_all_that_shares_the_memory(name: str) -> None:
    equals_eager(Lambda(IN_PLACE_ON_VIEWS[name], w=square()), torch.linspace(-1, 1, 6).reshape(2, 3))


STALE: dict[str, Callable[..., Any]] = {
    "detached": lambda self, x: _detached(x @ self.w),
    "windows": lambda self, x: _windows(x @ self.w),
    "other bits": lambda self, x: _bits(x @ self.w),
}


def _detached(y: Tensor) -> Tensor:
    z = y.detach()
    z.add_(1)
    return (y * 2).sum()


def _windows(y: Tensor) -> Tensor:
    y.unfold(1, 2, 2).add_(1)
    return (y * 2).sum()


def _bits(y: Tensor) -> Tensor:
    y.view(torch.int32).add_(1)
    return (y * 2).sum()


@pytest.mark.parametrize("name", STALE)
def test_reading_memory_that_was_changed_through_a_view_that_cannot_be_undone_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"is read after '.*' has changed memory that it shares"):
        import_program(export(Lambda(STALE[name], w=square()), torch.ones(2, 3)), name="model")


def test_changing_a_shape_in_place_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x @ self.w
        y.t_()
        return (y * 2).sum()

    with pytest.raises(ModelError, match="changes a tensor's shape in place"):
        imported(Lambda(forward, w=square()), torch.ones(2, 3))


def test_in_place_on_a_parameter_is_refused() -> None:
    def change(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.w.mul_(0.5)
        return (x @ self.w).sum()

    with pytest.raises(ModelError, match="changes parameter 'w' in place"):
        imported(Lambda(change, w=square()), torch.ones(2, 3))


def test_in_place_under_no_grad_on_an_outer_tensor_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x @ self.w
        with torch.no_grad():
            y.clamp_(max=1.0)
        return y.sum()

    with pytest.raises(ModelError, match=r"in place under torch\.no_grad"):
        imported(Lambda(forward, w=square()), torch.ones(2, 3))


def test_in_place_calls_on_slices_of_dynamic_sizes() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x @ self.w
        y[: y.shape[0] - 1].mul_(3)
        return (y.sin() * y).sum()

    module, batch = Lambda(forward, w=square()).double(), torch.export.Dim("batch", min=3)
    x = torch.linspace(0, 1, 12, dtype=torch.float64).reshape(4, 3)
    exported = torch.export.export(module, (x,), dynamic_shapes={"args": ({0: batch},)}, strict=False)
    for size in (4, 3):
        model = import_program(exported, name="m", shapes=[(size, 3)])
        loss = model.reference_loss([x[:size]], model.parameters, TileContext(0, 0, {}))
        torch.testing.assert_close(loss, module(x[:size]))
