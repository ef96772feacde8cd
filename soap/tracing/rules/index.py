"""Picking elements by index or position."""

from __future__ import annotations

from math import prod

import torch

from soap.model.graph import WHOLE, DimMap
from soap.tracing.calls import Ref
from soap.tracing.rules.notation import Local, Maps, Scope, Tiled, View, blocks, broadcast, broadcast_shape
from soap.tracing.rules.registry import rule


@rule("aten.index_select")
def index_select(view: View) -> Tiled:
    """The dimension from which elements are picked is needed whole; picks are free."""
    source, out = view.shapes[0], view.output_shapes[0]
    dim = view.get("dim") % max(1, len(source))
    scope = Scope()
    maps = scope.like(out)
    picks = (maps[dim],) * len(view.shapes[1])
    operands = ((*maps[:dim], WHOLE, *maps[dim + 1 :]), picks)
    return Tiled(tuple(scope.factors), operands, (maps,), flops=prod(out), looks_up=dim == 0)


@rule("aten.gather")
def gather(view: View) -> Tiled:
    """Positions are free; the dimension from which elements are picked is needed whole. The index may be smaller than the source."""
    source, out = view.shapes[0], view.output_shapes[0]
    dim = view.get("dim") % max(1, len(source))
    scope = Scope()
    maps = scope.like(out)
    operand = tuple(WHOLE if i == dim else m if m.factor is not None else DimMap(None, 0, 0, out[i]) for i, m in enumerate(maps))
    return Tiled(tuple(scope.factors), (operand, maps), (maps,), flops=prod(out), looks_up=dim == 0)


@rule("aten.take_along_dim")
def take_along_dim(view: View) -> Tiled:
    """A gather whose operands broadcast in the other dimensions."""
    if view.get("dim") is None or len(view.shapes[0]) != len(view.shapes[1]):
        raise NotImplementedError("elements by their flat position")
    out = view.output_shapes[0]
    dim = view.get("dim") % len(out)
    scope = Scope()
    maps = scope.like(out)
    source = broadcast((*maps[:dim], WHOLE, *maps[dim + 1 :]), out, view.shapes[0])
    saved = 9 * prod(out) + view.itemsize * prod(view.shapes[0])
    operands = (source, broadcast(maps, out, view.shapes[1]))
    return Tiled(tuple(scope.factors), operands, (maps,), flops=prod(out), saved_bytes=saved)


@rule("aten.take")
def take(view: View) -> Tiled:
    """Elements by their flat position: the tensor is needed whole."""
    scope = Scope()
    maps = scope.like(view.output_shapes[0])
    whole = (WHOLE,) * len(view.shapes[0])
    return Tiled(tuple(scope.factors), (whole, maps), (maps,), flops=prod(view.output_shapes[0]), saved_bytes=8 * prod(view.shapes[1]))


@rule("aten.searchsorted.Tensor", "aten.bucketize.Tensor", "aten.isin.Tensor_Tensor")
def looked_up(view: View) -> Tiled:
    """Each element is looked up in a list that is needed whole."""
    values = 1 if view.call.kind == "searchsorted" else 0
    if len(view.shapes[1 - values]) != 1 or view.has("sorter"):
        raise NotImplementedError("a list for each row, or in another order")
    scope = Scope()
    maps = scope.like(view.output_shapes[0])
    operands = ((WHOLE,), maps) if values else (maps, (WHOLE,))
    return Tiled(tuple(scope.factors), operands, (maps,), flops=8 * prod(view.output_shapes[0]))


@rule("aten.index.Tensor")
def index(view: View) -> Tiled:
    """``x[i, j, :, k]`` with index tensors: they broadcast to dimensions of the result, first or where adjacent ones stood."""
    source, picks = view.shapes[0], list(view.get("indices"))
    picks += [None] * (len(source) - len(picks))
    if any(isinstance(p, Ref) and view.values[p.name].dtype in (torch.bool, torch.uint8) for p in picks):
        raise NotImplementedError("masks select a number of elements that depends on data")
    picked = [i for i, p in enumerate(picks) if p is not None]
    shape = broadcast_shape(view.shapes[1:])
    place = picked[0] if picked == list(range(picked[0], picked[-1] + 1)) else 0
    scope = Scope()
    rest = {i: scope.factor(f"d{i}", size) for i, size in enumerate(source) if i not in picked}
    chosen = tuple(scope.factor(f"i{i}", size) for i, size in enumerate(shape))
    kept = list(rest.values())
    out = (*kept[:place], *chosen, *kept[place:])
    operand = tuple(rest.get(i, WHOLE) for i in range(len(source)))
    indices = [broadcast(chosen, shape, s) for s in view.shapes[1:]]
    flops = prod(view.output_shapes[0])
    return Tiled(tuple(scope.factors), (operand, *indices), (out,), flops=flops, looks_up=picked == [0])


@rule("aten.one_hot")
def one_hot(view: View) -> Tiled:
    """Positions are free; classes are the new last dimension."""
    if int(view.get("num_classes", -1)) < 0:
        raise NotImplementedError("the number of classes depends on data")
    scope = Scope()
    maps = scope.like(view.shapes[0])
    return Tiled(tuple(scope.factors), (maps,), ((*maps, WHOLE),), flops=prod(view.output_shapes[0]))


def _run_triangle(local: Local) -> torch.Tensor:
    (top, _), (left, _) = local.boxes[0][-2:]
    out: torch.Tensor = local.plain(diagonal=int(local.get("diagonal", 0)) + top - left)
    return out


@rule("aten.tril", "aten.triu")
def triangle(view: View) -> Tiled:
    """Pointwise by position: the diagonal is elsewhere in each region."""
    scope = Scope()
    maps = scope.like(view.shapes[0])
    return Tiled(tuple(scope.factors), (maps,), (maps,), light=True, linear=True, run=_run_triangle)


def _run_repeat(local: Local) -> torch.Tensor:
    x, out = local.tensors[0], local.output_lengths
    x = x.reshape((1,) * (len(out) - x.dim()) + tuple(x.shape))
    return x.repeat([n // max(1, m) for n, m in zip(out, x.shape, strict=True)])


@rule("aten.repeat", "aten.tile")
def repeat(view: View) -> Tiled:
    """Several copies one after another: the copies are split, if there are several of a dimension."""
    out = view.output_shapes[0]
    source = (*(1,) * (len(out) - len(view.shapes[0])), *view.shapes[0])
    scope = Scope()
    maps: list[DimMap] = []
    operand: list[DimMap] = []
    for i, (size, total) in enumerate(zip(source, out, strict=True)):
        if size == total:
            maps.append(scope.factor(f"d{i}", size))
            operand.append(maps[-1])
            continue
        copies = scope.factor(f"d{i}", total // size if size else 1)
        maps.append(DimMap(copies.factor, size, 0, size))
        operand.append(WHOLE)
    return Tiled(tuple(scope.factors), (tuple(operand[len(out) - len(view.shapes[0]) :]),), (tuple(maps),), run=_run_repeat)


def _run_repeat_interleave(local: Local) -> torch.Tensor:
    out: torch.Tensor = local.plain(output_size=None)  # those of the whole
    return out


@rule("aten.repeat_interleave.self_int")
def repeat_interleave(view: View) -> Tiled:
    """Each element several times."""
    times, source = int(view.get("repeats")), view.shapes[0]
    if view.get("dim") is None or times < 1:
        raise NotImplementedError("repetition of all elements")
    dim = int(view.get("dim")) % len(source)
    scope = Scope()
    maps = scope.like(source)
    grown = DimMap(maps[dim].factor, times, 0, times) if maps[dim].factor is not None else WHOLE
    out: Maps = (*maps[:dim], grown, *maps[dim + 1 :])
    return Tiled(tuple(scope.factors), (maps,), (out,), run=_run_repeat_interleave)


@rule("aten.pixel_shuffle")
def pixel_shuffle(view: View) -> Tiled:
    """Channels become blocks of space: everything splits by blocks."""
    block, shape = int(view.get("upscale_factor")), view.output_shapes[0]
    return _in_blocks(view, (shape[-3], shape[-2] // block, shape[-1] // block), (block * block, 1, 1), (1, block, block))


@rule("aten.pixel_unshuffle")
def pixel_unshuffle(view: View) -> Tiled:
    """Blocks of space become channels: everything splits by blocks."""
    block, shape = int(view.get("downscale_factor")), view.shapes[0]
    return _in_blocks(view, (shape[-3], shape[-2] // block, shape[-1] // block), (1, block, block), (block * block, 1, 1))


def _in_blocks(view: View, sizes: tuple[int, ...], ins: tuple[int, ...], outs: tuple[int, ...]) -> Tiled:
    scope = Scope()
    lead = scope.like(view.shapes[0][:-3], "b")
    factors = [scope.factor(name, size) for name, size in zip(("c", "h", "w"), sizes, strict=True)]
    sides = [(*lead, *(blocks(f, n) for f, n in zip(factors, spans, strict=True))) for spans in (ins, outs)]
    return Tiled(tuple(scope.factors), (sides[0],), (sides[1],))
