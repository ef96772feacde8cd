"""Pooling: windows over the attribute dimensions, with halos."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from soap.model.graph import WHOLE
from soap.model.regions import Box
from soap.tracing.rules.notation import Local, Scope, Tiled, View, blocks
from soap.tracing.rules.registry import rule
from soap.tracing.rules.windows import SPACE, Window, each, pad_windows, padded_bytes


def _rank(call: View | Local) -> int:
    return int(call.call.kind.removesuffix("_with_indices")[-2])


def _pool_windows(get: Any, rank: int) -> list[Window]:
    kernel = each(get("kernel_size"), rank)
    stride = each(get("stride") or kernel, rank)
    padding, dilation = each(get("padding", 0), rank), each(get("dilation", 1) or 1, rank)
    return [Window(s, p, d * (k - 1) + 1) for s, p, d, k in zip(stride, padding, dilation, kernel, strict=True)]


def _pooling(view: View, rank: int, run: Any) -> Tiled:
    out = view.output_shapes[0]
    scope = Scope()
    leading = [scope.factor(name, size) for name, size in zip(("b", "c")[-(len(out) - rank) :], out[:-rank], strict=True)]
    space = [scope.factor(name, size) for name, size in zip(SPACE[rank], out[-rank:], strict=True)]
    windows = _pool_windows(view.get, rank)
    inputs = (*leading, *(w.over(s) for s, w in zip(space, windows, strict=True)))
    saved = 8 * prod(out) + padded_bytes(view, windows) + 8 * prod(out[-rank:])  # indices; the divisors of averages
    flops = prod(out) * prod(w.extent for w in windows)
    outputs = ((*leading, *space),) * len(view.output_shapes)
    return Tiled(tuple(scope.factors), (inputs,), outputs, run=run, flops=flops, saved_bytes=saved)


def _run_max_pool(local: Local) -> Any:
    rank = _rank(local)
    windows = _pool_windows(local.get, rank)
    kernel, stride = each(local.get("kernel_size"), rank), [w.stride for w in windows]
    dilation = each(local.get("dilation", 1), rank)
    indexed = local.call.kind.endswith("_with_indices")
    function: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]
    x, padding = pad_windows(local, windows, float("-inf"), by_hand=indexed)
    out = function(x, kernel, stride, padding, dilation, return_indices=indexed)
    if not indexed:
        return out
    first = [start * w.stride - w.padding for (start, _), w in zip(local.output_boxes[0][-rank:], windows, strict=True)]
    seen = tuple((low, low + size) for low, size in zip(first, x.shape[-rank:], strict=True))
    return out[0], _global_indices(out[1], seen, local.shapes[0][-rank:])


@rule(
    "aten.max_pool1d", "aten.max_pool2d", "aten.max_pool3d",
    "aten.max_pool1d_with_indices", "aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices",
)  # fmt: skip
def max_pool(view: View) -> Tiled:
    """Maximum over windows, with its place in the whole if asked for."""
    return _pooling(view, _rank(view), _run_max_pool)


def _window_counts(out: tuple[int, int], size: int, win: Window, include_pad: bool) -> torch.Tensor:
    """Number of elements by which average pooling divides, for each output of one dimension."""
    start = torch.arange(*out) * win.stride - win.padding
    stop = torch.clamp(start + win.extent, max=size + win.padding)
    if not include_pad:
        start, stop = start.clamp(min=0), stop.clamp(max=size)
    return stop - start


def _counts(local: Local, windows: Sequence[Window]) -> torch.Tensor:
    """The divisor of each of the local outputs."""
    include_pad, rank = bool(local.get("count_include_pad", True)), len(windows)
    count = torch.ones((), dtype=torch.int64)
    for span, size, win in zip(local.output_boxes[0][-rank:], local.shapes[0][-rank:], windows, strict=True):
        count = count.unsqueeze(-1) * _window_counts(span, size, win, include_pad)
    return count


def _run_avg_pool(local: Local) -> torch.Tensor:
    rank = _rank(local)
    windows = _pool_windows(local.get, rank)
    kernel, stride = [w.extent for w in windows], [w.stride for w in windows]
    x, padding = pad_windows(local, windows, 0.0)
    total: torch.Tensor
    if rank == 1:
        total = F.avg_pool1d(x, kernel, stride, padding) * kernel[0]
    else:
        function: Any = F.avg_pool2d if rank == 2 else F.avg_pool3d
        total = function(x, kernel, stride, padding, divisor_override=1)
    divisor = local.get("divisor_override") if rank > 1 else None
    count = torch.tensor(divisor) if divisor else _counts(local, windows)
    mean: torch.Tensor = total / count.to(total.device, total.dtype)
    return mean


@rule("aten.avg_pool1d", "aten.avg_pool2d", "aten.avg_pool3d")
def avg_pool(view: View) -> Tiled:
    """Mean over windows. Padding counts as the call says, at the global borders only."""
    return _pooling(view, _rank(view), _run_avg_pool)


def _run_adaptive(local: Local) -> Any:
    rank = _rank(local)
    result = local.plain(output_size=[stop - start for start, stop in local.output_boxes[0][-rank:]])
    if isinstance(result, torch.Tensor):
        return result
    values, indices = result
    return values, _global_indices(indices, local.boxes[0][-rank:], local.shapes[0][-rank:])


def _global_indices(flat: torch.Tensor, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """Flat positions inside a region as flat positions in the whole."""
    result, stride = torch.zeros_like(flat), 1
    for (start, stop), size in zip(reversed(box), reversed(shape), strict=True):
        result += (flat % (stop - start) + start) * stride
        flat, stride = flat // (stop - start), stride * size
    return result


@rule(
    "aten.adaptive_avg_pool1d", "aten.adaptive_avg_pool2d", "aten.adaptive_avg_pool3d", "aten._adaptive_avg_pool2d",
    "aten._adaptive_avg_pool3d", "aten.adaptive_max_pool1d", "aten.adaptive_max_pool2d", "aten.adaptive_max_pool3d",
)  # fmt: skip
def adaptive_pool(view: View) -> Tiled:
    """Windows chosen by the output's size: split if they are equal, whole otherwise."""
    rank = _rank(view)
    x, out = view.shapes[0], view.output_shapes[0]
    scope = Scope()
    leading = [scope.factor(name, size) for name, size in zip(("b", "c")[-(len(out) - rank) :], out[:-rank], strict=True)]
    space, windows = [], []
    for name, size, parts in zip(SPACE[rank], x[-rank:], out[-rank:], strict=True):
        even = size % parts == 0
        dim = scope.factor(name, parts) if even else WHOLE
        space.append(dim)
        windows.append(blocks(dim, size // parts))
    outputs = ((*leading, *space),) * len(view.output_shapes)
    return Tiled(tuple(scope.factors), ((*leading, *windows),), outputs, run=_run_adaptive, flops=prod(x), saved_bytes=8 * prod(out))


@rule("aten.max_unpool2d", "aten.max_unpool3d")
def max_unpool(view: View) -> Tiled:
    """Maxima put back where they were: samples and channels are free."""
    x, rank = view.shapes[0], _rank(view)
    scope = Scope()
    leading = tuple(scope.factor(name, size) for name, size in zip(("b", "c")[-(len(x) - rank) :], x[:-rank], strict=True))
    maps = (*leading, *(WHOLE,) * rank)
    return Tiled(tuple(scope.factors), (maps, maps), (maps,), flops=prod(x))


@rule("aten.fractional_max_pool2d", "aten.fractional_max_pool3d")
def fractional_max_pool(view: View) -> Tiled:
    """Windows at places that are drawn for every sample and channel."""
    scope = Scope()
    b, c = scope.factor("b", view.shapes[0][0]), scope.factor("c", view.shapes[0][1])
    maps = (b, c, *(WHOLE,) * _rank(view))
    saved = 8 * prod(view.output_shapes[0])
    flops = prod(view.shapes[0])
    return Tiled(tuple(scope.factors), (maps, (b, c, WHOLE)), (maps,) * len(view.output_shapes), flops=flops, saved_bytes=saved)
