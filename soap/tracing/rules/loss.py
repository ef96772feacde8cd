"""Losses: each tile gives its part of the global batch's loss, so that the parts add up to what one process computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from soap.model.graph import WHOLE
from soap.tracing.calls import Call
from soap.tracing.rules.notation import Local, Maps, Scope, Tiled, View, broadcast, broadcast_shape, rule

aten = torch.ops.aten

MEAN, SUM = 1, 2
"""ATen's numbers for the reductions (0: none)."""


def cross_entropy_loss(self: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    """ATen's loss of scores with classes as their last dimension, behind samples and positions, as language models make them."""
    return cast(torch.Tensor, aten.cross_entropy_loss(self.flatten(0, -2), target.flatten(), **options))


def nll_loss_nd(self: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    """The same of logarithms of probabilities."""
    return cast(torch.Tensor, aten.nll_loss_nd(self.flatten(0, -2), target.flatten(), **options))


BY_POSITION: Mapping[str, Callable[..., torch.Tensor]] = {own.__name__: own for own in (cross_entropy_loss, nll_loss_nd)}
"""Kind of ATen's call -> the call of our own in its place (``tracing.rewriting``)."""


def _is_by_position(call: Call) -> bool:
    return call.target in BY_POSITION.values()


def _class_dim(call: Call, shape: tuple[int, ...]) -> int:
    return len(shape) - 1 if _is_by_position(call) else min(1, len(shape) - 1)


def _own_of(target: torch.Tensor, local: Local) -> torch.Tensor:
    """This tile's part of all targets."""
    class_dim = _class_dim(local.call, local.shapes[0])
    region = tuple(slice(a, b) for i, (a, b) in enumerate(local.boxes[0]) if i != class_dim)
    return target[region]


def _denominator(targets: torch.Tensor, weight: torch.Tensor | None, ignore_index: int) -> torch.Tensor:
    kept = targets != ignore_index
    if weight is None:
        return kept.sum()  # a whole number, by which any loss may be divided without changing its type
    none = torch.zeros((), dtype=weight.dtype, device=weight.device)
    return weight[targets.where(kept, torch.zeros_like(targets))].where(kept, none).sum()


class _CrossEntropy(torch.autograd.Function):
    """The sum of negative logarithms of the classes' probabilities. ATen's backward pass makes two tensors of the logits' size, one after
    the other from one more that is kept; this one makes one. For language models these are the largest tensors there are."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
        scores = F.log_softmax(logits, 1)
        ctx.save_for_backward(scores, targets)
        ctx.ignore_index = ignore_index
        return F.nll_loss(scores, targets, ignore_index=ignore_index, reduction="sum")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        scores, targets = ctx.saved_tensors
        counted = (targets != ctx.ignore_index).unsqueeze(1)
        classes = targets.unsqueeze(1).where(counted, torch.zeros_like(targets).unsqueeze(1))
        found = scores.exp()
        found.scatter_(1, classes, found.gather(1, classes) - 1)
        return found.mul_(counted * grad), None, None


def _is_plain(x: torch.Tensor, weight: torch.Tensor | None, smoothing: float) -> bool:
    """Whether ``_CrossEntropy`` is exact for such logits: narrower types would be rounded once more."""
    return weight is None and smoothing == 0.0 and x.dim() > 1 and x.dtype in (torch.float32, torch.float64)


def _run_cross_entropy(local: Local) -> torch.Tensor:
    x, reduction = local.tensors[0], local.get("reduction", MEAN)
    weight, ignore = local.get("weight"), local.get("ignore_index", -100)
    logits = local.call.kind == "cross_entropy_loss"
    smoothing = float(local.get("label_smoothing", 0.0) or 0.0) if logits else 0.0
    if local.shapes[0] == local.shapes[1]:  # targets are probabilities: their region comes along with x's
        summed = F.cross_entropy(x, local.tensors[1], weight, reduction="none" if reduction == 0 else "sum", label_smoothing=smoothing)
        return summed / (prod(local.shapes[0]) // local.shapes[0][_class_dim(local.call, local.shapes[0])]) if reduction == MEAN else summed
    everyone = local.tensors[1]
    told = None if local.context.counts is None else local.context.counts(local.call.name)
    targets = _own_of(everyone, local) if reduction == MEAN and told is None else everyone
    how = "none" if reduction == 0 else "sum"
    if _is_by_position(local.call):
        x, targets = x.flatten(0, -2), targets.flatten()
    if logits and how == "sum" and _is_plain(x, weight, smoothing):
        loss = cast(torch.Tensor, _CrossEntropy.apply(x, targets, ignore))  # type: ignore[no-untyped-call]
    elif logits:
        loss = F.cross_entropy(x, targets, weight, ignore_index=ignore, reduction=how, label_smoothing=smoothing)
    else:
        loss = F.nll_loss(x, targets, weight, ignore_index=ignore, reduction=how)
    if reduction != MEAN:
        return loss
    if told is None:
        return loss / _denominator(everyone, weight, ignore)
    return loss / (told.long() if weight is None else told.to(weight.dtype))


def _count(local: Local) -> torch.Tensor:
    """What a tile's own labels are of the number by which a mean divides, in float64. Needs no scores."""
    targets, weight, ignore = local.tensors[1], local.get("weight"), local.get("ignore_index", -100)
    return _denominator(targets, None if weight is None else weight.detach().double(), ignore).double()


@rule("aten.cross_entropy_loss", "aten.nll_loss", "aten.nll_loss_nd", "aten.nll_loss2d", "soap.cross_entropy_loss", "soap.nll_loss_nd")
def cross_entropy(view: View) -> Tiled:
    """Classes are needed whole; samples and positions are free and summed. A mean needs all targets, or is told what it divides by."""
    shape = view.shapes[0]
    class_dim = _class_dim(view.call, shape)
    scope = Scope()
    maps = tuple(WHOLE if i == class_dim else scope.factor("b" if i == 0 else f"d{i}", size) for i, size in enumerate(shape))
    own = tuple(dim for i, dim in enumerate(maps) if i != class_dim)
    counts = view.shapes[1] != shape and view.get("reduction", MEAN) == MEAN
    target = maps if view.shapes[1] == shape else (WHOLE,) * len(own) if counts else own
    weight = [(WHOLE,)] * (len(view.shapes) - 2)
    none = view.get("reduction", MEAN) == 0
    out = own if none else ()
    return Tiled(
        tuple(scope.factors),
        (maps, target, *weight),
        (out,),
        summed=() if none else tuple(range(len(scope.factors))),
        run=_run_cross_entropy,
        flops=6 * prod(shape),
        saved_bytes=2 * view.itemsize * prod(shape) + 9 * prod(view.shapes[1]) + 64,
        lean=view.call.kind == "cross_entropy_loss",
        count=_count if counts else None,
        own_operands=(maps, own, *weight) if counts else (),
    )


def _reduced(local: Local, shape: Sequence[int]) -> torch.Tensor:
    """The loss, or its sum, or that by the number of elements of a shape, as the call asks."""
    reduction = local.get("reduction", MEAN)
    more: dict[str, Any] = {"reduction": SUM} if reduction else {}
    found: torch.Tensor = local.plain(**more)
    return found / prod(shape) if reduction == MEAN else found


def _run_pointwise_loss(local: Local) -> torch.Tensor:
    return _reduced(local, broadcast_shape(local.shapes))


@rule(
    "aten.mse_loss", "aten.l1_loss", "aten.smooth_l1_loss", "aten.huber_loss", "aten.binary_cross_entropy", "aten.soft_margin_loss",
    "aten.binary_cross_entropy_with_logits", "aten.kl_div", "aten.poisson_nll_loss", "aten.margin_ranking_loss",
    "aten.hinge_embedding_loss",
)  # fmt: skip
def pointwise_loss(view: View) -> Tiled:
    """A pointwise function of some tensors, then a sum or a mean over all elements."""
    shape = broadcast_shape(view.shapes)
    scope = Scope()
    maps = scope.like(shape)
    none = view.get("reduction", MEAN) == 0
    operands = tuple(broadcast(maps, shape, s) for s in view.shapes)
    return Tiled(
        tuple(scope.factors),
        operands,
        (maps if none else (),),
        summed=() if none else tuple(range(len(scope.factors))),
        run=_run_pointwise_loss,
        flops=4 * prod(shape),
        saved_bytes=6 * view.itemsize * prod(shape),
    )


def _run_of_samples(local: Local) -> torch.Tensor:
    return _reduced(local, (local.shapes[0] if local.call.kind != "triplet_margin_loss" else broadcast_shape(local.shapes))[:-1])


def _of_samples(view: View, operands: tuple[Maps, ...], scope: Scope, out: Maps) -> Tiled:
    """A loss of each sample, then a sum or a mean over the samples."""
    none = view.get("reduction", MEAN) == 0
    size = sum(map(prod, view.shapes))
    return Tiled(
        tuple(scope.factors),
        operands,
        (out if none else (),),
        summed=() if none else tuple(range(len(scope.factors))),
        run=_run_of_samples,
        flops=8 * size,
        saved_bytes=16 * (view.itemsize + 8) * size,
    )


@rule("aten.cosine_embedding_loss")
def cosine_embedding_loss(view: View) -> Tiled:
    """Cosines of pairs of vectors; vectors are needed whole."""
    first, second, target = view.shapes
    if len(first) != 2 or first != second or len(target) != 1:
        raise NotImplementedError("vectors that broadcast, or no batch")
    scope = Scope()
    b = scope.factor("b", first[0])
    return _of_samples(view, ((b, WHOLE), (b, WHOLE), (b,)), scope, (b,))


@rule("aten.triplet_margin_loss")
def triplet_margin_loss(view: View) -> Tiled:
    """Distances of vectors, which are needed whole."""
    shape = broadcast_shape(view.shapes)
    if len(shape) < 2:
        raise NotImplementedError("no batch")
    scope = Scope()
    maps = (*scope.like(shape[:-1], "b"), WHOLE)
    return _of_samples(view, tuple(broadcast(maps, shape, s) for s in view.shapes), scope, maps[:-1])


@rule("aten.multi_margin_loss", "aten.multilabel_margin_loss")
def class_margin_loss(view: View) -> Tiled:
    """Margins between classes, which are needed whole."""
    if len(view.shapes[0]) != 2:
        raise NotImplementedError("no batch")
    scope = Scope()
    b = scope.factor("b", view.shapes[0][0])
    target = (b, WHOLE)[: len(view.shapes[1])]
    return _of_samples(view, ((b, WHOLE), target, *((WHOLE,) for _ in view.shapes[2:])), scope, (b,))
