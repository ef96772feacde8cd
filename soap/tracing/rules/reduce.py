"""Sums, means and other reductions over dimensions."""

from __future__ import annotations

from math import prod

import torch

from soap.model.graph import WHOLE, DimMap
from soap.tracing.rules.notation import Local, Scope, Tiled, View, broadcast, broadcast_shape
from soap.tracing.rules.registry import rule


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
