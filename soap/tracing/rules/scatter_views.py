"""Tensors in which one view is replaced: what writing into a slice in place becomes. And the view that only this needs, the diagonal."""

from __future__ import annotations

from math import prod

import torch

from soap.graph import WHOLE, DimMap
from soap.regions import intersect, relative
from soap.tracing.rules.notation import Local, Scope, Tiled, View
from soap.tracing.rules.registry import rule


def _placed(local: Local, dim: int, start: int, stop: int) -> torch.Tensor:
    """The base's region, with what lies in ``[start, stop)`` of ``dim`` taken from the source, of which that part is at hand."""
    base, source = local.tensors
    box = local.output_boxes[0]
    window = (*box[:dim], (start, stop), *box[dim + 1 :])
    common = intersect(box, window)
    result: torch.Tensor = base.clone()
    if common is not None:
        result[relative(common, box)] = source.reshape(tuple(b - a for a, b in common)).to(base.dtype)
    return result


def _bounds(view: View | Local, size: int) -> tuple[int, int, int]:
    start, stop, step = slice(view.get("start"), view.get("end"), view.get("step", 1)).indices(size)
    return start, max(start, stop), step


def _run_slice_scatter(local: Local) -> torch.Tensor:
    dim = local.get("dim", 0) % len(local.output_shapes[0])
    start, stop, step = _bounds(local, local.output_shapes[0][dim])
    return _placed(local, dim, start, stop) if step == 1 else local.plain()


@rule("aten.slice_scatter")
def slice_scatter(view: View) -> Tiled:
    """An offset along one dimension, of which a tile may miss all; with a step that dimension is needed whole."""
    shape = view.output_shapes[0]
    dim = view.get("dim", 0) % len(shape)
    start, _, step = _bounds(view, shape[dim])
    scope = Scope()
    maps = list(scope.like(shape))
    source = list(maps)
    if step != 1:
        scope = Scope()
        maps = [WHOLE if i == dim else scope.factor(f"d{i}", size) for i, size in enumerate(shape)]
        source = list(maps)
    elif (own := maps[dim].factor) is not None:
        source[dim] = DimMap(own, 1, -start, 1 - start)
    base = tuple(maps)
    return Tiled(tuple(scope.factors), (base, tuple(source)), (base,), light=True, run=_run_slice_scatter, flops=prod(shape))


def _run_select_scatter(local: Local) -> torch.Tensor:
    shape = local.output_shapes[0]
    dim = local.get("dim") % len(shape)
    index = local.get("index") % shape[dim]
    return _placed(local, dim, index, index + 1)


@rule("aten.select_scatter")
def select_scatter(view: View) -> Tiled:
    """One index of one dimension is replaced: every tile has the source for it at hand, and most do not use it."""
    shape = view.output_shapes[0]
    dim = view.get("dim") % len(shape)
    scope = Scope()
    maps = scope.like(shape)
    source = (*maps[:dim], *maps[dim + 1 :])
    return Tiled(tuple(scope.factors), (maps, source), (maps,), light=True, run=_run_select_scatter, flops=prod(shape))


@rule("aten.diagonal", "aten.diagonal_scatter")
def diagonal(view: View) -> Tiled:
    """The two dimensions of the diagonal are needed whole; it comes last in the view."""
    shape = view.shapes[0]
    across = {view.get(name) % len(shape) for name in ("dim1", "dim2")}
    scope = Scope()
    maps = tuple(WHOLE if i in across else scope.factor(f"d{i}", size) for i, size in enumerate(shape))
    along = (*(m for i, m in enumerate(maps) if i not in across), WHOLE)
    if view.call.kind == "diagonal":
        return Tiled(tuple(scope.factors), (maps,), (along,), light=True, linear=True)
    return Tiled(tuple(scope.factors), (maps, along), (maps,), light=True, flops=prod(shape))
