"""Convolutions, pools, resampling, patches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.tracing.drawing import Draw, Drawn, call, draws


def _rank(name: str) -> int:
    return int(next(c for c in reversed(name) if c.isdigit()))


@draws("conv1d", "conv2d", "conv3d", "convolution")
def convolution(d: Draw, name: str) -> Drawn:
    rank = d.some(1, 2) if name == "aten.convolution" else _rank(name)
    groups, kernel = d.some(1, 1, 2, 3), d.some(1, 2, 3)
    inside, out = groups * d.some(1, 2), groups * d.some(1, 2)
    stride, padding, dilation = d.some(1, 2, 3), d.some(0, 1, 2), d.some(1, 1, 2)
    space = [d.size(dilation * (kernel - 1) + 1, 8 if rank < 3 else 6) for _ in range(rank)]
    bias = d.floats(out) if d.yes() else None
    x, weight = d.floats(*([] if d.yes(0.1) else [d.size()]), inside, *space), d.floats(out, inside // groups, *[kernel] * rank)
    if name == "aten.convolution":
        x = x if x.dim() > rank + 1 else x.unsqueeze(0)
        if d.yes():
            weight = d.floats(inside, out // groups, *[kernel] * rank)
            return call(name, x, weight, bias, [stride] * rank, [min(padding, dilation * (kernel - 1))] * rank, [dilation] * rank, True,
                        [0] * rank, groups)  # fmt: skip
        return call(name, x, weight, bias, [stride] * rank, [padding] * rank, [dilation] * rank, False, [0] * rank, groups)
    if d.yes(0.2):
        how = d.some("same", "valid") if x.dim() > rank + 1 else "valid"
        stride = 1 if how == "same" else stride
        return call(name, x, weight, bias, [stride], how, [dilation], groups, which="padding")
    return call(name, x, weight, bias, [stride] * rank, [padding] * rank, [dilation] * rank, groups)


@draws("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed(d: Draw, name: str) -> Drawn:
    rank, groups = _rank(name), d.some(1, 1, 2)
    inside, out = groups * d.some(1, 2), groups * d.some(1, 2)
    kernel, stride, dilation = d.some(1, 2, 3, 4), d.some(1, 2, 3), d.some(1, 1, 2)
    extra = d.random.randrange(max(stride, dilation))
    space = [d.size(3, 5 if rank < 3 else 3) for _ in range(rank)]
    padding = d.random.randint(0, min(dilation * (kernel - 1), (2 * stride + dilation * (kernel - 1)) // 2))
    x = d.floats(*([] if d.yes(0.1) else [d.size()]), inside, *space)
    weight, bias = d.floats(inside, out // groups, *[kernel] * rank), d.floats(out) if d.yes() else None
    return call(name, x, weight, bias, [stride] * rank, [padding] * rank, [extra] * rank, groups, [dilation] * rank)


def _pool(d: Draw, rank: int) -> tuple[torch.Tensor, int, int, int]:
    kernel = d.some(2, 3)
    x = d.floats(*d.shape(2 if rank == 1 else 1, 2), *[d.size(5, 9 if rank < 3 else 6) for _ in range(rank)])
    return x, kernel, d.some(1, 2, 3), d.some(0, 1)


@draws(
    "max_pool1d", "max_pool2d", "max_pool3d", "max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices"
)  # fmt: skip
def max_pool(d: Draw, name: str) -> Drawn:
    rank = _rank(name)
    x, kernel, stride, padding = _pool(d, rank)
    return call(name, x, [kernel] * rank, [stride] * rank, [padding] * rank, [d.some(1, 1, 2)] * rank, d.yes())


@draws("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(d: Draw, name: str) -> Drawn:
    rank = _rank(name)
    x, kernel, stride, padding = _pool(d, rank)
    divisor: dict[str, Any] = {"divisor_override": 5} if rank > 1 and d.yes(0.3) else {}
    return call(name, x, [kernel] * rank, [stride] * rank, [padding] * rank, d.yes(), d.yes(), **divisor)


@draws(
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
    "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
)  # fmt: skip
def adaptive(d: Draw, name: str) -> Drawn:
    rank = _rank(name)
    out = [d.some(1, 2, 3) for _ in range(rank)]
    space = [n * d.some(2, 3) if d.yes(0.7) else n * 2 + 1 for n in out]
    return call(name, d.floats(d.size(), d.size(), *space), out)


@draws("max_unpool2d", "max_unpool3d")
def max_unpool(d: Draw, name: str) -> Drawn:
    rank = _rank(name)
    space = [d.size(4, 6) for _ in range(rank)]
    pool: Any = F.max_pool2d if rank == 2 else F.max_pool3d
    values, places = pool(d.floats(*d.shape(2), *space), 2, return_indices=True)
    options = () if rank == 2 else ([2, 2, 2], [0, 0, 0])
    return call(name, values, places, space, *options)


@draws("fractional_max_pool2d", "fractional_max_pool3d")
def fractional(d: Draw, name: str) -> Drawn:
    rank, (b, c) = _rank(name), d.shape(2)
    x = d.floats(b, c, *[d.size(6, 7) for _ in range(rank)])
    places = d.chances(b, c, rank)
    return call(name, x, [2] * rank, [3] * rank, places, fixed=[places])


@draws(
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
def upsample(d: Draw, name: str) -> Drawn:
    rank, nearest = _rank(name), "nearest" in name
    space = [d.size(2, 4) for _ in range(rank)]
    x = d.floats(d.size(), d.size(), *space)
    aligned = () if nearest else (d.yes(),)
    scale = d.some(2.0, 3.0, 5.0, 1.5)
    by_size = [int(n * scale) for n in space] if d.yes() else [d.size(2, 9) for _ in space]
    if d.yes(0.4) or not d.yes(0.9):
        return call(name, x, by_size, *aligned, *([None] * rank if d.yes() else []))
    given = (None, *aligned, [scale] * rank) if d.yes() else (by_size, *aligned, None)
    return call(name, x, *given, which="vec")


@draws("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(d: Draw, name: str) -> Drawn:
    rank = 3 if name.endswith("3d") else 2
    b, space, points = d.size(), [d.size(3, 5) for _ in range(rank)], [d.size(2, 4) for _ in range(rank)]
    x, grid = d.floats(b, d.size(), *space), d.floats(b, *points, rank)
    return call(name, x, grid, d.some(0, 1), d.some(0, 1, 2), d.yes())


@draws("affine_grid_generator")
def affine_grid(d: Draw, name: str) -> Drawn:
    b, rank = d.size(), d.some(2, 3)
    return call(name, d.floats(b, rank, rank + 1), [b, 2, *[d.size(2, 4) for _ in range(rank)]], d.yes())


@draws("im2col")
def im2col(d: Draw, name: str) -> Drawn:
    kernel, dilation, padding, stride = [d.some(2, 3), d.some(1, 2)], [d.some(1, 2), 1], [d.some(0, 1), d.some(0, 2)], [d.some(1, 2), 1]
    return call(name, d.floats(*d.shape(1, 2), d.size(5, 8), d.size(5, 7)), kernel, dilation, padding, stride)


@draws("col2im")
def col2im(d: Draw, name: str) -> Drawn:
    kernel, padding, stride, out = [d.some(2, 3), 2], [d.some(0, 1), 0], [d.some(1, 2), 1], [d.size(5, 7), d.size(4, 6)]
    count = 1
    for size, k, p, s in zip(out, kernel, padding, stride, strict=True):
        count *= (size + 2 * p - k) // s + 1
    lead = d.shape(0, 1)
    return call(name, d.floats(*lead, d.size() * kernel[0] * kernel[1], count), out, kernel, [1, 1], padding, stride)


@draws("pixel_shuffle", "pixel_unshuffle")
def pixels(d: Draw, name: str) -> Drawn:
    block, (c, h, w) = d.some(2, 3), (d.size(), d.size(), d.size())
    lead = d.shape(0, 2)
    shape = (c * block * block, h, w) if name == "aten.pixel_shuffle" else (c, h * block, w * block)
    return call(name, d.floats(*lead, *shape), block)
