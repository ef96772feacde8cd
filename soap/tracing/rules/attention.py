"""Scaled dot-product attention."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
import torch.nn.functional as F

from soap.model.graph import WHOLE, DimMap
from soap.model.regions import Interval
from soap.tracing.calls import argument
from soap.tracing.rules.notation import Local, Maps, Scope, Tiled, View, blocks, broadcast, rule
from soap.tracing.rules.random import dropped, keep_mask
from soap.tracing.types import LOWER_TYPES

Band = tuple[int | None, int | None]
"""How many keys before and after its own position a query sees; None for all. ``(None, 0)`` is causal."""
BLOCK = 512
"""Queries that share a range of keys, and where ranges begin, are multiples of it: kernels copy masks of odd sizes."""


def in_band(band: Band, rows: Interval, keys: Interval, device: torch.device | None = None) -> torch.Tensor:
    """Which of some keys are in the band of some queries."""
    ahead = torch.arange(*keys, device=device) - torch.arange(*rows, device=device).unsqueeze(1)
    before, after = (size if size is not None else max(rows[1], keys[1]) for size in band)
    return (ahead >= -before) & (ahead <= after)


def _seen_blocks(band: Band, rows: Interval, keys: int) -> Iterator[tuple[Interval, Interval]]:
    """Blocks of queries, and the keys of which each sees a part: about as many queries at once as a narrow band has keys."""
    before, after = band
    step = max(1, rows[1] - rows[0]) if before is None or after is None else max(1, -(-(before + after) // BLOCK)) * BLOCK
    for first in range(rows[0], max(rows[1], rows[0] + 1), step):
        last = min(first + step, rows[1])
        low = 0 if before is None else max(0, first - before) // BLOCK * BLOCK
        yield (first, last), (low, keys if after is None else min(keys, last + after))


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    band: Band,
    first: int = 0,
) -> torch.Tensor:
    """Attention of queries, from position ``first`` on, to the keys in a band around each; keys that a block does not see are not read."""
    parts, masks = [], dict[tuple[int, int, int], torch.Tensor]()
    for rows, (low, high) in _seen_blocks(band, (first, first + query.shape[-2]), key.shape[-2]):
        q, k, v = _part(query, (rows[0] - first, rows[1] - first)), _part(key, (low, high)), _part(value, (low, high))
        before, after = band
        causal = after == 0 and low == rows[0] and (before is None or before >= rows[1] - low - 1)
        kind = (rows[1] - rows[0], high - low, rows[0] - low)
        if not causal and kind not in masks:
            masks[kind] = in_band(band, rows, (low, high), query.device)
        mask = masks.get(kind)
        parts.append(F.scaled_dot_product_attention(q, k, v, mask, dropout_p, mask is None, scale=scale, enable_gqa=enable_gqa))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def _part(x: torch.Tensor, rows: Interval) -> torch.Tensor:
    """Some rows; all of them without a view, of which the gradient would be copied."""
    return x if rows == (0, x.shape[-2]) else x[..., rows[0] : rows[1], :]


def run_attention(local: Local) -> torch.Tensor:
    """Attention of some of the queries. The band of a mask, and dropout's mask, have their positions in the whole.

    On GPUs kernels that never write the weights take groups in 16 bits alone: for others keys and values are repeated.
    """
    q, k, v = local.tensors[:3]
    mask, band = local.get("attn_mask"), local.get("band") or ((None, 0) if local.get("is_causal", False) else None)
    dropout, scale, grouped = local.get("dropout_p", 0.0), local.get("scale"), bool(local.get("enable_gqa", False))
    rows = local.boxes[0][-2]
    if grouped and (dropout != 0.0 or (q.is_cuda and q.dtype not in LOWER_TYPES)):
        k, v, grouped = *(t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v)), False
    if dropout == 0.0 and band is not None:
        return scaled_dot_product_attention(q, k, v, 0.0, scale, grouped, band=band, first=rows[0])
    if dropout == 0.0:
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, scale=scale, enable_gqa=grouped)
    weights = q @ k.transpose(-2, -1) * (scale if scale is not None else q.shape[-1] ** -0.5)
    if band is not None:
        mask = in_band(band, rows, (0, k.shape[-2]), q.device)
    if mask is not None:
        weights = weights.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else weights + mask
    shape = (*local.output_shapes[0][:-1], local.shapes[1][-2])
    box = (*local.output_boxes[0][:-1], (0, shape[-1]))
    weights = torch.ops.aten._safe_softmax.default(weights, -1)  # a query that sees no key gives zero, as in torch's own kernels
    out: torch.Tensor = dropped(weights, keep_mask(local, shape, box, dropout, weights.device), dropout) @ v
    return out


@rule("aten.scaled_dot_product_attention", "soap.scaled_dot_product_attention")
def attention(view: View) -> Tiled:
    """``softmax(q kᵀ) v``: leading dimensions and queries are free; keys are needed whole. Grouped queries split by key head."""
    q, k, v = view.shapes[:3]
    out = view.output_shapes[0]
    scope = Scope()
    if k[:-2] != v[:-2] or len(view.shapes) > 4 or len(q) < 3:
        raise NotImplementedError("keys and values with different leading dimensions")
    names = ["b", "h"][: len(q) - 2] if len(q) <= 4 else [f"b{i}" for i in range(len(q) - 2)]
    lead: list[DimMap] = []
    key_lead: list[DimMap] = []
    for name, q_size, k_size in zip(names, q[:-2], k[:-2], strict=True):
        if q_size == k_size:
            lead.append(scope.factor(name, q_size))
            key_lead.append(lead[-1])
        elif q_size % k_size:
            raise NotImplementedError("fewer queries than keys")
        else:  # several query heads share one key head
            shared = scope.factor(name, k_size)
            share = q_size // k_size
            lead.append(blocks(shared, share))
            key_lead.append(shared)
    rows = scope.factor("q", q[-2])
    maps: Maps = (*lead, rows, WHOLE)
    operands = [maps, (*key_lead, WHOLE, WHOLE), (*key_lead, WHOLE, WHOLE)]
    if len(view.shapes) > 3:
        scores = (*q[:-1], k[-2])
        operands.append(broadcast((*lead, rows, WHOLE), scores, view.shapes[3]))
    flops = 2 * prod(q[:-1]) * k[-2] * (q[-1] + v[-1])
    band, pairs = view.get("band"), q[-2] * k[-2]
    if band is not None:
        pairs = sum((last - first) * (high - low) for (first, last), (low, high) in _seen_blocks(band, (0, q[-2]), k[-2]))
    # Scores, weights and mask of the unfused form, and keys and values once for each head that shares them: an upper bound.
    saved = 3 * view.itemsize * prod(q[:-2]) * pairs
    if q[:-2] != k[:-2]:
        saved += view.itemsize * prod(q[:-2]) * k[-2] * (q[-1] + v[-1])
    return Tiled(
        tuple(scope.factors),
        tuple(operands),
        ((*lead, rows, *(WHOLE,) * (len(out) - len(q) + 1)),),
        run=run_attention,
        flops=flops,
        saved_bytes=saved,
        skipped_share=0.5 if view.get("is_causal") else 1.0 - pairs / max(1, q[-2] * k[-2]),
        drawn=prod(q[:-1]) * k[-2] if argument(view.call, "dropout_p") else 0,
        lean=bool(argument(view.call, "enable_gqa")),
        fused_bytes=0 if argument(view.call, "dropout_p") else saved,  # with dropout ``run_attention`` writes the weights
    )
