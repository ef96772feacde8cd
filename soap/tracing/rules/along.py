"""Calls that need some dimensions whole and leave the others free: softmax, scans, sorting, moves along a dimension."""

from __future__ import annotations

from math import prod
from typing import Any

from soap.model.graph import WHOLE
from soap.tracing.rules.notation import Scope, Tiled, View, broadcast
from soap.tracing.rules.registry import rule


def along(view: View, whole_dims: set[int], **options: Any) -> Tiled:
    """One input tensor, and outputs of the same sizes except in some dimensions, which are needed whole."""
    shape = view.shapes[0]
    scope = Scope()
    maps = tuple(WHOLE if i in whole_dims else scope.factor(f"d{i}", size) for i, size in enumerate(shape))
    return Tiled(tuple(scope.factors), (maps,), (maps,) * len(view.output_shapes), **options)


def _dim(view: View, default: int | None = None) -> set[int]:
    rank = len(view.shapes[0])
    return {int(view.get("dim", default)) % rank} if rank else set()


@rule(
    "aten.softmax", "aten.log_softmax", "aten._softmax", "aten._log_softmax", "aten.special_softmax", "aten.special_log_softmax",
    "aten._safe_softmax", "aten.cumsum", "aten.cumprod", "aten.logcumsumexp",
)  # fmt: skip
def softmax(view: View) -> Tiled:
    """One dimension is needed whole."""
    return along(view, _dim(view), flops=5 * prod(view.shapes[0]))


@rule("aten.cummax", "aten.cummin")
def running_extreme(view: View) -> Tiled:
    """One dimension is needed whole; a second output has positions in it."""
    return along(view, _dim(view), flops=prod(view.shapes[0]), saved_bytes=8 * prod(view.shapes[0]))


@rule("aten.sort", "aten.argsort", "aten.topk", "aten.glu")
def ordered(view: View) -> Tiled:
    """One dimension is needed whole: the last if none is named."""
    return along(view, _dim(view, -1), flops=5 * prod(view.shapes[0]))


@rule("aten.msort")
def sorted_rows(view: View) -> Tiled:
    """Sorted along the first dimension, which is needed whole."""
    return along(view, {0}, flops=5 * prod(view.shapes[0]), saved_bytes=8 * prod(view.shapes[0]))


@rule("aten.linalg_cross")
def cross(view: View) -> Tiled:
    """Products of vectors in space; the vectors are needed whole."""
    shape = view.output_shapes[0]
    dim = view.get("dim") % len(shape)
    scope = Scope()
    maps = tuple(WHOLE if i == dim else scope.factor(f"d{i}", size) for i, size in enumerate(shape))
    operands = tuple(broadcast(maps, shape, s) for s in view.shapes)
    return Tiled(tuple(scope.factors), operands, (maps,), flops=3 * prod(shape), saved_bytes=2 * view.itemsize * prod(shape))


@rule("aten.flip", "aten.roll")
def moved(view: View) -> Tiled:
    """Elements move along dimensions that are needed whole; a roll without dimensions needs all of them."""
    dims, rank = view.get("dims"), len(view.shapes[0])
    return along(view, {int(d) % rank for d in ([dims] if isinstance(dims, int) else dims)} if dims else set(range(rank)))
