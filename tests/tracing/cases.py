"""Small programs for every operator rule. Each is a function of float64 tensors that some anchor has made, so that it is neither folded nor
computed from inputs alone; whole numbers, masks and weights come in as inputs and parameters of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

aten = torch.ops.aten
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Case:
    """``function(*activations, *extra)``. ``shapes``: of the activations, each made by an anchor of its own. ``extra``: inputs.

    ``positive``: activations are made positive. ``weights``: shapes of parameters that follow the activations. ``whole``: no rule is
    expected to split it.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[Shape, ...]
    extra: tuple[Tensor, ...] = ()
    weights: tuple[Shape, ...] = ()
    positive: bool = False
    whole: bool = False
    random: bool = False


class Probe(nn.Module):
    """A training model around a case: its loss weighs every element of every result differently."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.case = case
        draw = lambda shape: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))  # noqa: E731
        self.x = nn.ParameterList([draw(shape) for shape in case.shapes])
        self.w = nn.ParameterList([draw(shape) for shape in case.weights])

    def forward(self, *extra: Tensor) -> Tensor:
        values = [made(x) for x in self.x]
        if self.case.positive:
            values = [value.abs() + 0.5 for value in values]
        result = self.case.function(*values, *self.w, *extra)
        results = result if isinstance(result, (list, tuple)) else [result]
        return torch.stack([weighed(r) for r in results if isinstance(r, Tensor)]).sum()


def made(x: Tensor) -> Tensor:
    """The tensor out of an anchor: its cumulative sum along its last dimension, scaled."""
    return x.reshape(1).cumsum(0).reshape(()) if x.dim() == 0 else x.cumsum(-1) * 0.5


def weighed(value: Tensor) -> Tensor:
    """A sum in which every element counts differently."""
    value = value.to(torch.float64)
    weights = torch.arange(1, value.numel() + 1, dtype=torch.float64).reshape(value.shape).sin()
    return (value * weights).sum()


CASES: list[Case] = []


def case(name: str, function: Callable[..., Any], *shapes: Shape, **options: Any) -> None:
    """Add a case."""
    assert all(name != other.name for other in CASES), name
    CASES.append(Case(name, function, shapes, **options))


def _ids(most: int, *shape: int, seed: int = 3) -> Tensor:
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(seed))


def _floats(*shape: int, seed: int = 5) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _products() -> None:
    case("linear", F.linear, (5, 3, 4), weights=((6, 4), (6,)))
    case("linear, no bias", F.linear, (5, 4), weights=((3, 4),))
    case("linear, vector", F.linear, (4,), weights=((3, 4), (3,)))
    case("addmm", lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=2.0), (5, 4), weights=((4, 3), (3,)))
    case("addmm, full bias", lambda x, w, b: torch.addmm(b, x, w), (5, 4), weights=((4, 3), (5, 3)))
    case("baddbmm", lambda a, b, c: torch.baddbmm(c, a, b, beta=2.0, alpha=0.5), (3, 5, 4), (3, 4, 2), (3, 5, 2))
    shapes: Sequence[tuple[Shape, Shape]] = [
        ((4,), (4,)), ((4,), (4, 3)), ((5, 4), (4,)), ((5, 4), (4, 3)), ((4,), (3, 4, 2)), ((3, 5, 4), (4,)), ((3, 5, 4), (4, 2)),
        ((5, 4), (3, 4, 2)), ((3, 5, 4), (3, 4, 2)), ((3, 1, 5, 4), (2, 4, 3)), ((1, 5, 4), (3, 4, 2)), ((2, 3, 5, 4), (2, 3, 4, 5)),
    ]  # fmt: skip
    for a, b in shapes:
        case(f"matmul {list(a)} {list(b)}", torch.matmul, a, b)
    case("bmm", torch.bmm, (3, 5, 4), (3, 4, 2))
    case("mm", torch.mm, (5, 4), (4, 3))
    case("mv", torch.mv, (5, 4), (4,))
    case("dot", torch.dot, (5,), (5,))
    case("outer", torch.outer, (5,), (4,))
    case("einsum", lambda a, b: torch.einsum("bij,kj->bki", a, b), (3, 5, 4), (2, 4))
    case("einsum, implicit", lambda a, b: torch.einsum("ij,jk", a, b), (5, 4), (4, 3))
    case("einsum, three", lambda a, b, c: torch.einsum("ij,jk,k->i", a, b, c), (5, 4), (4, 3), (3,))
    case("einsum, trace", lambda a: torch.einsum("bii->b", a), (3, 4, 4))
    case("embedding", lambda x, t, i: F.embedding(i, t) * x, (5, 4, 3), weights=((7, 3),), extra=(_ids(7, 5, 4),))
    case(
        "embedding, padding_idx", lambda x, t, i: F.embedding(i, t, padding_idx=2) * x, (5, 4, 3), weights=((7, 3),), extra=(_ids(4, 5, 4),)
    )
    case("embedding, negative padding_idx", lambda t, i: F.embedding(i, t, padding_idx=-5), (7, 3), extra=(_ids(7, 6),))
    case("embedding, frequency", lambda t, i: F.embedding(i, t, scale_grad_by_freq=True), (7, 3), extra=(_ids(3, 6),), whole=True)


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
    case("conv2d, unbatched", lambda x, w: F.conv2d(x, w), (4, 5, 5), weights=((3, 4, 3, 3),), whole=True)
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
    case("max_pool3d", lambda x: F.max_pool3d(x, 2, padding=1), (2, 2, 4, 5, 4))
    for size in (1, 2, 3, 4):  # 6 is divisible by some
        case(f"adaptive_avg_pool1d, {size}", lambda x, n=size: F.adaptive_avg_pool1d(x, n), (2, 3, 6))
        case(f"adaptive_avg_pool2d, {size}", lambda x, n=size: F.adaptive_avg_pool2d(x, (n, 2)), (2, 3, 6, 8))
        case(f"adaptive_max_pool1d, {size}", lambda x, n=size: F.adaptive_max_pool1d(x, n), (2, 3, 6))
    case("adaptive_max_pool2d, indices", lambda x: F.adaptive_max_pool2d(x, (3, 2), return_indices=True), (2, 3, 6, 8))
    case("adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x, (2, 1, 2)), (2, 3, 4, 3, 4))


def _attention() -> None:
    q, sdpa = (2, 4, 5, 3), F.scaled_dot_product_attention
    case("attention", sdpa, q, (2, 4, 6, 3), (2, 4, 6, 2))
    case("attention, 3-d", sdpa, (4, 5, 3), (4, 6, 3), (4, 6, 3))
    case("attention, 2-d", sdpa, (5, 3), (6, 3), (6, 3), whole=True)
    case("attention, causal", lambda q, k, v: sdpa(q, k, v, is_causal=True), q, q, q)
    case("attention, causal, 3-d", lambda q, k, v: sdpa(q, k, v, is_causal=True, scale=0.3), (4, 5, 3), (4, 5, 3), (4, 5, 3))
    case("attention, causal, more keys", lambda q, k, v: sdpa(q, k, v, is_causal=True), q, (2, 4, 7, 3), (2, 4, 7, 3))
    for shape in ((5, 6), (2, 1, 5, 6), (2, 4, 5, 6), (1, 4, 1, 6), (2, 1, 1, 6)):
        mask = _floats(*shape) > 0.3
        mask[..., 0] = True
        case(f"attention, mask {list(shape)}", lambda q, k, v, m: sdpa(q, k, v, m), q, (2, 4, 6, 3), (2, 4, 6, 3), extra=(mask,))
    case("attention, added mask", lambda q, k, v, m: sdpa(q, k, v, m), q, (2, 4, 6, 3), (2, 4, 6, 3), (2, 4, 5, 6))
    case("attention, grouped", lambda q, k, v: sdpa(q, k, v, enable_gqa=True), q, (2, 2, 6, 3), (2, 2, 6, 3))
    case(
        "attention, grouped, causal",
        lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True),
        (2, 6, 5, 3),
        (2, 3, 5, 3),
        (2, 3, 5, 3),
    )
    case("attention, dropout", lambda q, k, v: sdpa(q, k, v, dropout_p=0.4), q, (2, 4, 6, 3), (2, 4, 6, 3), random=True)
    case("attention, dropout, causal", lambda q, k, v: sdpa(q, k, v, dropout_p=0.4, is_causal=True), q, q, q, random=True)
    dropped = lambda q, k, v, m: sdpa(q, k, v, m, dropout_p=0.4, enable_gqa=True)  # noqa: E731
    case("attention, dropout, mask, grouped", dropped, q, (2, 2, 6, 3), (2, 2, 6, 3), extra=(_floats(5, 6) > 0.5,), random=True)


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = kind(3, 4, **options).double()

    def forward(self, x: Tensor) -> Any:
        out, state = self.inner(x.cumsum(-1) * 0.5)
        return [out, *(state if isinstance(state, tuple) else (state,))]


def _norms() -> None:
    case("layer_norm", lambda x, w, b: F.layer_norm(x, (6,), w, b), (3, 4, 6), weights=((6,), (6,)))
    case("layer_norm, two dimensions", lambda x, w: F.layer_norm(x, (4, 6), w), (3, 4, 6), weights=((4, 6),))
    case("layer_norm, plain", lambda x: F.layer_norm(x, (6,)), (3, 4, 6))
    case("rms_norm", lambda x, w: F.rms_norm(x, (6,), w), (3, 4, 6), weights=((6,),))
    case("rms_norm, in pieces", lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w, (3, 4, 6), weights=((6,),))
    case("group_norm", lambda x, w, b: F.group_norm(x, 3, w, b), (3, 6, 5), weights=((6,), (6,)))
    case("group_norm, 2-d", lambda x: F.group_norm(x, 2), (3, 6, 2, 2))
    case("instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), (3, 4, 5, 2), weights=((4,), (4,)))
    running = (_floats(4), _floats(4, seed=9) + 0.5)
    case("batch_norm, inference", lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b), (3, 4, 5), weights=((4,), (4,)), extra=running)
    case("batch_norm, inference, vectors", lambda x, m, v: F.batch_norm(x, m, v), (3, 4), extra=running)
    train = lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True)  # noqa: E731
    for shape in ((5, 4), (3, 4, 5), (3, 4, 5, 2), (2, 3, 4, 2, 3)):
        case(f"batch_norm, training {list(shape)}", train, shape, weights=((shape[1],), (shape[1],)))
    case("batch_norm, training, plain", lambda x: F.batch_norm(x, None, None, training=True), (3, 4, 5))
    for dim in (0, 1, -1):
        case(f"softmax {dim}", lambda x, d=dim: F.softmax(x, d), (3, 4, 5))
        case(f"log_softmax {dim}", lambda x, d=dim: F.log_softmax(x, d), (3, 4, 5))
        case(f"cumsum {dim}", lambda x, d=dim: x.cumsum(d), (3, 4, 5))
    case("softmax, cast", lambda x: F.softmax(x, -1, dtype=torch.float64), (3, 4))
    case("_softmax", lambda x: aten._softmax.default(x, 1, False), (3, 4))
    case("_log_softmax", lambda x: aten._log_softmax.default(x, 1, False), (3, 4))
    case("cumprod", lambda x: x.cumprod(1), (3, 4))
    case("logcumsumexp", lambda x: x.logcumsumexp(0), (3, 4))
    case("sort", lambda x: x.sort(1), (3, 4))
    case("argsort", lambda x: [x, x.argsort(0)], (3, 4))
    case("topk", lambda x: x.topk(2), (3, 4))
    case("topk, first dimension", lambda x: x.topk(2, 0)[0], (5, 4))
    case("glu", F.glu, (3, 6))
    case("glu, dimension", lambda x: F.glu(x, 1), (3, 4, 5))
    case("flip", lambda x: x.flip(1), (3, 4, 5))
    case("roll", lambda x: x.roll(2, 1), (3, 4, 5))
    case("roll, all", lambda x: x.roll(2), (3, 4), whole=True)


def _shapes() -> None:
    views: Sequence[tuple[Shape, Shape]] = [
        ((4, 6), (24,)), ((24,), (4, 6)), ((4, 6), (6, 4)), ((4, 6), (8, 3)), ((3, 4, 5), (12, 5)), ((3, 4, 5), (3, 20)),
        ((12, 5), (3, 4, 5)),
        ((1, 4, 1, 6), (4, 6)), ((4, 6), (1, 4, 6, 1)), ((4, 1, 6), (4, 6, 1)), ((2, 3, 4), (4, 6)), ((6, 4), (2, 3, 2, 2)),
        ((5, 6), (5, 2, 3)),
        ((7, 3), (21,)), ((4, 1), (2, 2, 1)),
    ]  # fmt: skip
    for a, b in views:
        case(f"view {list(a)} {list(b)}", lambda x, s=b: x.view(s), a)
        case(f"reshape {list(a)} {list(b)}", lambda x, s=b: x.transpose(0, -1).reshape(s), a)
    case("view, -1", lambda x: x.view(-1, 2), (3, 4))
    case("flatten", lambda x: x.flatten(1), (3, 4, 5))
    case("flatten, all", lambda x: x.flatten(), (3, 4))
    case("unflatten", lambda x: x.unflatten(1, (2, -1)), (3, 6))
    case("ravel", lambda x: x.ravel(), (3, 4))
    case("_unsafe_view", lambda x: aten._unsafe_view.default(x, [3, 2, 2]), (3, 4))
    case("view_as", lambda x, y: x.view_as(y) * y, (3, 4), (2, 6))
    case("squeeze", lambda x: x.squeeze(), (1, 4, 1, 3))
    case("squeeze, one", lambda x: x.squeeze(1), (4, 1, 3))
    case("squeeze, several", lambda x: x.squeeze((0, 2)), (1, 4, 1, 3))
    case("unsqueeze", lambda x: x.unsqueeze(1), (4, 3))
    case("unsqueeze, last", lambda x: x.unsqueeze(-1), (4, 3))
    case("transpose", lambda x: x.transpose(0, -1), (3, 4, 5))
    case("t", lambda x: x.t(), (3, 4))
    case("t, vector", lambda x: x.t(), (4,))
    case("permute", lambda x: x.permute(2, 0, -2), (3, 4, 5))
    case("movedim", lambda x: x.movedim(0, 2), (3, 4, 5))
    case("swapaxes, mT, T", lambda x: [x.swapaxes(0, 1), x.mT, x.T], (3, 4))
    case("expand", lambda x: x.expand(2, 4, -1, 3), (4, 1, 3))
    case("expand_as", lambda x, y: x.expand_as(y) * y, (4, 1), (4, 5))
    case("broadcast_to", lambda x: x.broadcast_to(2, 4, 3), (1, 3))
    case("broadcast_tensors", lambda x, y: torch.broadcast_tensors(x, y), (4, 1), (3,))
    case("slice", lambda x: x[1:4, :, 2:], (5, 3, 4))
    case("slice, step", lambda x: x[1::2, ::3], (7, 8))
    case("slice, negative start", lambda x: x[-3:, :-1], (7, 4))
    case("slice, to one", lambda x: x[2:3], (5, 4))
    case("slice, beyond", lambda x: x[1:100], (5, 4))
    case("slice, of a sum", lambda x, w: F.linear(x, w)[:, 1:3], (5, 4), weights=((6, 4),))
    case("narrow", lambda x: x.narrow(1, 1, 3), (4, 6))
    case("select", lambda x: x[:, 2], (4, 5, 3))
    case("select, negative", lambda x: x.select(-1, -2), (4, 5))
    case("split", lambda x: x.split(2, 1), (4, 5))
    case("split, sizes", lambda x: x.split([1, 3, 2], 0), (6, 3))
    case("chunk", lambda x: x.chunk(3, -1), (4, 8))
    case("tensor_split", lambda x: x.tensor_split(3, 1), (2, 7))
    case("unbind", lambda x: x.unbind(1), (4, 3, 2))
    for dim in (0, 1, 2, -1):
        case(f"stack {dim}", lambda x, y, d=dim: torch.stack([x, y, x], d), (3, 4), (3, 4))
    for dim in (0, 1, -1):
        case(f"cat {dim}", lambda x, y, d=dim: torch.cat([x, y, x], d), (3, 4, 2), (3, 4, 2))
    case("cat, uneven", lambda x, y: torch.cat([x, y, x[:, :1]], 1), (3, 4), (3, 2))
    case("cat, of products", lambda x, v, w: torch.cat([F.linear(x, v), F.linear(x, w)], -1).relu(), (3, 4), weights=((5, 4), (2, 4)))
    case("hstack", lambda x, y: torch.hstack([x, y]), (3, 4), (3, 2))
    case("hstack, vectors", lambda x, y: torch.hstack([x, y]), (3,), (4,))
    case("vstack", lambda x, y: torch.vstack([x, y]), (4,), (3, 4))
    for amounts in ((1, 2), (1, 0, 0, 3), (0, 0, 2, 2), (3, 4)):
        case(f"pad {list(amounts)}", lambda x, a=amounts: F.pad(x, a, value=0.5), (4, 3))
    case("pad, of one", lambda x: F.pad(x, (1, 2)), (4, 1))
    case("pad, then convolution", lambda x, w: F.conv1d(F.pad(x, (2, 1)), w), (2, 3, 7), weights=((4, 3, 4),))
    case("constant_pad_nd", lambda x: aten.constant_pad_nd.default(x, [1, 1], 2.0), (3, 4))
    case("pad, reflected", lambda x: F.pad(x, (1, 1), mode="reflect"), (2, 3, 4), whole=True)
    case("pad, negative", lambda x: F.pad(x, (-1, 1)), (3, 4), whole=True)
    case("cast", lambda x: (x.float() * 2).double(), (3, 4))
    case("cast, of a sum to whole numbers", lambda x: [x, (x.sum(0) * 3).long(), x.sum(1).to(torch.int32)], (5, 4))
    case("type_as, clone, contiguous", lambda x, y: x.t().contiguous().clone() + y.type_as(x).t(), (3, 4), (3, 4))
    case("detach", lambda x: x * x.detach(), (3, 4))
    case(
        "zeros_like and others",
        lambda x: x + torch.ones_like(x) * 2 + x.new_zeros(4) + torch.full_like(x, 3.0) + x.new_full((3, 1), 2.0),
        (3, 4),
    )


def _picks() -> None:
    case("index_select", lambda x, i: x.index_select(1, i), (3, 5), extra=(_ids(5, 4),))
    case("gather", lambda x, i: x.gather(1, i), (4, 5), extra=(_ids(5, 4, 3),))
    case("gather, smaller", lambda x, i: x.gather(1, i), (4, 5, 3), extra=(_ids(5, 2, 3, 2),))
    case("gather, to one row", lambda x, i: x.gather(0, i), (4, 5), extra=(_ids(4, 1, 1),))
    case("index", lambda x, i: x[i], (5, 4), extra=(_ids(5, 3),))
    case("index, 2-d", lambda x, i: x[:, i], (3, 5), extra=(_ids(5, 2, 4),))
    case("index, pairs", lambda x, i, j: x[i, :, j], (5, 3, 4), extra=(_ids(5, 4), _ids(4, 4)))
    case("index, adjacent, broadcast", lambda x, i, j: x[:, i, j], (3, 5, 4), extra=(_ids(5, 2, 1), _ids(4, 3)))
    case("one_hot", lambda x, i: x.unsqueeze(-1) * F.one_hot(i, 4), (3, 5), extra=(_ids(4, 3, 5),))
    for diagonal in (-1, 0, 2):
        case(f"tril {diagonal}", lambda x, d=diagonal: x.tril(d), (2, 5, 4))
        case(f"triu {diagonal}", lambda x, d=diagonal: x.triu(d), (4, 6))
    case("tril, of a product", lambda x, y: (x @ y).tril(), (4, 3), (3, 5))
    case("repeat", lambda x: x.repeat(3, 2, 1), (4, 5))
    case("repeat, of one", lambda x: x.repeat(4, 2), (1, 3))
    case("tile", lambda x: x.tile(2), (3, 4))
    case("repeat_interleave", lambda x: x.repeat_interleave(3, 1), (4, 5))
    case("repeat_interleave, all", lambda x: x.repeat_interleave(2), (4, 5), whole=True)
    case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (2, 12, 3, 5))
    case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), (2, 3, 6, 4))


def _views_put_back() -> None:
    case("slice_scatter", lambda x, y: aten.slice_scatter(x, y, 1, 1, 4), (3, 6), (3, 3))
    case("slice_scatter, from the end", lambda x, y: aten.slice_scatter(x, y, 0, -2), (5, 4), (2, 4))
    case("slice_scatter, all", lambda x, y: aten.slice_scatter(x, y, 1), (3, 4), (3, 4))
    case("slice_scatter, nothing", lambda x, y: aten.slice_scatter(x, y, 1, 3, 1) * 2, (3, 4), (3, 0))
    case("slice_scatter, step", lambda x, y: aten.slice_scatter(x, y, -1, 1, 6, 2), (3, 6), (3, 3))
    case("select_scatter", lambda x, y: aten.select_scatter(x, y, 1, -2), (3, 5, 4), (3, 4))
    case("diagonal", lambda x: x.diagonal(1, 0, 2), (4, 3, 5))
    case("diagonal_scatter", lambda x, y: aten.diagonal_scatter(x, y, -1, 1, 2), (3, 5, 4), (3, 4))


def _counting() -> None:
    case("histc", lambda x: x * torch.histc(x.detach(), 4, -1.0, 1.0).sum(), (5, 4))
    case("histc, any range", lambda x: x * torch.histc(x.detach(), 4), (5, 4), whole=True)


def _reductions() -> None:
    dims: Sequence[Any] = [None, 0, 1, -1, (0, 2), (0, 1, 2)]
    for dim in dims:
        for keep in (False, True):
            label = f"{dim}{', kept' if keep else ''}"
            for name in ("sum", "mean", "amax", "amin"):
                options = {} if dim is None else {"dim": dim, "keepdim": keep}
                if dim is None and keep:
                    continue
                case(f"{name} {label}", lambda x, n=name, o=options: getattr(x, n)(**o), (3, 4, 5))
            if dim is not None:
                case(f"var {label}", lambda x, o=options: x.var(**o), (3, 4, 5))
    case("mean, scalar", lambda x: x.mean(), ())
    case("sum, cast", lambda x: x.sum(1, dtype=torch.float64), (3, 4))
    case("sum, of whole numbers", lambda x: [x, (x > 0).sum(0)], (5, 4))
    case("var, correction", lambda x: x.var(0, correction=2), (5, 4))
    case("std", lambda x: [x.std(0), x.std(1, correction=0, keepdim=True), x.std()], (5, 4))
    case("var_mean", lambda x: torch.var_mean(x, 1), (5, 4))
    case("std_mean", lambda x: torch.std_mean(x, 0, keepdim=True), (5, 4))
    case("max and min", lambda x: [*x.max(1), *x.min(0, keepdim=True), x.max(), x.min()], (5, 4))
    case("argmax, argmin", lambda x: [x, x.argmax(1), x.argmin(0, keepdim=True), x.argmax()], (5, 4))
    case("median", lambda x: x.median(1), (5, 4))
    case("logsumexp", lambda x: x.logsumexp((0, 2)), (3, 4, 5))
    case("prod", lambda x: [x.prod(1), x.prod()], (3, 4))
    case("any, all", lambda x: [x, (x > 0).any(1), (x > 0).all(0), (x > 9).any(), (x > 0).all()], (3, 4))
    case("vector_norm", lambda x: [torch.linalg.vector_norm(x, dim=1), x.norm(), F.normalize(x)], (3, 4))


def _losses() -> None:
    ids, space = _ids(4, 6), _ids(4, 3, 2, 5)
    ignored = ids.clone()
    ignored[1::2] = -100
    weights = _floats(4) + 0.2
    for how in ("none", "mean", "sum"):
        case(f"cross_entropy, {how}", lambda x, t, h=how: F.cross_entropy(x, t, reduction=h), (6, 4), extra=(ids,))
        case(f"cross_entropy, ignored, {how}", lambda x, t, h=how: F.cross_entropy(x, t, reduction=h), (6, 4), extra=(ignored,))
        case(
            f"cross_entropy, ignore_index, {how}",
            lambda x, t, h=how: F.cross_entropy(x, t, ignore_index=1, reduction=h),
            (6, 4),
            extra=(ids,),
        )
        case(
            f"cross_entropy, weights, {how}", lambda x, t, w, h=how: F.cross_entropy(x, t, w, reduction=h), (6, 4), extra=(ignored, weights)
        )
        smooth = lambda x, t, h=how: F.cross_entropy(x, t, label_smoothing=0.2, reduction=h)  # noqa: E731
        case(f"cross_entropy, smoothed, {how}", smooth, (6, 4), extra=(ignored,))
        both = lambda x, t, w, h=how: F.cross_entropy(x, t, w, ignore_index=2, label_smoothing=0.2, reduction=h)  # noqa: E731
        case(f"cross_entropy, weights, smoothed, {how}", both, (6, 4), extra=(ids, weights))
        case(f"cross_entropy, space, {how}", lambda x, t, h=how: F.cross_entropy(x, t, reduction=h), (3, 4, 2, 5), extra=(space,))
        soft = lambda x, y, h=how: F.cross_entropy(x, y.softmax(1), reduction=h)  # noqa: E731
        case(f"cross_entropy, probabilities, {how}", soft, (6, 4), (6, 4))
        blurred = lambda x, y, w, h=how: F.cross_entropy(x, y.softmax(1), w, label_smoothing=0.1, reduction=h)  # noqa: E731
        case(f"cross_entropy, probabilities, weights, space, {how}", blurred, (3, 4, 5), (3, 4, 5), extra=(weights,))
        nll = lambda x, t, w, h=how: F.nll_loss(x.log_softmax(1), t, w, reduction=h)  # noqa: E731
        case(f"nll_loss, {how}", nll, (6, 4), extra=(ignored, weights))
        case(f"nll_loss, space, {how}", nll, (3, 4, 2, 5), extra=(space, weights))
        case(f"mse_loss, {how}", lambda x, y, h=how: F.mse_loss(x, y, reduction=h), (5, 4), (5, 4))
        case(f"l1_loss, {how}", lambda x, y, h=how: F.l1_loss(x, y, reduction=h), (5, 4), (5, 4))
        case(f"smooth_l1_loss, {how}", lambda x, y, h=how: F.smooth_l1_loss(x, y, reduction=h, beta=0.5), (5, 4), (5, 4))
        case(f"huber_loss, {how}", lambda x, y, h=how: F.huber_loss(x, y, reduction=h, delta=0.5), (5, 4), (5, 4))
        bce = lambda x, t, w, h=how: F.binary_cross_entropy(x.sigmoid(), t, w, reduction=h)  # noqa: E731
        case(f"binary_cross_entropy, {how}", bce, (5, 4), extra=(_floats(5, 4), _floats(5, 1, seed=2)))
        logits = lambda x, t, h=how: F.binary_cross_entropy_with_logits(x, t, reduction=h)  # noqa: E731
        case(f"binary_cross_entropy_with_logits, {how}", logits, (5, 4), extra=(_floats(5, 4),))
        weighted = lambda x, t, w, p, h=how: F.binary_cross_entropy_with_logits(x, t, w, pos_weight=p, reduction=h)  # noqa: E731
        extra = (_floats(5, 4), _floats(5, 1, seed=2), _floats(4, seed=8))
        case(f"binary_cross_entropy_with_logits, weights, {how}", weighted, (5, 4), extra=extra)
        case(
            f"soft_margin_loss, {how}",
            lambda x, t, h=how: F.soft_margin_loss(x, t, reduction=h),
            (5, 4),
            extra=(_floats(5, 4).sub(0.5).sign(),),
        )
        case(f"kl_div, {how}", lambda x, t, h=how: F.kl_div(x, t, reduction=h), (5, 4), extra=(_floats(5, 4),))
        case(f"poisson_nll_loss, {how}", lambda x, t, h=how: F.poisson_nll_loss(x, t, reduction=h), (5, 4), extra=(_floats(5, 4),))
        rank = lambda x, y, t, h=how: F.margin_ranking_loss(x, y, t, 0.5, reduction=h)  # noqa: E731
        case(f"margin_ranking_loss, {how}", rank, (5,), (5,), extra=(_floats(5).sub(0.5).sign(),))
        hinge = lambda x, t, h=how: F.hinge_embedding_loss(x, t, reduction=h)  # noqa: E731
        case(f"hinge_embedding_loss, {how}", hinge, (5, 4), extra=(_floats(5, 4).sub(0.5).sign(),))
    case("kl_div, batchmean", lambda x, t: F.kl_div(x, t, reduction="batchmean", log_target=True), (5, 4), extra=(_floats(5, 4).log(),))
    case("cross_entropy, one sample", lambda x, t: F.cross_entropy(x, t), (4,), extra=(torch.tensor(2),), whole=True)
    case("nll_loss2d", lambda x, t: aten.nll_loss2d.default(x.log_softmax(1), t), (3, 4, 2, 5), extra=(space,))
    case("nll_loss, flat", lambda x, t: aten.nll_loss.default(x.log_softmax(1), t), (6, 4), extra=(ids,))


def _pointwise() -> None:
    case("broadcasting", lambda x, y, z: (x + y) * z - 2 * x, (3, 4, 5), (4, 1), (1,))
    case("scalars", lambda x, y: x * y + y, (3, 4), ())
    case("where", lambda x, y: torch.where(x > y, x, y) + torch.where(x > 0, x, 0.0), (3, 4), (4,))
    case("masked_fill", lambda x, m: x.masked_fill(m, -1.0), (3, 4), extra=(_ids(2, 4).bool(),))
    logic = lambda x, m: [x, (x > 0) & m, (x > 0) | m, (x > 0) ^ m, ~(x > 0), torch.logical_and(x > 0, m)]  # noqa: E731
    case("logic", logic, (3, 4), extra=(_ids(2, 4).bool(),))
    for name in ("__and__", "__or__", "__xor__"):
        case(f"torch's {name}", lambda x, m, n=name: [x, getattr(aten, n).Tensor(x > 0, m)], (3, 4), extra=(_ids(2, 4).bool(),))
    activations = (
        F.relu, F.gelu, F.silu, F.elu, F.selu, F.celu, F.leaky_relu, F.relu6, F.hardtanh, F.hardswish, F.hardsigmoid, F.mish, F.softplus,
        F.logsigmoid, F.softsign, F.tanhshrink, F.hardshrink, F.softshrink, torch.tanh, torch.sigmoid, torch.exp, torch.sin, torch.erf,
    )  # fmt: skip
    for function in activations:
        case(f"activation {function.__name__}", function, (3, 5))
    case("prelu", lambda x, w: F.prelu(x, w), (3, 4, 5), weights=((4,),))
    case("prelu, one slope, square", lambda x, w: F.prelu(x, w), (3, 4, 4), weights=((1,),))
    case("prelu, square", lambda x, w: F.prelu(x, w), (3, 4, 4), weights=((4,),))
    case("clamp, lerp, addcmul", lambda x, y: x.clamp(min=0.1).clamp(y, y + 1).lerp(y, 0.3).addcmul(x, y), (3, 4), (3, 4))
    case("powers", lambda x, y: x.sqrt() + x.log() + x.rsqrt() + x**y + x.reciprocal() + x.square(), (3, 4), (4,), positive=True)
    names = (
        "multiply", "subtract", "divide", "greater", "less", "greater_equal", "less_equal", "not_equal", "isclose", "arctan2",
        "special_xlogy",
    )  # fmt: skip
    for name in names:
        case(f"torch's {name}", lambda x, y, n=name: [x, y, getattr(aten, n)(x, y)], (3, 4), (4,), positive=True)
    names = (
        "negative", "absolute", "fix", "isreal", "arctan", "arcsinh", "special_expit", "special_erf", "special_erfc", "special_exp2",
        "special_expm1", "special_log1p", "special_gammaln", "special_digamma", "special_ndtr", "special_sinc",
    )  # fmt: skip
    for name in names:
        case(f"torch's {name}", lambda x, n=name: [x * 2, getattr(aten, n)(x)], (3, 4), positive=True)
    for name in ("arccos", "arcsin", "arctanh", "special_logit"):
        case(f"torch's {name}", lambda x, n=name: getattr(aten, n)(x.sigmoid()), (3, 4))
    case("torch's arccosh", lambda x: aten.arccosh(x + 1), (3, 4), positive=True)
    case("fill, zero", lambda x: aten.fill.Scalar(x, 2.0) + aten.zero(x) + x, (3, 4))
    case("in place", lambda x, y: (x * 1).mul_(y).add_(y).relu_() + x, (3, 4), (4,))
    case("in place, copy", lambda x, y: (x * 1).copy_(y) + x, (3, 4), (4,))
    case("in place, keeps its dtype", lambda x: (x.float() * 1).add_(x.detach()).double() + x, (3, 4))
    case("in place, fill", lambda x: (x * 1).fill_(3.0) * x, (3, 4))


def _random() -> None:
    case("dropout", lambda x: F.dropout(x, 0.4), (4, 5), random=True)
    case("dropout, off", lambda x: F.dropout(x, 0.4, training=False), (4, 5))
    case("dropout, all", lambda x: F.dropout(x, 1.0) + x, (4, 5))
    case("dropout, in place", lambda x: F.dropout(x * 1, 0.4, inplace=True) + x, (4, 5), random=True)
    case("dropout2d", lambda x: F.dropout2d(x, 0.4), (3, 4, 2, 3), random=True)
    case("alpha_dropout", lambda x: F.alpha_dropout(x, 0.4, training=True), (4, 5), whole=True, random=True)
    case("rand_like", lambda x: x * torch.rand_like(x), (4, 5), random=True)
    case("randn_like", lambda x: x * torch.randn_like(x), (4, 5), random=True)
    case("rand", lambda x: x * torch.rand(4, 5, dtype=torch.float64), (4, 5), random=True)
    case("randn", lambda x: x * torch.randn(4, 5), (4, 5), random=True)
    case("randint", lambda x: x * torch.randint(9, (4, 5)), (4, 5), random=True)
    case("randint_like", lambda x: x * torch.randint_like(x, 9), (4, 5), random=True)
    case("bernoulli", lambda x: x * aten.bernoulli.p(x, 0.5), (4, 5), random=True)
    case("uniform", lambda x: x * torch.empty_like(x).uniform_(), (4, 5), random=True)
    case("exponential", lambda x: F.gumbel_softmax(x), (4, 5), random=True)
    case("normal", lambda x: x * torch.empty_like(x).normal_(), (4, 5), random=True)


for _add in (_products, _convolutions, _pools, _attention, _norms, _shapes, _picks, _reductions, _losses, _pointwise, _random):
    _add()
for _add in (_views_put_back, _counting):
    _add()

RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: _Recurrent(nn.LSTM),
    "lstm, batch first, two ways, two layers": lambda: _Recurrent(nn.LSTM, batch_first=True, bidirectional=True, num_layers=2),
    "lstm, projection": lambda: _Recurrent(nn.LSTM, proj_size=2, bias=False),
    "lstm, dropout": lambda: _Recurrent(nn.LSTM, num_layers=2, dropout=0.5),
    "gru": lambda: _Recurrent(nn.GRU, bidirectional=True),
    "gru, batch first": lambda: _Recurrent(nn.GRU, batch_first=True, num_layers=2),
    "rnn": lambda: _Recurrent(nn.RNN),
    "rnn, relu": lambda: _Recurrent(nn.RNN, nonlinearity="relu", batch_first=True),
}
