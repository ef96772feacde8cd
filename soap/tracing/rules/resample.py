"""Other resolutions and other places: interpolation, sampling on a grid, patches of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

from soap.model.graph import WHOLE
from soap.tracing.rules.notation import Local, Scope, Tiled, View, blocks, rule
from soap.tracing.rules.windows import SPACE, Window, each, pad_windows, padded_bytes

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
