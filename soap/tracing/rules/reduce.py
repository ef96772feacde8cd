"""Reductions over dimensions; calls that need some dimensions whole (softmax, scans, sorting); pointwise calls without ATen's tag."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from soap.model.graph import WHOLE, DimMap
from soap.tracing.rules.notation import Local, Scope, Tiled, View, broadcast, broadcast_shape, pointwise, rule


def _reduced(view: View) -> set[int]:
    rank = len(view.shapes[0])
    dims = view.get("dim")
    if dims is None or dims == []:
        return set(range(rank))
    return {int(d) % rank for d in ([dims] if isinstance(dims, int) else dims)} if rank else set()


def _output(maps: list[DimMap], reduced: set[int], keepdim: bool) -> tuple[DimMap, ...]:
    return tuple(WHOLE if i in reduced else dim for i, dim in enumerate(maps) if keepdim or i not in reduced)


def _run_mean(local: Local) -> torch.Tensor:
    dims = local.get("dim")
    x = local.tensors[0]
    dtype = local.get("dtype")
    rank = len(local.shapes[0])
    axes = list(range(rank)) if dims is None or dims == [] else [dims] if isinstance(dims, int) else list(dims)
    if rank == 0:
        return x if dtype is None else x.to(dtype)
    count = prod(local.shapes[0][d] for d in axes)
    return x.sum(axes, bool(local.get("keepdim", False)), dtype=dtype) / count


@rule("aten.sum", "aten.mean", "aten.nansum", "aten.count_nonzero")
def total(view: View) -> Tiled:
    """Sum or mean: the reduced dimensions may be split, which gives partial sums (a mean divides by the whole count)."""
    shape = view.shapes[0]
    reduced = _reduced(view)
    scope = Scope()
    maps = list(scope.like(shape))
    out = _output(maps, reduced, bool(view.get("keepdim", False)))
    summed = tuple(f for i in sorted(reduced) if (f := maps[i].factor) is not None)
    run = _run_mean if view.call.kind == "mean" else None
    saved = prod(shape) if view.call.kind == "nansum" else 0  # positions of numbers that count
    return Tiled(tuple(scope.factors), (tuple(maps),), (out,), summed=summed, run=run, flops=prod(shape), saved_bytes=saved)


@rule(
    "aten.amax", "aten.amin", "aten.argmax", "aten.argmin", "aten.logsumexp", "aten.special_logsumexp", "aten.max.dim", "aten.min.dim",
    "aten.max.default", "aten.min.default", "aten.aminmax", "aten.prod", "aten.any", "aten.all", "aten.linalg_vector_norm", "aten.var",
    "aten.std", "aten.var_mean", "aten.std_mean", "aten.median", "aten.nanmedian", "aten.mode", "aten.kthvalue", "aten.nanmean",
    "aten.quantile.scalar", "aten.nanquantile.scalar", "aten.linalg_norm", "aten.linalg_matrix_norm", "aten.norm",
)  # fmt: skip
def reduce_whole(view: View) -> Tiled:
    """Reductions whose partial results do not simply add up: the reduced dimensions are needed whole."""
    shape = view.shapes[0]
    reduced = _reduced(view)
    scope = Scope()
    maps = [WHOLE if i in reduced else scope.factor(f"d{i}", size) for i, size in enumerate(shape)]
    out = _output(maps, reduced, bool(view.get("keepdim", False)))
    saved = (8 + 6 * view.itemsize) * prod(shape)  # places; for quantiles and norms of matrices everything of which they are made
    return Tiled(tuple(scope.factors), (tuple(maps),), (out,) * len(view.output_shapes), flops=prod(shape), saved_bytes=saved)


@rule("aten.cosine_similarity", "aten.pairwise_distance")
def compared(view: View) -> Tiled:
    """Pairs of vectors, which are needed whole, give one number each."""
    shape = broadcast_shape(view.shapes)
    dim = int(view.get("dim", -1)) % max(1, len(shape))
    scope = Scope()
    maps = [WHOLE if i == dim else scope.factor(f"d{i}", size) for i, size in enumerate(shape)]
    operands = tuple(broadcast(tuple(maps), shape, s) for s in view.shapes)
    out = _output(maps, {dim}, bool(view.get("keepdim", False)))
    return Tiled(tuple(scope.factors), operands, (out,), flops=6 * prod(shape), saved_bytes=8 * view.itemsize * prod(shape))


@rule("aten.histc")
def histc(view: View) -> Tiled:
    """Elements may be counted in parts if the bins are known without looking at all of them."""
    if float(view.get("min", 0)) >= float(view.get("max", 0)):
        raise NotImplementedError("the range of the bins depends on data")
    scope = Scope()
    maps = scope.like(view.shapes[0])
    return Tiled(tuple(scope.factors), (maps,), ((WHOLE,),), summed=tuple(range(len(scope.factors))), flops=prod(view.shapes[0]))


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


rule(
    "aten.__and__", "aten.__or__", "aten.__xor__", "aten.hardswish", "aten.log_sigmoid", "aten.where", "aten.fill", "aten.zero",
    "aten.multiply", "aten.subtract", "aten.divide", "aten.negative", "aten.absolute", "aten.fix",
    "aten.greater", "aten.less", "aten.greater_equal", "aten.less_equal", "aten.not_equal", "aten.isclose", "aten.isreal",
    "aten.arccos", "aten.arcsin", "aten.arctan", "aten.arccosh", "aten.arcsinh", "aten.arctanh", "aten.arctan2",
    "aten.special_expit", "aten.special_logit", "aten.special_erf", "aten.special_erfc", "aten.special_exp2", "aten.special_expm1",
    "aten.special_log1p", "aten.special_gammaln", "aten.special_digamma", "aten.special_ndtr", "aten.special_sinc", "aten.special_xlogy",
    "aten.special_i0", "aten.special_psi", "aten.special_multigammaln", "aten.special_polygamma", "aten.special_round",
    "aten.special_gammainc", "aten.special_gammaincc", "aten.floor_divide", "aten.rsub",
)(pointwise)  # fmt: skip


def _run_prelu(local: Local) -> torch.Tensor:
    return F.prelu(local.tensors[0], local.tensors[1])


@rule("aten.prelu")
def prelu(view: View) -> Tiled:
    """Pointwise with one slope, or one per channel (dimension 1)."""
    shape = view.shapes[0]
    scope = Scope()
    maps = scope.like(shape)
    slopes = view.shapes[1]
    slope = (maps[1],) if len(shape) > 1 and slopes == (shape[1],) else (WHOLE,) * len(slopes)
    return Tiled(tuple(scope.factors), (maps, slope), (maps,), run=_run_prelu, flops=2 * prod(shape))
