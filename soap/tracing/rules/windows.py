"""Windows over the attribute dimensions, with halos: which inputs an output sees, and padding them tile by tile; convolutions, pooling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from soap.model.graph import WHOLE, DimMap
from soap.model.regions import Box
from soap.tracing.rules.notation import Local, Maps, Scope, Tiled, View, blocks, rule
from soap.tracing.torch_parts import is_on_gpu

SPACE = {1: ("l",), 2: ("h", "w"), 3: ("d", "h", "w")}
"""Names of the dimensions of space, by their number."""


@dataclass(frozen=True, slots=True)
class Window:
    """One dimension of a window: step from one output to the next, padding before the first, and how many inputs it spans. ``slack``:
    inputs behind the last window that no output sees. They are read as well, so that a tile of all outputs reads all inputs, as they
    are in memory."""

    stride: int
    padding: int
    extent: int
    slack: int = 0

    def over(self, out: DimMap) -> DimMap:
        """The inputs that outputs ``[a, b)`` see: ``[a*stride - padding, (b-1)*stride - padding + extent)``, and the slack."""
        return DimMap(out.factor, self.stride, -self.padding, self.extent - self.padding + self.slack) if out.factor is not None else WHOLE

    def fitted(self, size: int, outputs: int) -> Window:
        """The same window with its slack for so many inputs."""
        slack = size - ((outputs - 1) * self.stride - self.padding + self.extent)
        return replace(self, slack=slack if 0 < slack < self.stride else 0)


def each(value: Any, rank: int) -> list[int]:
    """An int, or a list of one or ``rank`` ints, as ``rank`` ints."""
    items = [value] if isinstance(value, int) else list(value)
    return [int(v) for v in (items * rank if len(items) == 1 else items)]


def pad_windows(local: Local, windows: Sequence[Window], value: float, *, by_hand: bool = False) -> tuple[torch.Tensor, list[int]]:
    """The local input as its windows need it, and the padding that is left to the call itself.

    The call does all padding in a tile that has all of space, and if each dimension lacks as much before as after: nothing is copied
    then. Otherwise, or if it must be done ``by_hand``, the input is padded with ``value`` by what it lacks at the tensor's borders.
    """
    x, rank = local.tensors[0], len(windows)
    if not by_hand and all(_is_all(local, win, i - rank) for i, win in enumerate(windows)):
        return x, [win.padding for win in windows]
    lacking: list[tuple[int, int]] = []
    for i, (win, out, inside) in enumerate(zip(windows, local.output_boxes[0][-rank:], local.boxes[0][-rank:], strict=True)):
        first, last = out[0] * win.stride - win.padding, (out[1] - 1) * win.stride - win.padding + win.extent
        low, high = max(first, inside[0]), min(last, inside[1])
        if low >= high:  # only padding is seen
            x = x.narrow(x.dim() - rank + i, 0, 0)
            lacking.append((last - first, 0))
            continue
        if inside[1] - high >= win.stride or low > inside[0]:  # a dimension that was kept whole: cut what no output sees
            x = x.narrow(x.dim() - rank + i, low - inside[0], high - low)
        lacking.append((low - first, last - high))
    if not by_hand and all(before == after <= win.padding for (before, after), win in zip(lacking, windows, strict=True)):
        return x, [before for before, _ in lacking]
    return F.pad(x, [n for pair in reversed(lacking) for n in pair], value=value), [0] * rank


def _is_all(local: Local, window: Window, dim: int) -> bool:
    """Whether a tile has all of a dimension, and the call's own padding gives just its outputs."""
    size, outputs = local.shapes[0][dim], local.output_shapes[0][dim]
    given = (size + 2 * window.padding - window.extent) // window.stride + 1
    return local.boxes[0][dim] == (0, size) and local.output_boxes[0][dim] == (0, outputs) and given == outputs


def apart_bytes(view: View) -> int:
    """Upper bound of what torch keeps of a complex convolution, which it computes as three real ones of parts and sums of parts."""
    touched = [view.values[name] for name in (*view.call.operands, *view.call.outputs)]
    return sum(2 * prod(value.shape) * value.dtype.itemsize for value in touched if value.dtype.is_complex)


def padded_bytes(view: View, windows: Sequence[Window]) -> int:
    """Upper bound of the copies for padding the input by hand, whatever tiles there are; 0 if there is no padding."""
    x, out, rank = view.shapes[0], view.output_shapes[0], len(windows)
    seen = [(n - 1) * win.stride + win.extent for n, win in zip(out[-rank:], windows, strict=True)]
    if all(size <= n for size, n in zip(seen, x[-rank:], strict=True)):
        return 0
    padded = [max(size, n + 2 * win.padding) for size, n, win in zip(seen, x[-rank:], windows, strict=True)]
    return view.itemsize * prod(x[:-rank]) * prod(padded)


def convolve(
    local: Local, function: Callable[..., torch.Tensor], x: torch.Tensor, bias: torch.Tensor | None, stride: Sequence[int], *rest: Any
) -> torch.Tensor:
    """The library's convolution of a tile with the tile's weight. ``rest``: the arguments after the stride.

    On CPUs, strided convolutions of shapes that the model itself does not have run in float32 if the type is a narrower one: for some,
    such as all with one column of outputs, oneDNN for bfloat16 leaves outputs and gradients of weights unwritten (torch 2.13, AMX).
    """
    weight = local.tensors[1]
    rank = weight.dim() - 2
    own = local.tensors[0].shape[-rank - 1 :] == torch.Size(local.shapes[0][-rank - 1 :]) and weight.shape == torch.Size(local.shapes[1])
    if own or max(stride) == 1 or x.dtype.itemsize >= 4 or is_on_gpu(x):
        return function(x, weight, bias, stride, *rest)
    return function(x.float(), weight.float(), None if bias is None else bias.float(), stride, *rest).to(x.dtype)


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


_MOST = 8
"""With at most so many copies of each element torch's floating-point positions are certainly the exact ones."""


def _scaled(view: View) -> list[int]:
    """How many times larger the result is in each dimension of space; 0 if that is no small whole number."""
    rank = len(view.shapes[0]) - 2
    pairs = zip(view.shapes[0][2:], view.output_shapes[0][2:], strict=True)
    times = [out // size if out % size == 0 and out // size <= _MOST else 0 for size, out in pairs]
    given = view.get("scale_factors") or [view.get(f"scales_{name}") or view.get("scales") for name in ("d", "h", "w")[3 - rank :]]
    return [n if scale is None or scale == n else 0 for n, scale in zip(times, given, strict=True)]


def _run_nearest(local: Local) -> torch.Tensor:
    x = local.tensors[0]
    if all(box == (0, size) for box, size in zip(local.output_boxes[0][2:], local.output_shapes[0][2:], strict=True)):
        out: torch.Tensor = local.plain()
        return out
    for dim, (now, wanted) in enumerate(zip(local.boxes[0], local.output_boxes[0], strict=True)):
        times = (wanted[1] - wanted[0]) // (now[1] - now[0])
        if times > 1:
            x = x.repeat_interleave(times, dim)
    return x


@rule(
    "aten.upsample_nearest1d", "aten.upsample_nearest2d", "aten.upsample_nearest3d",
    "aten._upsample_nearest_exact1d", "aten._upsample_nearest_exact2d", "aten._upsample_nearest_exact3d",
)  # fmt: skip
def nearest(view: View) -> Tiled:
    """Samples and channels are free, and so is space if every element becomes so many copies."""
    times = _scaled(view)
    if 0 in times:
        return upsample(view)
    x = view.shapes[0]
    scope = Scope()
    lead = (scope.factor("b", x[0]), scope.factor("c", x[1]))
    space = [scope.factor(name, size) for name, size in zip(SPACE[len(times)], x[2:], strict=True)]
    grown = tuple(blocks(s, n) for s, n in zip(space, times, strict=True))
    saved = 2 * view.itemsize * prod(view.output_shapes[0])
    outputs = ((*lead, *grown),)
    return Tiled(tuple(scope.factors), ((*lead, *space),), outputs, run=_run_nearest, flops=prod(view.output_shapes[0]), saved_bytes=saved)


@rule(
    "aten.upsample_linear1d", "aten.upsample_bilinear2d", "aten.upsample_trilinear3d", "aten.upsample_bicubic2d",
    "aten._upsample_bilinear2d_aa", "aten._upsample_bicubic2d_aa",
)  # fmt: skip
def upsample(view: View) -> Tiled:
    """Samples and channels are free; space is needed whole."""
    x, out = view.shapes[0], view.output_shapes[0]
    scope = Scope()
    maps = (scope.factor("b", x[0]), scope.factor("c", x[1]), *(WHOLE,) * (len(x) - 2))
    return Tiled(tuple(scope.factors), (maps,), (maps,), flops=8 * prod(out))


@rule("aten.grid_sampler", "aten.grid_sampler_2d", "aten.grid_sampler_3d")
def grid_sampler(view: View) -> Tiled:
    """Samples, channels and the points of the grid are free; the space that is sampled from is needed whole."""
    x, out = view.shapes[0], view.output_shapes[0]
    scope = Scope()
    b, c = scope.factor("b", x[0]), scope.factor("c", x[1])
    points = [scope.factor(name, size) for name, size in zip(SPACE[len(x) - 2], out[2:], strict=True)]
    operands = ((b, c, *(WHOLE,) * len(points)), (b, *points, WHOLE))
    return Tiled(tuple(scope.factors), operands, ((b, c, *points),), flops=16 * prod(out))


def _run_affine_grid(local: Local) -> torch.Tensor:
    out: torch.Tensor = local.plain(size=[local.output_lengths[0], *local.get("size")[1:]])
    return out


@rule("aten.affine_grid_generator")
def affine_grid(view: View) -> Tiled:
    """One grid for every sample."""
    scope = Scope()
    b = scope.factor("b", view.shapes[0][0])
    out = view.output_shapes[0]
    saved = view.itemsize * prod(out[1:]) * 2
    maps = (b, *(WHOLE,) * (len(out) - 1))
    return Tiled(tuple(scope.factors), ((b, WHOLE, WHOLE),), (maps,), run=_run_affine_grid, flops=6 * prod(out), saved_bytes=saved)


def _patch_windows(kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]) -> list[Window]:
    return [Window(s, p, d * (k - 1) + 1) for k, d, p, s in zip(kernel, dilation, padding, stride, strict=True)]


def _run_im2col(local: Local) -> torch.Tensor:
    windows = _patch_windows(*(each(local.get(name), 2) for name in ("kernel_size", "dilation", "padding", "stride")))
    columns = (local.shapes[0][-1] + 2 * windows[1].padding - windows[1].extent) // windows[1].stride + 1
    start, stop = local.output_boxes[0][-1]
    box = (*local.output_boxes[0][:-2], (0, 1), (start // columns, stop // columns), (0, columns))
    x, padding = pad_windows(replace(local, output_boxes=[box]), windows, 0.0)
    out: torch.Tensor = local.plain([x], padding=padding)
    return out


@rule("aten.im2col")
def im2col(view: View) -> Tiled:
    """Patches as columns: samples, channels, and rows of patches (with halo) are free."""
    kernel, *rest = (each(view.get(name), 2) for name in ("kernel_size", "dilation", "padding", "stride"))
    windows = _patch_windows(kernel, *rest)
    x, out = view.shapes[0], view.output_shapes[0]
    columns = (x[-1] + 2 * windows[1].padding - windows[1].extent) // windows[1].stride + 1
    span = prod(kernel)
    scope = Scope()
    lead = tuple(scope.factor("b", size) for size in x[:-3])
    c, h = scope.factor("c", x[-3]), scope.factor("h", out[-1] // columns)
    patches = blocks(c, span)
    rows = blocks(h, columns)
    operand = (*lead, c, windows[0].over(h), WHOLE)
    saved = padded_bytes(replace_output(view, (*x[:-2], out[-1] // columns, columns)), windows)
    return Tiled(tuple(scope.factors), (operand,), ((*lead, patches, rows),), run=_run_im2col, flops=prod(out), saved_bytes=saved)


def replace_output(view: View, shape: tuple[int, ...]) -> View:
    """Columns of patches as a view with another shape: the patches stay where they are."""
    name = view.call.outputs[0]
    return View(view.call, {**view.values, name: replace(view.values[name], shape=shape)})


@rule("aten.col2im")
def col2im(view: View) -> Tiled:
    """Patches added up to images: samples and channels are free."""
    x, out, span = view.shapes[0], view.output_shapes[0], prod(each(view.get("kernel_size"), 2))
    scope = Scope()
    lead = tuple(scope.factor("b", size) for size in x[:-2])
    c = scope.factor("c", out[-3])
    patches = blocks(c, span)
    return Tiled(tuple(scope.factors), ((*lead, patches, WHOLE),), ((*lead, c, WHOLE, WHOLE),), flops=prod(x))
