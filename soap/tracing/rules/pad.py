"""Padding: constant, reflected, repeated at the border, or around."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F

from soap.model.graph import WHOLE, DimMap
from soap.tracing.rules.notation import Local, Scope, Tiled, View
from soap.tracing.rules.registry import rule


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
