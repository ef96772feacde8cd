"""Views and moves of elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from tests.tracing.cases.probe import Shape, case

aten = torch.ops.aten


def _viewed() -> None:
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


def _expanded_and_cut() -> None:
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


def _joined_and_padded() -> None:
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
    for mode in ("reflect", "replicate", "circular"):
        case(f"pad, {mode}", lambda x, m=mode: F.pad(x, (1, 2), mode=m), (2, 3, 5))
        case(f"pad 2d, {mode}", lambda x, m=mode: F.pad(x, (1, 2, 2, 0), mode=m), (2, 3, 5, 6))
    mirrored = lambda x, w: F.conv1d(F.pad(x, (2, 1), mode="reflect"), w)  # noqa: E731
    case("pad, reflected, then convolution", mirrored, (2, 3, 7), weights=((4, 3, 4),))
    case("unfold", lambda x: x.unfold(1, 3, 2), (3, 9))
    case("diagonal, diag_embed", lambda x: [x.diagonal(1, 1, 2), x.sum(1).diag_embed()], (3, 4, 5))
    case("pad, negative", lambda x: F.pad(x, (-1, 1)), (3, 4))


def _cast_and_made() -> None:
    case("cast", lambda x: (x.float() * 2).double(), (3, 4))
    case("cast, of a sum to whole numbers", lambda x: [x, (x.sum(0) * 3).long(), x.sum(1).to(torch.int32)], (5, 4))
    case("type_as, clone, contiguous", lambda x, y: x.t().contiguous().clone() + y.type_as(x).t(), (3, 4), (3, 4))
    case("detach", lambda x: x * x.detach(), (3, 4))
    case(
        "zeros_like and others",
        lambda x: x + torch.ones_like(x) * 2 + x.new_zeros(4) + torch.full_like(x, 3.0) + x.new_full((3, 1), 2.0),
        (3, 4),
    )


def _views_put_back() -> None:
    case("slice_scatter", lambda x, y: aten.slice_scatter(x, y, 1, 1, 4), (3, 6), (3, 3))
    case("slice_scatter, from the end", lambda x, y: aten.slice_scatter(x, y, 0, -2), (5, 4), (2, 4))
    case("slice_scatter, all", lambda x, y: aten.slice_scatter(x, y, 1), (3, 4), (3, 4))
    case("slice_scatter, nothing", lambda x, y: aten.slice_scatter(x, y, 1, 3, 1) * 2, (3, 4), (3, 0))
    case("slice_scatter, step", lambda x, y: aten.slice_scatter(x, y, -1, 1, 6, 2), (3, 6), (3, 3))
    case("select_scatter", lambda x, y: aten.select_scatter(x, y, 1, -2), (3, 5, 4), (3, 4))
    case("diagonal", lambda x: x.diagonal(1, 0, 2), (4, 3, 5))
    case("diagonal_scatter", lambda x, y: aten.diagonal_scatter(x, y, -1, 1, 2), (3, 5, 4), (3, 4))


_viewed()
_expanded_and_cut()
_joined_and_padded()
_cast_and_made()
_views_put_back()
