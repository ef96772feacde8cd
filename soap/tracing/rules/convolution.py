"""Convolutions: windows over the attribute dimensions, with halos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from soap.graph import WHOLE, DimMap
from soap.tracing.rules.notation import Local, Scope, Tiled, View
from soap.tracing.rules.registry import rule

SPACE = {1: ("l",), 2: ("h", "w"), 3: ("d", "h", "w")}
"""Names of the dimensions of space, by their number."""


@dataclass(frozen=True, slots=True)
class Window:
    """One dimension of a window: step from one output to the next, padding before the first, and how many inputs it spans."""

    stride: int
    padding: int
    extent: int

    def over(self, out: DimMap) -> DimMap:
        """The inputs that outputs ``[a, b)`` see: ``[a*stride - padding, (b-1)*stride - padding + extent)``."""
        return DimMap(out.factor, self.stride, -self.padding, self.extent - self.padding) if out.factor is not None else WHOLE


def each(value: Any, rank: int) -> list[int]:
    """An int, or a list of one or ``rank`` ints, as ``rank`` ints."""
    items = [value] if isinstance(value, int) else list(value)
    return [int(v) for v in (items * rank if len(items) == 1 else items)]


def pad_windows(local: Local, windows: Sequence[Window], value: float) -> tuple[torch.Tensor, list[int]]:
    """The local input as its windows need it, and the padding that is left to the call itself.

    That is all of it where each dimension lacks as much before as after, as in a tile of samples: nothing is copied then. Else the input is
    padded with ``value`` by what it lacks at the tensor's borders.
    """
    x, rank = local.tensors[0], len(windows)
    lacking: list[tuple[int, int]] = []
    for i, (win, out, inside) in enumerate(zip(windows, local.output_boxes[0][-rank:], local.boxes[0][-rank:], strict=True)):
        first, last = out[0] * win.stride - win.padding, (out[1] - 1) * win.stride - win.padding + win.extent
        low, high = max(first, inside[0]), min(last, inside[1])
        if low >= high:  # nothing but padding is seen
            x = x.narrow(x.dim() - rank + i, 0, 0)
            lacking.append((last - first, 0))
            continue
        if high < inside[1] or low > inside[0]:  # a dimension that was kept whole: cut what no output sees
            x = x.narrow(x.dim() - rank + i, low - inside[0], high - low)
        lacking.append((low - first, last - high))
    if all(before == after <= win.padding for (before, after), win in zip(lacking, windows, strict=True)):
        return x, [before for before, _ in lacking]
    return F.pad(x, [n for pair in reversed(lacking) for n in pair], value=value), [0] * rank


def padded_bytes(view: View, windows: Sequence[Window]) -> int:
    """Upper bound of the copies that padding the input by hand takes, whatever tiles there are; 0 if there is no padding."""
    x, out, rank = view.shapes[0], view.output_shapes[0], len(windows)
    seen = [(n - 1) * win.stride + win.extent for n, win in zip(out[-rank:], windows, strict=True)]
    if all(size <= n for size, n in zip(seen, x[-rank:], strict=True)):
        return 0
    padded = [max(size, n + 2 * win.padding) for size, n, win in zip(seen, x[-rank:], windows, strict=True)]
    return view.itemsize * prod(x[:-rank]) * prod(padded)


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
    return [Window(*w) for w in zip(stride, pads, extents, strict=True)]


def _run_convolution(local: Local) -> torch.Tensor:
    x, weight = local.shapes[0], local.shapes[1]
    windows = _convolution_windows(local.get, x, weight, local.output_shapes[0])
    rank = len(windows)
    groups = local.get("groups", 1)
    if groups > 1:
        groups = groups * (local.boxes[1][0][1] - local.boxes[1][0][0]) // weight[0]
    first = local.boxes[0][1][0] == 0 or local.get("groups", 1) > 1
    bias = local.tensors[2] if len(local.tensors) > 2 and first else None
    stride, dilation = each(local.get("stride", 1), rank), each(local.get("dilation", 1), rank)
    function: Any = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    padded, padding = pad_windows(local, windows, 0.0)
    out: torch.Tensor = function(padded, local.tensors[1], bias, stride, padding, dilation, groups)
    return out


@rule("aten.conv1d", "aten.conv2d", "aten.conv3d")
def convolution(view: View) -> Tiled:
    """b sample, o parameter (output channel), c reduction (input channel), h, w attribute with halo; groups split as g."""
    x, weight, out = view.shapes[0], view.shapes[1], view.output_shapes[0]
    rank, groups = len(weight) - 2, int(view.get("groups", 1))
    if len(x) != rank + 2:
        raise ValueError("unbatched convolution")
    scope = Scope()
    b = scope.factor("b", x[0])
    if groups == 1:
        c = scope.factor("c", x[1])
        o = scope.factor("o", weight[0])
        channels_in, weight_o, weight_c = c, o, c
        summed = () if c.factor is None else (c.factor,)
    else:
        g = scope.factor("g", groups)
        span_in, span_out = x[1] // groups, weight[0] // groups
        channels_in, weight_o, weight_c = DimMap(g.factor, span_in, 0, span_in), DimMap(g.factor, span_out, 0, span_out), WHOLE
        o, summed = weight_o, ()
    names = SPACE[rank]
    space = [scope.factor(name, size) for name, size in zip(names, out[2:], strict=True)]
    windows = _convolution_windows(view.get, x, weight, out)
    inputs = (b, channels_in, *(w.over(s) for s, w in zip(space, windows, strict=True)))
    operands = (inputs, (weight_o, weight_c, *(WHOLE,) * rank), *([(o,)] if view.has("bias") else []))
    flops, saved = 2 * prod(out) * prod(weight[1:]), padded_bytes(view, windows)
    return Tiled(tuple(scope.factors), operands, ((b, o, *space),), summed=summed, run=_run_convolution, flops=flops, saved_bytes=saved)


def _run_transposed(local: Local) -> torch.Tensor:
    # Of the tiles that split c, only the one that begins at 0 adds the bias.
    out: torch.Tensor = local.plain() if local.boxes[0][1][0] == 0 else local.plain(bias=None)
    return out


@rule("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d")
def transposed(view: View) -> Tiled:
    """b sample, o parameter, c reduction; space is needed whole."""
    x, weight = view.shapes[0], view.shapes[1]
    if int(view.get("groups", 1)) != 1 or len(x) != len(weight):
        raise NotImplementedError("grouped or unbatched transposed convolution")
    space = (WHOLE,) * (len(weight) - 2)
    scope = Scope()
    b, c, o = scope.factor("b", x[0]), scope.factor("c", x[1]), scope.factor("o", weight[1])
    operands = ((b, c, *space), (c, o, *space), *([(o,)] if view.has("bias") else []))
    summed = () if c.factor is None else (c.factor,)
    flops = 2 * prod(x) * prod(weight[1:])
    return Tiled(tuple(scope.factors), operands, ((b, o, *space),), summed=summed, run=_run_transposed, flops=flops)


@rule("aten.upsample_nearest1d", "aten.upsample_nearest2d", "aten.upsample_linear1d", "aten.upsample_bilinear2d", "aten.upsample_bicubic2d")
def upsample(view: View) -> Tiled:
    """Samples and channels are free; space is needed whole."""
    x, out = view.shapes[0], view.output_shapes[0]
    scope = Scope()
    maps = (scope.factor("b", x[0]), scope.factor("c", x[1]), *(WHOLE,) * (len(x) - 2))
    return Tiled(tuple(scope.factors), (maps,), (maps,), flops=8 * prod(out))
