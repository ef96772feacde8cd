"""Scaled dot-product attention."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F

from soap.model.graph import WHOLE, DimMap
from soap.tracing.calls import argument
from soap.tracing.rules.notation import Local, Maps, Scope, Tiled, View, blocks, broadcast
from soap.tracing.rules.random import dropped, keep_mask
from soap.tracing.rules.registry import rule
from soap.tracing.types import LOWER_TYPES


def run_attention(local: Local) -> torch.Tensor:
    """Attention of some of the queries. The triangle of a causal mask, and dropout's mask, have their positions in the whole.

    On GPUs kernels that never write the weights take groups in 16 bits alone: for others keys and values are repeated.
    """
    q, k, v = local.tensors[:3]
    mask = local.get("attn_mask")
    dropout, scale, grouped = local.get("dropout_p", 0.0), local.get("scale"), bool(local.get("enable_gqa", False))
    causal = bool(local.get("is_causal", False))
    rows = local.boxes[0][-2]
    if causal and rows[0] > 0:  # the triangle begins at this tile's first query
        mask = torch.arange(*rows, device=q.device).unsqueeze(1) >= torch.arange(k.shape[-2], device=q.device)
        causal = False
    if grouped and (dropout != 0.0 or (q.is_cuda and q.dtype not in LOWER_TYPES)):
        k, v, grouped = *(t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v)), False
    if dropout == 0.0:
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)
    weights = q @ k.transpose(-2, -1) * (scale if scale is not None else q.shape[-1] ** -0.5)
    if causal:
        mask = torch.ones(weights.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        weights = weights.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else weights + mask
    shape = (*local.output_shapes[0][:-1], local.shapes[1][-2])
    box = (*local.output_boxes[0][:-1], (0, shape[-1]))
    weights = torch.ops.aten._safe_softmax.default(weights, -1)  # a query that sees no key gives zero, as in torch's own kernels
    out: torch.Tensor = dropped(weights, keep_mask(local, shape, box, dropout, weights.device), dropout) @ v
    return out


@rule("aten.scaled_dot_product_attention")
def attention(view: View) -> Tiled:
    """``softmax(q kᵀ) v``: leading dimensions (sample, heads) and queries are free; keys are needed whole. Grouped queries split by key
    head."""
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
    # Scores, weights and mask of the unfused form, and keys and values once for each head that shares them: an upper bound.
    saved = 3 * view.itemsize * prod(q[:-1]) * k[-2]
    if q[:-2] != k[:-2]:
        saved += view.itemsize * prod(q[:-2]) * k[-2] * (q[-1] + v[-1])
    return Tiled(
        tuple(scope.factors),
        tuple(operands),
        ((*lead, rows, *(WHOLE,) * (len(out) - len(q) + 1)),),
        run=run_attention,
        flops=flops,
        saved_bytes=saved,
        skipped_share=0.5 if argument(view.call, "is_causal") else 0.0,
        drawn=prod(q[:-1]) * k[-2] if argument(view.call, "dropout_p") else 0,
        lean=bool(argument(view.call, "enable_gqa")),
        fused_bytes=0 if argument(view.call, "dropout_p") else saved,  # with dropout ``run_attention`` writes the weights
    )
