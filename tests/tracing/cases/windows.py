"""Convolutions and pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F

from tests.tracing.cases.probe import Shape, case, floats


def _convolutions() -> None:
    conv1: Sequence[tuple[str, dict[str, Any], Shape]] = [
        ("plain", {}, (5, 4, 3)), ("padding", {"padding": 2}, (5, 4, 3)), ("stride", {"stride": 2, "padding": 1}, (5, 4, 3)),
        ("dilation", {"dilation": 2, "padding": 2}, (5, 4, 3)), ("groups", {"groups": 2, "padding": 1}, (6, 2, 3)),
        ("same", {"padding": "same"}, (5, 4, 4)), ("same, dilated", {"padding": "same", "dilation": 3}, (5, 4, 2)),
        ("valid", {"padding": "valid"}, (5, 4, 3)), ("stride beyond kernel", {"stride": 3}, (5, 4, 2)),
        ("kernel 1, stride 2, padding", {"stride": 2, "padding": 1}, (5, 4, 1)),
    ]  # fmt: skip
    for name, options, weight in conv1:
        case(f"conv1d, {name}", lambda x, w, b, o=options: F.conv1d(x, w, b, **o), (3, 4, 11), weights=(weight, weight[:1]))
        square = (*weight, weight[-1])
        case(f"conv2d, {name}", lambda x, w, b, o=options: F.conv2d(x, w, b, **o), (2, 4, 7, 9), weights=(square, weight[:1]))
    case("conv2d, no bias", lambda x, w: F.conv2d(x, w, padding=(0, 2), stride=(2, 1)), (2, 4, 7, 5), weights=((3, 4, 2, 3),))
    case("conv2d, depthwise", lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=4), (2, 4, 5, 5), weights=((8, 1, 3, 3), (8,)))
    case("conv2d, unbatched", lambda x, w: F.conv2d(x, w), (4, 5, 5), weights=((3, 4, 3, 3),))
    case(
        "conv2d, module path",
        lambda x, w, v: F.conv2d(F.relu(F.conv2d(x, w, padding=1)), v, padding=2),
        (2, 3, 5, 7),
        weights=((4, 3, 3, 3), (2, 4, 5, 5)),
    )
    case("conv3d", lambda x, w, b: F.conv3d(x, w, b, padding=1, stride=(1, 2, 1)), (2, 3, 4, 5, 4), weights=((4, 3, 3, 3, 3), (4,)))
    case("conv_transpose1d", lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2), (3, 4, 5), weights=((4, 3, 3), (3,)))
    case("conv_transpose2d", lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1), (2, 4, 5, 3), weights=((4, 3, 3, 3), (3,)))
    case("conv_transpose2d, no bias", lambda x, w: F.conv_transpose2d(x, w), (2, 4, 5, 3), weights=((4, 3, 3, 3),))
    case("conv_transpose3d", lambda x, w, b: F.conv_transpose3d(x, w, b), (2, 3, 3, 2, 3), weights=((3, 2, 2, 2, 2), (2,)))
    grouped = lambda x, w: F.conv_transpose2d(x, w, groups=2, stride=2, output_padding=1)  # noqa: E731
    case("conv_transpose2d, groups", grouped, (2, 4, 3, 5), weights=((4, 3, 3, 3),))
    dilated = lambda x, w, b: F.conv_transpose1d(x, w, b, stride=3, dilation=2, padding=1).relu()  # noqa: E731
    case("conv_transpose1d, dilation", dilated, (3, 4, 5), weights=((4, 3, 3), (3,)))
    two = lambda x, w, v: F.conv_transpose2d(F.conv2d(x, w, stride=2, padding=1), v, stride=2, padding=1)  # noqa: E731
    case("conv_transpose2d, after a convolution", two, (2, 3, 6, 8), weights=((4, 3, 3, 3), (4, 3, 4, 4)))
    case("unfold, fold", lambda x: F.fold(F.unfold(x, 3, padding=1), (5, 6), 3, padding=1), (2, 3, 5, 6))
    case("grid_sample", lambda x, g: F.grid_sample(x, g, align_corners=False), (2, 3, 5, 6), (2, 4, 4, 2))
    case("affine_grid", lambda t: F.affine_grid(t, [2, 3, 4, 5], align_corners=False), (2, 2, 3))
    for shape, size in (((2, 3, 3, 2, 4), (6, 4, 4)), ((2, 3, 5, 6), (7, 3))):
        for mode in ("nearest", "nearest-exact", "area", "trilinear" if len(size) == 3 else "bicubic"):
            case(f"interpolate {list(size)}, {mode}", lambda x, s=size, m=mode: F.interpolate(x, size=s, mode=m), shape)
    case("interpolate, antialias", lambda x: F.interpolate(x, size=(7, 3), mode="bilinear", antialias=True), (2, 3, 5, 6))
    for mode in ("nearest", "bilinear", "bicubic"):
        case(f"interpolate 2d, {mode}", lambda x, m=mode: F.interpolate(x, scale_factor=2, mode=m), (2, 3, 4, 3))
    case("interpolate 1d, nearest", lambda x: F.interpolate(x, size=7), (2, 3, 4))
    case("interpolate 1d, linear", lambda x: F.interpolate(x, size=7, mode="linear"), (2, 3, 4))


def _pools() -> None:
    pools: Sequence[tuple[str, dict[str, Any]]] = [
        ("plain", {"kernel_size": 2}), ("overlap", {"kernel_size": 3, "stride": 2}),
        ("padding", {"kernel_size": 3, "stride": 2, "padding": 1}),
        ("ceil_mode", {"kernel_size": 3, "stride": 2, "ceil_mode": True}),
        ("ceil_mode, padding", {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}),
    ]  # fmt: skip
    for name, options in pools:
        case(f"max_pool1d, {name}", lambda x, o=options: F.max_pool1d(x, **o), (2, 3, 12))
        case(f"max_pool2d, {name}", lambda x, o=options: F.max_pool2d(x, **o), (2, 3, 8, 7))
        case(f"avg_pool1d, {name}", lambda x, o=options: F.avg_pool1d(x, **o), (2, 3, 12))
        case(f"avg_pool2d, {name}", lambda x, o=options: F.avg_pool2d(x, **o), (2, 3, 8, 7))
        without = {**options, "count_include_pad": False}
        case(f"avg_pool1d, {name}, real elements", lambda x, o=without: F.avg_pool1d(x, **o), (2, 3, 12))
        case(f"avg_pool2d, {name}, real elements", lambda x, o=without: F.avg_pool2d(x, **o), (2, 3, 8, 7))
        divisor = {**options, "divisor_override": 5}
        case(f"avg_pool2d, {name}, divisor", lambda x, o=divisor: F.avg_pool2d(x, **o), (2, 3, 8, 7))
    case("max_pool2d, dilation", lambda x: F.max_pool2d(x, 2, stride=1, dilation=2, padding=1), (2, 3, 7, 7))
    case("max_pool2d, unbatched", lambda x: F.max_pool2d(x, 2), (3, 6, 6))
    case("max_pool2d, indices", lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), (2, 3, 6, 7))
    case("max_pool1d, indices", lambda x: F.max_pool1d(x, 2, return_indices=True), (2, 3, 6))
    case("max_unpool2d", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), (2, 3, 6, 6))
    case("avg_pool3d", lambda x: F.avg_pool3d(x, 2, padding=1, ceil_mode=True), (2, 3, 4, 5, 4))
    case("lp_pool2d", lambda x: F.lp_pool2d(x, 2, 2), (2, 3, 6, 6), positive=True)
    case("local_response_norm", lambda x: F.local_response_norm(x, 3), (2, 6, 3, 3))
    places = (floats(2, 3, 2),)
    fractional = lambda x, p: F.fractional_max_pool2d(x, 2, output_size=(3, 3), _random_samples=p)  # noqa: E731
    case("fractional_max_pool2d", fractional, (2, 3, 7, 7), extra=places)
    case("adaptive_max_pool3d", lambda x: F.adaptive_max_pool3d(x, 2), (2, 3, 4, 4, 4))
    case("max_pool3d", lambda x: F.max_pool3d(x, 2, padding=1), (2, 2, 4, 5, 4))
    for size in (1, 2, 3, 4):  # 6 is divisible by some
        case(f"adaptive_avg_pool1d, {size}", lambda x, n=size: F.adaptive_avg_pool1d(x, n), (2, 3, 6))
        case(f"adaptive_avg_pool2d, {size}", lambda x, n=size: F.adaptive_avg_pool2d(x, (n, 2)), (2, 3, 6, 8))
        case(f"adaptive_max_pool1d, {size}", lambda x, n=size: F.adaptive_max_pool1d(x, n), (2, 3, 6))
    case("adaptive_max_pool2d, indices", lambda x: F.adaptive_max_pool2d(x, (3, 2), return_indices=True), (2, 3, 6, 8))
    case("adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x, (2, 1, 2)), (2, 3, 4, 3, 4))


_convolutions()
_pools()
