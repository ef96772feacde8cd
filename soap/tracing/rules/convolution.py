"""Convolutions: windows over the attribute dimensions, with halos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from soap.model.graph import WHOLE, DimMap
from soap.tracing.rules.notation import Local, Maps, Scope, Tiled, View, blocks
from soap.tracing.rules.registry import rule
from soap.tracing.rules.windows import SPACE, Window, apart_bytes, convolve, each, pad_windows, padded_bytes


@dataclass(frozen=True, slots=True)
class Spread:
    """One dimension: input i gives to outputs ``[i*stride - padding, i*stride - padding + extent)``.

    Outputs are split in blocks of ``stride``, so that a block's inputs follow by whole numbers.
    """

    stride: int
    padding: int
    extent: int

    def inputs(self, step: DimMap) -> DimMap:
        """The inputs that contribute to the steps ``[a, b)`` of outputs."""
        if step.factor is None:
            return WHOLE
        low = -((self.extent - 1 - self.padding) // self.stride)
        return DimMap(step.factor, 1, low, (self.stride - 1 + self.padding) // self.stride + 1)

    def outputs(self, step: DimMap) -> DimMap:
        """The outputs of the steps; the last may be cut off."""
        return blocks(step, self.stride)


def _spreads(get: Any, weight: Sequence[int]) -> list[Spread]:
    rank = len(weight) - 2
    dilation = each(get("dilation", 1), rank)
    extents = [d * (k - 1) + 1 for d, k in zip(dilation, weight[2:], strict=True)]
    return [Spread(*s) for s in zip(each(get("stride", 1), rank), each(get("padding", 0), rank), extents, strict=True)]


def _run_transposed(local: Local) -> torch.Tensor:
    x, weight = local.tensors[0], local.tensors[1]
    rank, groups = weight.dim() - 2, int(local.get("groups", 1))
    # Of the tiles that split c, only the one that begins at 0 adds the bias.
    first = groups > 1 or local.boxes[0][-rank - 1][0] == 0
    bias = local.tensors[2] if len(local.tensors) > 2 and first else None
    parts = groups * weight.shape[0] // local.shapes[1][0] if groups > 1 else 1
    stride, dilation = each(local.get("stride", 1), rank), each(local.get("dilation", 1), rank)
    function: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
    if all(box == (0, size) for box, size in zip(local.output_boxes[0][-rank:], local.output_shapes[0][-rank:], strict=True)):
        padding, extra = each(local.get("padding", 0), rank), each(local.get("output_padding", 0), rank)
        return convolve(local, function, x, bias, stride, padding, extra, parts, dilation)
    if 0 in x.shape[-rank:]:  # no input contributes to these outputs
        out = x.new_zeros(local.output_lengths) + (x.sum() + weight.sum()) * 0
    else:
        out = convolve(local, function, x, None, stride, 0, 0, parts, dilation)
        out = F.pad(out, _crop(local, rank))
    return out if bias is None else out + bias.view(-1, *(1,) * rank)


def _crop(local: Local, rank: int) -> list[int]:
    """What to add around (if negative, cut from) the outputs of all local inputs, to get the local outputs."""
    amounts: list[int] = []
    spreads = _spreads(local.get, local.shapes[1])
    for spread, (first, last), (start, stop) in zip(spreads, local.boxes[0][-rank:], local.output_boxes[0][-rank:], strict=True):
        low = first * spread.stride - spread.padding
        high = (last - 1) * spread.stride - spread.padding + spread.extent
        amounts[:0] = [low - start, stop - high]
    return amounts


@rule("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d")
def transposed(view: View) -> Tiled:
    """b sample, o parameter, c reduction; h, w attribute in blocks of the stride, with halo; groups split as g."""
    x, weight, out = view.shapes[0], view.shapes[1], view.output_shapes[0]
    rank, groups = len(weight) - 2, int(view.get("groups", 1))
    spreads = _spreads(view.get, weight)
    scope = Scope()
    lead = tuple(scope.factor("b", size) for size in x[: -rank - 1])  # none without a batch
    summed: tuple[int, ...] = ()
    if groups == 1:
        c, o = scope.factor("c", weight[0]), scope.factor("o", weight[1])
        weight_c, weight_o = c, o
        summed = () if c.factor is None else (c.factor,)
    else:
        g = scope.factor("g", groups).factor
        span = weight[0] // groups
        c, o = DimMap(g, span, 0, span), DimMap(g, weight[1], 0, weight[1])
        weight_c, weight_o = c, WHOLE
    steps = [scope.factor(name, -(-size // s.stride)) for name, size, s in zip(SPACE[rank], out[-rank:], spreads, strict=True)]
    inputs: Maps = (*lead, c, *(s.inputs(q) for s, q in zip(spreads, steps, strict=True)))
    outputs: Maps = (*lead, o, *(s.outputs(q) for s, q in zip(spreads, steps, strict=True)))
    operands = (inputs, (weight_c, weight_o, *(WHOLE,) * rank), *([(o,)] if view.has("bias") else []))
    spread_out = prod(out[:-rank]) * prod((n - 1) * s.stride + s.extent for n, s in zip(x[-rank:], spreads, strict=True))
    return Tiled(
        tuple(scope.factors),
        operands,
        (outputs,),
        summed=summed,
        run=_run_transposed,
        flops=2 * prod(x) * prod(weight[1:]),
        saved_bytes=view.itemsize * spread_out + apart_bytes(view),
    )


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
