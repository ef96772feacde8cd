"""Convolutions: windows over the attribute dimensions, with halos."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from soap.model.graph import WHOLE, DimMap
from soap.tracing.rules.notation import Local, Scope, Tiled, View
from soap.tracing.rules.registry import rule
from soap.tracing.rules.transposed import transposed
from soap.tracing.rules.windows import SPACE, Window, apart_bytes, convolve, each, pad_windows, padded_bytes


def _same_padding(size: int, out: int, stride: int, extent: int) -> int:
    return max(0, (out - 1) * stride + extent - size) // 2


def _convolution_windows(get: Any, x: Sequence[int], weight: Sequence[int], out: Sequence[int]) -> list[Window]:
    rank = len(weight) - 2
    stride, dilation = each(get("stride", 1), rank), each(get("dilation", 1), rank)
    extents = [d * (k - 1) + 1 for d, k in zip(dilation, weight[2:], strict=True)]
    padding = get("padding", 0)
    if isinstance(padding, str):
        pads = (
            [0] * rank
            if padding == "valid"
            else [_same_padding(n, o, 1, e) for n, o, e in zip(x[-rank:], out[-rank:], extents, strict=True)]
        )
    else:
        pads = each(padding, rank)
    plain = [Window(*w) for w in zip(stride, pads, extents, strict=True)]
    return [win.fitted(*sizes) for win, sizes in zip(plain, zip(x[-rank:], out[-rank:], strict=True), strict=True)]


def _run_convolution(local: Local) -> torch.Tensor:
    x, weight = local.shapes[0], local.shapes[1]
    windows = _convolution_windows(local.get, x, weight, local.output_shapes[0])
    rank = len(windows)
    groups = local.get("groups", 1)
    if groups > 1:
        groups = groups * (local.boxes[1][0][1] - local.boxes[1][0][0]) // weight[0]
    first = local.boxes[0][-rank - 1][0] == 0 or local.get("groups", 1) > 1
    bias = local.tensors[2] if len(local.tensors) > 2 and first else None
    stride, dilation = each(local.get("stride", 1), rank), each(local.get("dilation", 1), rank)
    function: Any = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    padded, padding = pad_windows(local, windows, 0.0)
    return convolve(local, function, padded, bias, stride, padding, dilation, groups)


@rule("aten.conv1d", "aten.conv2d", "aten.conv3d")
def convolution(view: View) -> Tiled:
    """b sample, o parameter (output channel), c reduction (input channel), h, w attribute with halo; groups split as g."""
    x, weight, out = view.shapes[0], view.shapes[1], view.output_shapes[0]
    rank, groups = len(weight) - 2, int(view.get("groups", 1))
    scope = Scope()
    lead = tuple(scope.factor("b", size) for size in x[: -rank - 1])  # none without a batch
    if groups == 1:
        c = scope.factor("c", x[-rank - 1])
        o = scope.factor("o", weight[0])
        channels_in, weight_o, weight_c = c, o, c
        summed = () if c.factor is None else (c.factor,)
    else:
        g = scope.factor("g", groups)
        span_in, span_out = x[-rank - 1] // groups, weight[0] // groups
        channels_in, weight_o, weight_c = DimMap(g.factor, span_in, 0, span_in), DimMap(g.factor, span_out, 0, span_out), WHOLE
        o, summed = weight_o, ()
    names = SPACE[rank]
    space = [scope.factor(name, size) for name, size in zip(names, out[-rank:], strict=True)]
    windows = _convolution_windows(view.get, x, weight, out)
    inputs = (*lead, channels_in, *(w.over(s) for s, w in zip(space, windows, strict=True)))
    operands = (inputs, (weight_o, weight_c, *(WHOLE,) * rank), *([(o,)] if view.has("bias") else []))
    flops, saved = 2 * prod(out) * prod(weight[1:]), padded_bytes(view, windows) + apart_bytes(view)
    return Tiled(tuple(scope.factors), operands, ((*lead, o, *space),), summed=summed, run=_run_convolution, flops=flops, saved_bytes=saved)


@rule("aten.convolution")
def either_convolution(view: View) -> Tiled:
    """The name of both in core ATen."""
    return transposed(view) if view.get("transposed") else convolution(view)
