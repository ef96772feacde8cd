"""Embeddings: rows of a table by index, one by one or summed up in bags."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
import torch.nn.functional as F

from soap.model.graph import WHOLE
from soap.tracing.rules.notation import Local, Maps, Scope, Tiled, View, einsum, rule

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
    """In place of ``aten.embedding_bag`` (``tracing.bags``): bags and columns are free; v is a reduction, except for maxima."""
    scale = ", b [l]" if len(view.shapes) > 2 else ""
    table = "[v] d" if view.get("mode") == MAX else "v d"
    (rows, columns), (count, each) = view.shapes[:2]
    saved = (64 + view.itemsize) * (count * each + count + rows) + 9 * count * columns
    found = einsum(view, f"{table}, b [l]{scale} -> b d", run=_run_equal_bags, flops=2 * prod((count, each, columns)), saved_bytes=saved)
    return replace(found, looks_up=True)
