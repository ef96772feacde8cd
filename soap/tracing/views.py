"""Views as functions: how a view is taken from its base, and how a changed view is put back into it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from soap.tracing.rules.complex import with_imag, with_real

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class ViewOf:
    """``take(base, *take_args)`` gives the view; ``put`` gives the base with the view's elements replaced. ``onto``: whether ``put``
    takes (base, view, …), because the view has only a part of the elements, or the view alone."""

    take: Any
    take_args: tuple[Any, ...]
    put: Any
    put_args: tuple[Any, ...]
    onto: bool = False


SAME = ViewOf(aten.alias.default, (), aten.alias.default, ())
"""The same elements in the same order."""

DETACHED = ViewOf(aten.detach.default, (), aten.alias.default, ())
"""The same elements, through which no gradient flows."""


def view_of(node: torch.fx.Node, base: torch.fx.Node) -> ViewOf | None:
    """How the graph node ``node`` is a view of ``base``; None if that is not known, so that nothing can be put back."""
    source, view = base.meta["val"], node.meta["val"]
    if node.target is operator.getitem:
        return _part(node, source)
    kind = str(node.target._schema.name.split("::")[-1])  # type: ignore[union-attr]
    if kind in _OF_COMPLEX:
        return _OF_COMPLEX[kind]
    if source.dtype != view.dtype:
        return None
    if kind in _SELECTING:
        return _SELECTING[kind](node, source)
    if kind in _PERMUTING:
        return _permuted(node, source)
    if kind in _RESHAPING and source.numel() == view.numel():
        return ViewOf(aten.reshape.default, (list(view.shape),), aten.reshape.default, (list(source.shape),))
    return None


def _argument(node: torch.fx.Node, name: str) -> Any:
    """An argument by its schema name, a computed size as its value; the schema's default if it was not passed."""
    given = node.kwargs.get(name)
    for position, parameter in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if parameter.name == name and name not in node.kwargs:
            given = node.args[position] if position < len(node.args) else parameter.default_value
    return given.meta.get("val") if isinstance(given, torch.fx.Node) else given


def _sliced(dim: int, start: int, stop: int, step: int = 1) -> ViewOf:
    return ViewOf(aten.slice.Tensor, (dim, start, stop, step), aten.slice_scatter.default, (dim, start, stop, step), onto=True)


def _selected(dim: int, index: int) -> ViewOf:
    return ViewOf(aten.select.int, (dim, index), aten.select_scatter.default, (dim, index), onto=True)


def _slice(node: torch.fx.Node, source: torch.Tensor) -> ViewOf:
    dim = _argument(node, "dim") % source.dim()
    start, stop, step = slice(_argument(node, "start"), _argument(node, "end"), _argument(node, "step")).indices(source.shape[dim])
    return _sliced(dim, start, max(start, stop), step)


def _narrow(node: torch.fx.Node, source: torch.Tensor) -> ViewOf | None:
    dim, start = _argument(node, "dim") % source.dim(), _argument(node, "start")
    if not isinstance(start, int):
        return None
    start = start % source.shape[dim] if start < 0 else start
    return _sliced(dim, start, start + _argument(node, "length"))


def _select(node: torch.fx.Node, source: torch.Tensor) -> ViewOf:
    dim = _argument(node, "dim") % source.dim()
    return _selected(dim, _argument(node, "index") % source.shape[dim])


def _diagonal(node: torch.fx.Node, source: torch.Tensor) -> ViewOf:
    args = (_argument(node, "offset"), *(_argument(node, name) % source.dim() for name in ("dim1", "dim2")))
    return ViewOf(aten.diagonal.default, args, aten.diagonal_scatter.default, args, onto=True)


def _permuted(node: torch.fx.Node, source: torch.Tensor) -> ViewOf:
    """A permutation, found by moving dimensions of different sizes."""
    marks = torch.empty(tuple(range(2, 2 + source.dim())), device="meta")
    order = [size - 2 for size in node.target(marks, *node.args[1:], **node.kwargs).shape]  # type: ignore[operator]
    return ViewOf(aten.permute.default, (order,), aten.permute.default, ([order.index(d) for d in range(len(order))],))


def _part(node: torch.fx.Node, source: torch.Tensor) -> ViewOf | None:
    """One of the parts that a call splits its operand into."""
    several, index = node.args
    assert isinstance(several, torch.fx.Node) and isinstance(index, int)
    kind = str(several.target._schema.name.split("::")[-1])  # type: ignore[union-attr]
    if kind not in ("split", "split_with_sizes", "chunk", "tensor_split", "unbind", "unsafe_chunk"):
        return None
    dim = _argument(several, "dim") % source.dim()
    if kind == "unbind":
        return _selected(dim, index)
    stops = list(accumulate(part.shape[dim] for part in several.meta["val"]))
    return _sliced(dim, stops[index - 1] if index else 0, stops[index])


_OF_COMPLEX = {
    "view_as_real": ViewOf(aten.view_as_real.default, (), aten.view_as_complex.default, ()),
    "view_as_complex": ViewOf(aten.view_as_complex.default, (), aten.view_as_real.default, ()),
    "_conj": ViewOf(aten.conj_physical.default, (), aten.conj_physical.default, ()),
    "real": ViewOf(aten.real.default, (), with_real, (), onto=True),
    "imag": ViewOf(aten.imag.default, (), with_imag, (), onto=True),
}
_SELECTING: dict[str, Callable[[torch.fx.Node, torch.Tensor], ViewOf | None]] = {
    "slice": _slice,
    "narrow": _narrow,
    "select": _select,
    "diagonal": _diagonal,
}
_PERMUTING = {"permute", "transpose", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "numpy_T", "mT"}
_RESHAPING = {"view", "reshape", "_unsafe_view", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "view_as", "reshape_as"}
