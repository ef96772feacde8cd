"""Bags of equally many rows of a table, as a call of our own (``soap.tracing.causal`` finds them). It keeps the dimension of the samples.
``aten.embedding_bag`` has all indices in one row, and data says where a bag begins, so each of its tiles needs all indices."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
import torch.nn.functional as F

from soap.tracing.rules.notation import Local, Tiled, View, einsum
from soap.tracing.rules.registry import rule

SUM, MEAN, MAX = "sum", "mean", "max"
MODES = (SUM, MEAN, MAX)
"""Functions by ATen's numbers for the modes of bags."""


def equal_bags(
    table: torch.Tensor, indices: torch.Tensor, scale: torch.Tensor | None = None, *, mode: str, padding_idx: int | None = None
) -> torch.Tensor:
    """Sum, mean or maximum of the rows that each row of ``indices`` (bags, each) names; ``scale``, of the same shape, weighs them (sum)."""
    return F.embedding_bag(indices, table, mode=mode, per_sample_weights=scale, padding_idx=padding_idx)


def _run(local: Local) -> torch.Tensor:
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
    """Bags and columns are free; v is a reduction, except for maxima."""
    scale = ", b [l]" if len(view.shapes) > 2 else ""
    table = "[v] d" if view.get("mode") == MAX else "v d"
    (rows, columns), (count, each) = view.shapes[:2]
    saved = (64 + view.itemsize) * (count * each + count + rows) + 9 * count * columns
    found = einsum(view, f"{table}, b [l]{scale} -> b d", run=_run, flops=2 * prod((count, each, columns)), saved_bytes=saved)
    return replace(found, looks_up=True)
