"""Convolutions and pooling: windows over the attribute dimensions, with halos."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from soap.graph import WHOLE, DimMap
from soap.tracing.rules.notation import Local, Scope, Tiled, View, clipped_padding
from soap.tracing.rules.registry import rule


def _each(value: Any, rank: int) -> list[int]:
    """An int, or a list of one or ``rank`` ints, as ``rank`` ints."""
    items = [value] if isinstance(value, int) else list(value)
    return [int(v) for v in (items * rank if len(items) == 1 else items)]


def _window(factor: int | None, stride: int, padding: int, extent: int) -> DimMap:
    """The inputs that outputs ``[a, b)`` see: ``[a*stride - padding, (b-1)*stride - padding + extent)``."""
    return DimMap(factor, stride, -padding, extent - padding) if factor is not None else WHOLE


def _pad(local: Local, windows: Sequence[tuple[int, int, int]], value: float) -> torch.Tensor:
    """The local input, padded by what its windows (stride, padding, extent) lack at the tensor's borders."""
    rank = len(windows)
    amounts: list[int] = []
    for (stride, padding, extent), out, inside in zip(
        reversed(windows), reversed(local.output_boxes[0][-rank:]), reversed(local.boxes[0][-rank:]), strict=True
    ):
        amounts += clipped_padding(out, DimMap(0, stride, -padding, extent - padding), inside)
    x = local.tensors[0]
    # A window beyond the last output's may have been given (dimension kept whole): cut what no output sees.
    for i, ((stride, padding, extent), out, inside) in enumerate(zip(windows, local.output_boxes[0][-rank:], local.boxes[0][-rank:], strict=True)):
        first, last = out[0] * stride - padding, (out[1] - 1) * stride - padding + extent
        low, high = max(first, inside[0]), min(last, inside[1])
        if (low, high) != inside and low < high:
            x = x.narrow(x.dim() - rank + i, low - inside[0], high - low)
            amounts[2 * (rank - 1 - i)] = max(0, low - first)
            amounts[2 * (rank - 1 - i) + 1] = max(0, last - high)
    return F.pad(x, amounts, value=value) if any(amounts) else x


def _same_padding(size: int, out: int, stride: int, extent: int) -> int:
    return max(0, (out - 1) * stride + extent - size) // 2


def _convolution_windows(get: Any, x: Sequence[int], weight: Sequence[int], out: Sequence[int]) -> list[tuple[int, int, int]]:
    rank = len(weight) - 2
    stride, dilation = _each(get("stride", 1), rank), _each(get("dilation", 1), rank)
    extents = [d * (k - 1) + 1 for d, k in zip(dilation, weight[2:], strict=True)]
    padding = get("padding", 0)
    if isinstance(padding, str):
        pads = [0] * rank if padding == "valid" else [_same_padding(n, o, 1, e) for n, o, e in zip(x[-rank:], out[-rank:], extents, strict=True)]
    else:
        pads = _each(padding, rank)
    return list(zip(stride, pads, extents, strict=True))


def _run_convolution(local: Local) -> torch.Tensor:
    x, weight = local.shapes[0], local.shapes[1]
    windows = _convolution_windows(local.get, x, weight, local.output_shapes[0])
    rank = len(windows)
    groups = local.get("groups", 1)
    if groups > 1:
        groups = groups * (local.boxes[1][0][1] - local.boxes[1][0][0]) // weight[0]
    first = local.boxes[0][1][0] == 0 or local.get("groups", 1) > 1
    bias = local.tensors[2] if len(local.tensors) > 2 and first else None
    stride, dilation = _each(local.get("stride", 1), rank), _each(local.get("dilation", 1), rank)
    function: Any = F.conv1d if rank == 1 else F.conv2d
    out: torch.Tensor = function(_pad(local, windows, 0.0), local.tensors[1], bias, stride, 0, dilation, groups)
    return out


@rule("aten.conv1d", "aten.conv2d")
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
    names = ("l",) if rank == 1 else ("h", "w")
    space = [scope.factor(name, size) for name, size in zip(names, out[2:], strict=True)]
    windows = _convolution_windows(view.get, x, weight, out)
    inputs = (b, channels_in, *(_window(s.factor, *w) for s, w in zip(space, windows, strict=True)))
    operands = (inputs, (weight_o, weight_c, *(WHOLE,) * rank), *([(o,)] if view.has("bias") else []))
    flops = 2 * prod(out) * prod(weight[1:])
    return Tiled(tuple(scope.factors), operands, ((b, o, *space),), summed=summed, run=_run_convolution, flops=flops)


def _pool_windows(get: Any, rank: int) -> list[tuple[int, int, int]]:
    kernel = _each(get("kernel_size"), rank)
    stride = _each(get("stride") or kernel, rank)
    padding, dilation = _each(get("padding", 0), rank), _each(get("dilation", 1) or 1, rank)
    return [(s, p, d * (k - 1) + 1) for s, p, d, k in zip(stride, padding, dilation, kernel, strict=True)]


def _pooling(view: View, rank: int, run: Any) -> Tiled:
    out = view.output_shapes[0]
    scope = Scope()
    leading = [scope.factor(name, size) for name, size in zip(("b", "c")[-(len(out) - rank) :], out[:-rank], strict=True)]
    space = [scope.factor(name, size) for name, size in zip(("h", "w")[-rank:] if rank == 2 else ("l",), out[-rank:], strict=True)]
    windows = _pool_windows(view.get, rank)
    inputs = (*leading, *(_window(s.factor, *w) for s, w in zip(space, windows, strict=True)))
    flops = prod(out) * prod(w[2] for w in windows)
    return Tiled(tuple(scope.factors), (inputs,), ((*leading, *space),), run=run, flops=flops, saved_bytes=8 * prod(out))


def _run_max_pool(local: Local) -> torch.Tensor:
    rank = 1 if "1d" in local.call.kind else 2
    windows = _pool_windows(local.get, rank)
    kernel, stride = _each(local.get("kernel_size"), rank), [w[0] for w in windows]
    dilation = _each(local.get("dilation", 1), rank)
    function: Any = F.max_pool1d if rank == 1 else F.max_pool2d
    out: torch.Tensor = function(_pad(local, windows, float("-inf")), kernel, stride, 0, dilation)
    return out


@rule("aten.max_pool1d", "aten.max_pool2d")
def max_pool(view: View) -> Tiled:
    """Maximum over windows."""
    return _pooling(view, 1 if "1d" in view.call.kind else 2, _run_max_pool)


def _window_counts(out: tuple[int, int], size: int, window: tuple[int, int, int], include_pad: bool) -> torch.Tensor:
    """Elements that average pooling divides by, for each output of one dimension."""
    stride, padding, kernel = window
    start = torch.arange(*out) * stride - padding
    stop = torch.clamp(start + kernel, max=size + padding)
    if not include_pad:
        start, stop = start.clamp(min=0), stop.clamp(max=size)
    return stop - start


def _run_avg_pool(local: Local) -> torch.Tensor:
    rank = 1 if "1d" in local.call.kind else 2
    windows = _pool_windows(local.get, rank)
    kernel, stride = [w[2] for w in windows], [w[0] for w in windows]
    x = _pad(local, windows, 0.0)
    if rank == 1:
        total = F.avg_pool1d(x, kernel, stride) * kernel[0]
    else:
        total = F.avg_pool2d(x, kernel, stride, divisor_override=1)
    if rank == 2 and (divisor := local.get("divisor_override")):
        return total / divisor
    count = torch.ones((), dtype=torch.int64)
    for i, window in enumerate(windows):
        span = local.output_boxes[0][-rank + i]
        count = count.unsqueeze(-1) * _window_counts(span, local.shapes[0][-rank + i], window, bool(local.get("count_include_pad", True)))
    return total / count.to(total.device, total.dtype)


@rule("aten.avg_pool1d", "aten.avg_pool2d")
def avg_pool(view: View) -> Tiled:
    """Mean over windows; padding counts as the call says, at the global borders only."""
    return _pooling(view, 1 if "1d" in view.call.kind else 2, _run_avg_pool)


def _run_adaptive(local: Local) -> torch.Tensor:
    rank = 1 if "1d" in local.call.kind else 2
    out: torch.Tensor = local.plain(output_size=[stop - start for start, stop in local.output_boxes[0][-rank:]])
    return out


@rule("aten.adaptive_avg_pool1d", "aten.adaptive_avg_pool2d", "aten.adaptive_max_pool1d", "aten.adaptive_max_pool2d")
def adaptive_pool(view: View) -> Tiled:
    """Windows chosen by the output's size: split where they are equal, whole otherwise."""
    rank = 1 if "1d" in view.call.kind else 2
    x, out = view.shapes[0], view.output_shapes[0]
    scope = Scope()
    leading = [scope.factor(name, size) for name, size in zip(("b", "c")[-(len(out) - rank) :], out[:-rank], strict=True)]
    space, windows = [], []
    for name, size, parts in zip(("h", "w")[-rank:], x[-rank:], out[-rank:], strict=True):
        even = size % parts == 0
        dim = scope.factor(name, parts) if even else WHOLE
        space.append(dim)
        windows.append(DimMap(dim.factor, size // parts, 0, size // parts) if dim.factor is not None else WHOLE)
    outputs = ((*leading, *space),) * len(view.output_shapes)
    return Tiled(tuple(scope.factors), ((*leading, *windows),), outputs, run=_run_adaptive, flops=prod(x))
