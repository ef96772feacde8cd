"""Picking elements by index or position, and writing them by index or position into a copy of a tensor. Embeddings: rows of a table by
index, one by one or summed up in bags."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
import torch.nn.functional as F

from soap.model.graph import WHOLE, DimMap
from soap.tracing.calls import Ref
from soap.tracing.rules.notation import Local, Maps, Scope, Tiled, View, blocks, broadcast, broadcast_shape, einsum, rule


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


_MASKS = (torch.bool, torch.uint8)


def _run_along(local: Local) -> torch.Tensor:
    # For a region of the written dimension, writes to other regions go to one extra row, which is cut off. If tiles split what is added,
    # only the first of them starts from the tensor to which it is added.
    x, index = local.tensors[:2]
    dim = local.get("dim") % max(1, x.dim())
    adds = local.call.kind in ("index_add", "scatter_add")
    if adds and index.dim() and local.boxes[1][min(dim, index.dim() - 1)][0] > 0:
        x = torch.zeros_like(x)
    start, stop = local.output_boxes[0][dim] if x.dim() else (0, 1)
    out: torch.Tensor
    if not x.dim() or (start, stop) == (0, local.output_shapes[0][dim]):
        out = local.plain([x, index, *local.tensors[2:]])
        return out
    index = torch.where(index < 0, index + local.output_shapes[0][dim], index) if local.call.kind == "index_fill" else index
    here = torch.where((index >= start) & (index < stop), index - start, stop - start)
    out = local.plain([torch.cat([x, x.narrow(dim, 0, 1)], dim), here, *local.tensors[2:]])
    return out.narrow(dim, 0, stop - start)


@rule("aten.scatter", "aten.scatter_add", "aten.scatter_reduce")
def scatter(view: View) -> Tiled:
    """Positions outside the written dimension are free if index and tensor have all of them; the written dimension (o) is free as well;
    for sums, splitting what is added along it (k) gives partial sums."""
    shape, index = view.shapes[0], view.shapes[1]
    dim = view.get("dim") % max(1, len(shape))
    scope = Scope()
    maps = [scope.factor(f"d{i}", n) if i != dim and all(s[i] == n for s in view.shapes if s) else WHOLE for i, n in enumerate(shape)]
    along = [scope.factor("k", index[dim]) if index and view.call.kind == "scatter_add" else WHOLE]
    summed = () if along[0].factor is None else (along[0].factor,)
    written = [scope.factor("o", shape[dim])] if shape else []
    out = (*maps[:dim], *written, *maps[dim + 1 :])
    read = tuple(along[0] if i == dim else m for i, m in enumerate(maps)) if index else ()
    sources = [tuple(map(_as_far, read, s, index)) if s else () for s in view.shapes[2:]]
    saved = (9 + 2 * view.itemsize) * (prod(shape) + prod(index)) + view.itemsize * prod(shape[:dim]) * prod(shape[dim + 1 :])
    operands = (out, read, *sources)
    return Tiled(tuple(scope.factors), operands, (out,), summed=summed, run=_run_along, flops=prod(index), saved_bytes=2 * saved)


def _as_far(dim: DimMap, size: int, wanted: int) -> DimMap:
    """A tensor larger than the index is read only as far as the index goes."""
    return dim if size == wanted or dim.factor is not None else DimMap(None, 0, 0, wanted)


@rule("aten.index_add", "aten.index_copy", "aten.index_fill")
def index_along(view: View) -> Tiled:
    """All positions are free; rows of another region are written aside. For sums, splitting the added rows (k) gives partial sums."""
    shape = view.shapes[0]
    if not shape or not view.shapes[1]:
        raise NotImplementedError("a scalar operand")
    dim = view.get("dim") % len(shape)
    scope = Scope()
    out = tuple(scope.factor("o" if i == dim else f"d{i}", n) for i, n in enumerate(shape))
    rows = scope.factor("k", view.shapes[1][0]) if view.call.kind == "index_add" else WHOLE
    summed = () if rows.factor is None else (rows.factor,)
    sources = [(*out[:dim], rows, *out[dim + 1 :]) if s else () for s in view.shapes[2:]]
    saved = 4 * view.itemsize * prod(shape) + 48 * view.shapes[1][0]
    return Tiled(
        tuple(scope.factors), (out, (rows,), *sources), (out,), summed=summed, run=_run_along, flops=prod(shape), saved_bytes=saved
    )


def _run_masked(local: Local) -> torch.Tensor:
    x, mask, value = local.tensors
    mask = mask.to(torch.bool).reshape(*mask.shape, *(1,) * (x.dim() - mask.dim()))
    value = value.reshape(())
    return torch.where(mask, x + value if local.get("accumulate", False) else value, x)


def _masked(view: View) -> Tiled:
    """``x[mask] = scalar`` is pointwise."""
    if len(view.shapes) != 3 or prod(view.shapes[2]) != 1 or view.get("indices")[0] is None:
        raise NotImplementedError("masks select a number of elements that depends on data")
    scope = Scope()
    maps = scope.like(view.shapes[0])
    operands = (maps, maps[: len(view.shapes[1])], (WHOLE,) * len(view.shapes[2]))
    saved = 2 * view.itemsize * prod(view.shapes[0])
    return Tiled(tuple(scope.factors), operands, (maps,), run=_run_masked, flops=prod(view.shapes[0]), saved_bytes=saved)


@rule("aten.index_put", "aten._unsafe_index_put")
def index_put(view: View) -> Tiled:
    """``x[i, :, j] = values``: dimensions without an index are free. With a mask and one value, all are."""
    shape, places = view.shapes[0], list(view.get("indices"))
    if any(isinstance(p, Ref) and view.values[p.name].dtype in _MASKS for p in places):
        return _masked(view)
    places += [None] * (len(shape) - len(places))
    picked = [i for i, p in enumerate(places) if p is not None]
    chosen = broadcast_shape(view.shapes[1:-1])
    place = picked[0] if picked == list(range(picked[0], picked[-1] + 1)) else 0
    scope = Scope()
    rest = {i: scope.factor(f"d{i}", size) for i, size in enumerate(shape) if i not in picked}
    kept = list(rest.values())
    maps = tuple(rest.get(i, WHOLE) for i in range(len(shape)))
    written = (*kept[:place], *(WHOLE,) * len(chosen), *kept[place:])
    sizes = [shape[i] for i in rest]
    target = (*sizes[:place], *chosen, *sizes[place:])
    if len(view.shapes[-1]) > len(target):
        raise NotImplementedError("values with more dimensions than they are written to")
    indices = [(WHOLE,) * len(s) for s in view.shapes[1:-1]]
    operands = (maps, *indices, broadcast(written, target, view.shapes[-1]))
    saved = 16 * prod(chosen) * len(indices) + view.itemsize * (prod(shape) + prod(target))
    return Tiled(tuple(scope.factors), operands, (maps,), flops=prod(shape), saved_bytes=saved)


def _run_masked_scatter(local: Local) -> torch.Tensor:
    x, mask, source = local.tensors
    shape = local.shapes[0]
    # Each true element takes the next of the source, in the order of the whole.
    turn = (mask.expand(shape).flatten().cumsum(0) - 1).clamp(0, source.numel() - 1).view(shape)
    region = tuple(slice(a, b) for a, b in local.output_boxes[0])
    return torch.where(mask.expand(shape)[region], source.flatten()[turn[region]], x)


@rule("aten.masked_scatter")
def masked_scatter(view: View) -> Tiled:
    """All positions are free. Mask and source are needed whole, because the place of each element depends on all before it."""
    shape, mask, source = view.shapes
    if broadcast_shape([shape, mask]) != shape or not prod(source):
        raise NotImplementedError("a mask that is larger than the tensor, or nothing to take")
    scope = Scope()
    maps = scope.like(shape)
    saved = (26 + 2 * view.itemsize) * prod(shape) + view.itemsize * prod(source)
    operands = (maps, (WHOLE,) * len(mask), (WHOLE,) * len(source))
    return Tiled(tuple(scope.factors), operands, (maps,), run=_run_masked_scatter, flops=prod(shape), saved_bytes=saved)


def _written_span(view: View | Local, size: int) -> tuple[int, int, int]:
    """(first, last + 1, step) of the positions that are written in their dimension."""
    if view.call.kind == "select_scatter":
        first = int(view.get("index")) % size
        return first, first + 1, 1
    first, stop, step = int(view.get("start") or 0), view.get("end"), int(view.get("step") or 1)
    stop = size if stop is None else int(stop)
    first, stop = (min(max(n + size if n < 0 else n, 0), size) for n in (first, stop))
    return first, max(first, stop), step


def _run_slice_scatter(local: Local) -> torch.Tensor:
    x, source = local.tensors
    dim = local.get("dim", 0) % x.dim()
    first, stop, step = _written_span(local, local.shapes[0][dim])
    if local.call.kind == "select_scatter":
        source = source.unsqueeze(dim)
    start, end = local.output_boxes[0][dim]
    begin = first + max(0, -(-(start - first) // step)) * step  # the first written position that is not before this region
    if begin >= min(stop, end):
        return x.clone()
    if step > 1:  # it was given whole
        source = source.narrow(dim, (begin - first) // step, -(-(min(stop, end) - begin) // step))
    return torch.slice_scatter(x, source, dim, begin - start, min(stop, end) - start, step)


@rule("aten.slice_scatter", "aten.select_scatter")
def slice_scatter(view: View) -> Tiled:
    """All positions are free. The source is read at an offset; with steps, whole along the dimension in which it is written."""
    shape = view.shapes[0]
    dim = view.get("dim", 0) % len(shape)
    scope = Scope()
    maps = scope.like(shape)
    first, _, step = _written_span(view, shape[dim])
    if view.call.kind == "select_scatter":
        source = (*maps[:dim], *maps[dim + 1 :])
    else:
        own = maps[dim].factor
        moved = DimMap(own, 1, -first, 1 - first) if own is not None and step == 1 else WHOLE
        source = (*maps[:dim], moved, *maps[dim + 1 :])
    saved = 2 * view.itemsize * prod(shape)
    return Tiled(tuple(scope.factors), (maps, source), (maps,), light=True, run=_run_slice_scatter, flops=prod(shape), saved_bytes=saved)


@rule("aten.diagonal_scatter")
def diagonal_scatter(view: View) -> Tiled:
    """The two dimensions of the matrix are needed whole, and so is the diagonal, which the source has last."""
    shape = view.shapes[0]
    matrix = {view.get(name) % len(shape) for name in ("dim1", "dim2")}
    scope = Scope()
    maps = tuple(WHOLE if i in matrix else scope.factor(f"d{i}", size) for i, size in enumerate(shape))
    rest = tuple(dim for i, dim in enumerate(maps) if i not in matrix)
    return Tiled(tuple(scope.factors), (maps, (*rest, WHOLE)), (maps,), light=True, flops=prod(shape))


SUM, MEAN, MAX = "sum", "mean", "max"
MODES = (SUM, MEAN, MAX)
"""Functions by ATen's numbers for the modes of bags."""


def _run_embedding(local: Local) -> torch.Tensor:
    weight, indices = local.tensors
    start, stop = local.boxes[0][0]
    padding = local.get("padding_idx", -1)
    if (start, stop) == (0, local.shapes[0][0]):
        return F.embedding(indices, weight, padding if padding >= 0 else None)
    # Rows of other tiles give zero here; the sum over the tiles is the lookup. An index lies in exactly one tile.
    inside = (indices >= start) & (indices < stop)
    here = (indices - start).clamp(0, stop - start - 1)
    rows = F.embedding(here, weight)
    if padding >= 0:  # the padding row takes no gradient
        rows = torch.where((indices == padding).unsqueeze(-1), rows.detach(), rows)
    return torch.where(inside.unsqueeze(-1), rows, torch.zeros((), dtype=rows.dtype, device=rows.device))


@rule("aten.embedding")
def embedding(view: View) -> Tiled:
    """Rows of a table: v reduction (masked lookup and sum), d parameter. Gradients are dense."""
    if view.get("scale_grad_by_freq", False):
        raise NotImplementedError("gradients that depend on how often an index occurs in the batch")
    out = prod(view.output_shapes[0])
    saved = 17 * prod(view.shapes[1]) + 2 * view.itemsize * out
    return einsum(view, "v d, *b -> *b d", run=_run_embedding, flops=out, saved_bytes=saved, looks_up=True)


def _bags(local: Local) -> tuple[torch.Tensor, torch.Tensor, slice]:
    """(indices of this tile's bags, where each bag begins among them, their places among all indices)."""
    indices, offsets = local.get("indices"), local.get("offsets")
    first, stop = local.output_boxes[0][0]
    begin = int(offsets[first]) if first else 0
    last = stop == local.output_shapes[0][0] and not local.get("include_last_offset")
    end = indices.shape[0] if last else int(offsets[stop])
    return indices[begin:end], offsets[first:stop] - begin, slice(begin, end)


def _indices_of_bags(local: Local) -> torch.Tensor:
    """The indices of a tile's bags; all indices, if it is not known yet where bags begin."""
    indices: torch.Tensor = local.get("indices") if local.get("offsets") is None else _bags(local)[0]
    return indices


def _run_embedding_bag(local: Local) -> torch.Tensor:
    table, mode, padding = local.tensors[0], MODES[int(local.get("mode"))], local.get("padding_idx")
    padding = None if padding is None or padding < 0 else padding
    indices, offsets, place = _bags(local)
    scale = local.get("per_sample_weights")
    scale = None if scale is None else scale[place]
    (start, stop), rows = local.boxes[0][0], local.shapes[0][0]
    if (start, stop) == (0, rows):
        return F.embedding_bag(indices, table, offsets, mode=mode, per_sample_weights=scale, padding_idx=padding)
    # Rows of other tiles count as zero here; the sum over the tiles is the whole. A mean divides by what the whole bag holds.
    counted = torch.ones_like(indices, dtype=torch.bool) if padding is None else indices != padding
    inside = ((indices >= start) & (indices < stop) & counted).to(table.dtype)
    scale = inside if scale is None else inside * scale
    total = F.embedding_bag((indices - start).clamp(0, stop - start - 1), table, offsets, mode=SUM, per_sample_weights=scale)
    if mode == SUM:
        return total
    running = F.pad(counted.cumsum(0), (1, 0))
    ends = torch.cat([offsets[1:], offsets.new_tensor([indices.shape[0]])])
    return total / (running[ends] - running[offsets]).clamp(min=1).to(total.dtype).unsqueeze(1)


@rule("aten.embedding_bag")
def embedding_bag(view: View) -> Tiled:
    """Sums, means or maxima of rows by bag: bags (b) and columns (d) are free; v is a reduction, except for maxima. Indices, offsets
    and weights of samples are needed whole, because it depends on data where a bag's indices are."""
    if view.get("scale_grad_by_freq", False):
        raise NotImplementedError("gradients that depend on how often an index occurs in the batch")
    (rows, columns), bags = view.shapes[0], view.output_shapes[0][0]
    scope = Scope()
    b, d = scope.factor("b", bags), scope.factor("d", columns)
    v = WHOLE if MODES[int(view.get("mode"))] == MAX else scope.factor("v", rows)
    rest: list[Maps] = [(WHOLE,) * len(shape) for shape in view.shapes[1:]]
    others: list[Maps] = [(WHOLE,) * len(shape) for shape in view.output_shapes[1:]]
    count = prod(view.shapes[1])
    return Tiled(
        tuple(scope.factors),
        ((v, d), *rest),
        ((b, d), *others),
        summed=() if v.factor is None else (v.factor,),
        run=_run_embedding_bag,
        flops=2 * count * columns,
        saved_bytes=(64 + view.itemsize) * (count + bags + rows) + 9 * bags * columns,
        looks_up=True,
        picks=_indices_of_bags,
    )


def equal_bags(
    table: torch.Tensor, indices: torch.Tensor, scale: torch.Tensor | None = None, *, mode: str, padding_idx: int | None = None
) -> torch.Tensor:
    """Sum, mean or maximum of the rows that each row of ``indices`` (bags, each) names; ``scale``, of the same shape, weighs them (sum)."""
    return F.embedding_bag(indices, table, mode=mode, per_sample_weights=scale, padding_idx=padding_idx)


def _run_equal_bags(local: Local) -> torch.Tensor:
    table, indices = local.tensors[:2]
    scale = local.tensors[2] if len(local.tensors) > 2 else None
    mode, padding = str(local.get("mode")), local.get("padding_idx")
    padding = None if padding is None or padding < 0 else padding  # torch would count from the end
    (start, stop), rows = local.boxes[0][0], local.shapes[0][0]
    if (start, stop) == (0, rows):
        return equal_bags(table, indices, scale, mode=mode, padding_idx=padding)
    # Rows of other tiles count as zero here; the sum over the tiles is the whole. A mean divides by what the whole bag holds.
    counted = torch.ones_like(indices, dtype=torch.bool) if padding is None else indices != padding
    inside = ((indices >= start) & (indices < stop) & counted).to(table.dtype)
    own = inside if scale is None else inside * scale
    total = equal_bags(table, (indices - start).clamp(0, stop - start - 1), own, mode=SUM)
    return total if mode == SUM else total / counted.sum(1, keepdim=True).clamp(min=1).to(total.dtype)


@rule("soap.equal_bags")
def bags(view: View) -> Tiled:
    """In place of ``aten.embedding_bag`` (``tracing.rewriting``): bags and columns are free; v is a reduction, except for maxima."""
    scale = ", b [l]" if len(view.shapes) > 2 else ""
    table = "[v] d" if view.get("mode") == MAX else "v d"
    (rows, columns), (count, each) = view.shapes[:2]
    saved = (64 + view.itemsize) * (count * each + count + rows) + 9 * count * columns
    found = einsum(view, f"{table}, b [l]{scale} -> b d", run=_run_equal_bags, flops=2 * prod((count, each, columns)), saved_bytes=saved)
    return replace(found, looks_up=True)
