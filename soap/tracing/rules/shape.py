"""Views and other calls that move elements without computing: local sizes are worked out again for each tile. Padding: constant, reflected,
repeated at the border, or around."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod

import torch
import torch.nn.functional as F

from soap.model.dtypes import is_differentiable
from soap.model.graph import WHOLE, DimMap
from soap.tracing.rules.notation import Local, Scope, Tiled, View, broadcast, rule


def _run_reshape(local: Local) -> torch.Tensor:
    return local.tensors[0].reshape(local.output_lengths)


@rule(
    "aten.view.default",
    "aten.reshape",
    "aten.flatten",
    "aten.unflatten",
    "aten.ravel",
    "aten._unsafe_view",
    "aten.squeeze",
    "aten.unsqueeze",
)
def reshape(view: View) -> Tiled:
    """Any change of shape: groups of dimensions with equal products; each group is split along its major factor."""
    source, target = view.shapes[0], view.output_shapes[0]
    scope = Scope()
    in_maps, out_maps = [WHOLE] * len(source), [WHOLE] * len(target)
    for ins, outs in _groups(source, target):
        if not ins or not outs:
            continue
        major_in, major_out = source[ins[0]], target[outs[0]]
        common = gcd(major_in, major_out) if len(ins) > 1 and len(outs) > 1 else min(major_in, major_out)
        if major_in % common or major_out % common:
            continue
        factor = scope.factor(f"d{outs[0]}", common).factor
        if factor is not None:
            in_maps[ins[0]] = DimMap(factor, major_in // common, 0, major_in // common)
            out_maps[outs[0]] = DimMap(factor, major_out // common, 0, major_out // common)
    return Tiled(tuple(scope.factors), (tuple(in_maps),), (tuple(out_maps),), light=True, linear=True, run=_run_reshape)


def _groups(source: Sequence[int], target: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Dimensions of both shapes (those of size 1 left out) in the finest groups with equal products."""
    ins = [i for i, n in enumerate(source) if n != 1]
    outs = [i for i, n in enumerate(target) if n != 1]
    result: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(ins) and j < len(outs):
        group_in, group_out = [ins[i]], [outs[j]]
        have, want = source[ins[i]], target[outs[j]]
        i, j = i + 1, j + 1
        while have != want:
            if have < want:
                have *= source[ins[i]]
                group_in.append(ins[i])
                i += 1
            else:
                want *= target[outs[j]]
                group_out.append(outs[j])
                j += 1
        result.append((group_in, group_out))
    return result


def _permutation(view: View) -> list[int]:
    rank = len(view.shapes[0])
    kind = view.call.kind
    if kind == "permute":
        return [int(d) % rank for d in view.get("dims")]
    order = list(range(rank))
    first, second = (0, 1) if kind == "t" else (view.get("dim0") % rank, view.get("dim1") % rank)
    if rank > 1:
        order[first], order[second] = order[second], order[first]
    return order


@rule("aten.permute", "aten.transpose", "aten.t")
def permute(view: View) -> Tiled:
    """Dimensions in another order."""
    scope = Scope()
    source = scope.like(view.shapes[0])
    out = tuple(source[d] for d in _permutation(view))
    return Tiled(tuple(scope.factors), (source,), (out,), light=True, linear=True)


def _run_expand(local: Local) -> torch.Tensor:
    return local.tensors[0].expand(local.output_lengths)


@rule("aten.expand", "aten.broadcast_to")
def expand(view: View) -> Tiled:
    """Broadcast to a larger shape."""
    shape = view.output_shapes[0]
    scope = Scope()
    out = scope.like(shape)
    operands = tuple(broadcast(out, shape, s) for s in view.shapes)
    return Tiled(tuple(scope.factors), operands, (out,), light=True, linear=True, run=_run_expand)


def _run_slice(local: Local) -> torch.Tensor:
    step = local.get("step", 1) or 1
    x = local.tensors[0]
    if step == 1:
        return x
    dim = local.get("dim", 0) % x.dim()
    return x[(slice(None),) * dim + (slice(None, None, step),)]


@rule("aten.slice", "aten.narrow")
def slice_(view: View) -> Tiled:
    """``x[..., start:end:step, ...]``: an offset along one dimension."""
    source, out = view.shapes[0], view.output_shapes[0]
    dim = view.get("dim", 0) % len(source)
    start, step = view.get("start") or 0, view.get("step") or 1
    start = min(max(start + source[dim] if start < 0 else start, 0), source[dim])
    scope = Scope()
    maps = list(scope.like(out))
    own = maps[dim].factor
    operand = list(maps)
    if source[dim] > 1:
        operand[dim] = DimMap(own, step, start, start + 1) if own is not None else DimMap(None, 0, start, start + out[dim])
    return Tiled(tuple(scope.factors), (tuple(operand),), (tuple(maps),), light=True, linear=True, run=_run_slice)


def _run_select(local: Local) -> torch.Tensor:
    return local.tensors[0].reshape(local.output_lengths)


@rule("aten.select.int")
def select(view: View) -> Tiled:
    """One index of one dimension."""
    source, out = view.shapes[0], view.output_shapes[0]
    dim, index = view.get("dim") % len(source), view.get("index") % source[view.get("dim") % len(source)]
    scope = Scope()
    maps = scope.like(out)
    operand = (*maps[:dim], DimMap(None, 0, index, index + 1) if source[dim] > 1 else WHOLE, *maps[dim:])
    return Tiled(tuple(scope.factors), (operand,), (maps,), light=True, linear=True, run=_run_select)


def _run_cat(local: Local) -> torch.Tensor:
    return torch.cat(list(local.tensors), local.get("dim", 0) % len(local.output_shapes[0]))


@rule("aten.cat")
def cat(view: View) -> Tiled:
    """Tensors one after another along one dimension: an offset for each; a tile may miss some of them."""
    out = view.output_shapes[0]
    dim = view.get("dim", 0) % len(out)
    if any(len(shape) != len(out) for shape in view.shapes):
        raise ValueError("concatenation with an empty tensor of another rank")
    scope = Scope()
    maps = scope.like(out)
    operands, offset = [], 0
    for shape in view.shapes:
        own = maps[dim]
        moved = DimMap(own.factor, 1, -offset, 1 - offset) if own.factor is not None else WHOLE
        operands.append((*maps[:dim], moved, *maps[dim + 1 :]))
        offset += shape[dim]
    return Tiled(tuple(scope.factors), tuple(operands), (maps,), light=True, run=_run_cat)


@rule("aten.to.dtype", "aten.clone")
def cast(view: View) -> Tiled:
    """Copies and casts. Partial sums may be cast one by one, unless the cast truncates to whole numbers."""
    scope = Scope()
    maps = scope.like(view.output_shapes[0])
    source, target = (view.values[name].dtype for name in (view.call.operands[0], view.call.outputs[0]))
    linear = source == target or is_differentiable(target)
    return Tiled(tuple(scope.factors), (maps,), (maps,), light=True, linear=linear)


def _run_detach(local: Local) -> torch.Tensor:
    return local.tensors[0].detach()


@rule("aten.detach")
def detach(view: View) -> Tiled:
    """Stops gradients."""
    scope = Scope()
    maps = scope.like(view.output_shapes[0])
    return Tiled(tuple(scope.factors), (maps,), (maps,), light=True, linear=True, run=_run_detach)


@rule("aten.unfold")
def unfold(view: View) -> Tiled:
    """Windows along one dimension become a new last dimension."""
    shape, out = view.shapes[0], view.output_shapes[0]
    if not shape:
        raise NotImplementedError("a scalar operand")
    dim, size, step = view.get("dimension") % len(shape), int(view.get("size")), int(view.get("step"))
    scope = Scope()
    maps = scope.like(out[:-1])
    own = maps[dim].factor
    window = DimMap(own, step, 0, size) if own is not None else DimMap(None, 0, 0, size)
    return Tiled(tuple(scope.factors), ((*maps[:dim], window, *maps[dim + 1 :]),), ((*maps, WHOLE),), light=True, linear=True)


@rule("aten.diagonal")
def diagonal(view: View) -> Tiled:
    """The two dimensions of the matrix are needed whole; the diagonal is the new last dimension."""
    shape = view.shapes[0]
    matrix = {view.get(name) % len(shape) for name in ("dim1", "dim2")}
    scope = Scope()
    maps = [WHOLE if i in matrix else scope.factor(f"d{i}", size) for i, size in enumerate(shape)]
    rest = tuple(dim for i, dim in enumerate(maps) if i not in matrix)
    return Tiled(tuple(scope.factors), (tuple(maps),), ((*rest, WHOLE),), light=True, linear=True)


@rule("aten.diag_embed")
def diag_embed(view: View) -> Tiled:
    """The last dimension becomes the diagonal of two new ones."""
    rank = len(view.output_shapes[0])
    matrix = sorted(view.get(name) % rank for name in ("dim1", "dim2"))
    scope = Scope()
    rest = list(scope.like(view.shapes[0][:-1]))
    out = list(rest)
    for dim in matrix:
        out.insert(dim, WHOLE)
    return Tiled(tuple(scope.factors), ((*rest, WHOLE),), (tuple(out),), linear=True)


def _pads(pad: Sequence[int], rank: int) -> list[tuple[int, int]]:
    """torch's padding list (last dimension first) as (before, after) per dimension."""
    pairs = [(int(pad[i]), int(pad[i + 1])) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (rank - len(pairs)) + pairs[::-1]


def _run_pad(local: Local) -> torch.Tensor:
    before = _pads(local.get("pad"), len(local.shapes[0]))
    amounts: list[int] = []
    for (left, _), out, inside in reversed(list(zip(before, local.output_boxes[0], local.boxes[0], strict=True))):
        if inside[0] >= inside[1]:
            amounts += [out[1] - out[0], 0]
        else:
            amounts += [inside[0] - (out[0] - left), (out[1] - left) - inside[1]]
    return F.pad(local.tensors[0], amounts, value=float(local.get("value") or 0.0))


@rule("aten.pad", "aten.constant_pad_nd")
def pad(view: View) -> Tiled:
    """Constant padding: an offset along each dimension. Negative amounts cut elements off."""
    if view.call.kind == "pad" and view.get("mode", "constant") != "constant":
        return mirrored(view)
    source, out = view.shapes[0], view.output_shapes[0]
    scope = Scope()
    maps = scope.like(out)
    operand: list[DimMap] = []
    for (left, right), dim, size in zip(_pads(view.get("pad"), len(source)), maps, source, strict=True):
        operand.append(dim if size == dim_size(dim, scope) and not left and not right else _shifted(dim, left))
    return Tiled(tuple(scope.factors), (tuple(operand),), (maps,), light=True, run=_run_pad)


def dim_size(dim: DimMap, scope: Scope) -> int:
    """Size of a dimension that follows a factor identically; 1 without one."""
    return 1 if dim.factor is None else scope.factors[dim.factor][1]


def _shifted(dim: DimMap, left: int) -> DimMap:
    return DimMap(dim.factor, 1, -left, 1 - left) if dim.factor is not None else WHOLE


def _mode(call: View | Local) -> str:
    kind = call.call.kind
    return str(call.get("mode")) if kind == "pad" else "reflect" if kind.startswith("reflection") else "replicate"


def _amounts(call: View | Local) -> list[tuple[int, int]]:
    return _pads(call.get("pad" if call.call.kind == "pad" else "padding"), len(call.shapes[0]))


def _sources(mode: str, start: int, stop: int, left: int, size: int) -> torch.Tensor:
    """Which element each of the padded positions ``[start, stop)`` shows."""
    at = torch.arange(start - left, stop - left)
    if mode == "circular":
        return at % size
    if mode == "replicate":
        return at.clamp(0, size - 1)
    at = at.abs()
    return torch.minimum(at, 2 * (size - 1) - at)


def _run_mirrored(local: Local) -> torch.Tensor:
    out: torch.Tensor = local.tensors[0]
    if all(box == (0, size) for box, size in zip(local.output_boxes[0], local.output_shapes[0], strict=True)):
        out = local.plain()
        return out
    mode = _mode(local)
    for dim, ((left, right), wanted, (first, _)) in enumerate(zip(_amounts(local), local.output_boxes[0], local.boxes[0], strict=True)):
        if left or right:
            shown = _sources(mode, *wanted, left, local.shapes[0][dim]) - first
            out = out.index_select(dim, shown.to(out.device))
    return out


def mirrored(view: View) -> Tiled:
    """Borders that show elements of the tensor: near ones for reflections and repetitions (a halo), far ones for circular padding (the
    dimension is needed whole)."""
    mode, amounts = _mode(view), _amounts(view)
    if any(n < 0 for pair in amounts for n in pair):
        raise NotImplementedError("negative padding")
    scope = Scope()
    operand: list[DimMap] = []
    out: list[DimMap] = []
    for i, ((left, right), size) in enumerate(zip(amounts, view.output_shapes[0], strict=True)):
        if mode == "circular" and (left or right):
            operand.append(WHOLE)
            out.append(WHOLE)
            continue
        out.append(scope.factor(f"d{i}", size))
        if not (left or right) or out[-1].factor is None:
            operand.append(out[-1])
        elif mode == "replicate":
            operand.append(DimMap(out[-1].factor, 1, -left - right, 1))
        else:
            operand.append(DimMap(out[-1].factor, 1, -left - 2 * right, 1 + left))
    saved = view.itemsize * prod(view.output_shapes[0]) + 16 * sum(view.output_shapes[0])
    return Tiled(tuple(scope.factors), (tuple(operand),), (tuple(out),), run=_run_mirrored, saved_bytes=saved)


for _kind in ("reflection", "replication"):
    rule(*(f"aten.{_kind}_pad{rank}d" for rank in (1, 2, 3)))(mirrored)
