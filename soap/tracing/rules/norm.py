"""Normalisation and softmax. Training batch norm is imported as two calls of our own, so that its statistics cover the whole batch.

``batch_norm_statistics`` sums x and x² per channel: a sum over sample and space like any other, so that splitting them gives partial sums that are
reduced; ``batch_norm_apply`` is pointwise. Backward through both is synchronized batch norm's backward by linearity.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from soap.graph import WHOLE, DimMap
from soap.tracing.rules.notation import Local, Scope, Tiled, View, einsum
from soap.tracing.rules.registry import rule


def batch_norm_statistics(x: torch.Tensor) -> torch.Tensor:
    """Sums of x and of x² over all but dimension 1, in float64 so that the variance survives the subtraction: shape (2, channels)."""
    dims = [0, *range(2, x.dim())]
    return torch.stack([x.sum(dims, dtype=torch.float64), (x * x).sum(dims, dtype=torch.float64)])


def batch_norm_apply(
    x: torch.Tensor,
    sums: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    count: int,
    momentum: float,
    eps: float,
    update: bool = True,
) -> torch.Tensor:
    """Normalise with the mean and biased variance that ``sums`` over ``count`` elements give; move the running statistics (in place)."""
    mean = sums[0] / count
    var = (sums[1] / count - mean * mean).clamp_min(0.0)
    if update and running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((var * (count / max(count - 1, 1))).to(running_var.dtype), momentum)
    shape = [1, -1] + [1] * (x.dim() - 2)
    scale = torch.rsqrt(var + eps)
    shift = -mean * scale
    if weight is not None:
        scale, shift = scale * weight, shift * weight
    if bias is not None:
        shift = shift + bias
    return x * scale.to(x.dtype).view(shape) + shift.to(x.dtype).view(shape)


@rule("soap.batch_norm_statistics")
def statistics(view: View) -> Tiled:
    """b, h, w are summed; c is the output's."""
    space = " ".join(("h", "w", "d")[: len(view.shapes[0]) - 2])
    return einsum(view, f"b c {space} -> [two] c", flops=3 * prod(view.shapes[0]))


def _run_apply(local: Local) -> torch.Tensor:
    channels = local.boxes[0][1]
    operands = iter(local.tensors)
    x, sums = next(operands), next(operands)
    weight, bias = (next(operands) if present else None for present in local.call.kwargs["affine"])
    options = local.call.kwargs
    buffers = [local.buffers[ref.name][slice(*channels)] if ref else None for ref in options["buffers"]]
    return batch_norm_apply(
        x, sums, weight, bias, buffers[0], buffers[1], options["count"], options["momentum"], options["eps"], local.update_buffers
    )


@rule("soap.batch_norm_apply")
def apply(view: View) -> Tiled:
    """Pointwise in x; c follows the statistics and the affine parameters."""
    shape = view.output_shapes[0]
    scope = Scope()
    maps = tuple(scope.factor(n, s) for n, s in zip(("b", "c", "h", "w", "d"), shape, strict=False))
    affine = [(maps[1],)] * (len(view.shapes) - 2)
    return Tiled(tuple(scope.factors), (maps, (WHOLE, maps[1]), *affine), (maps,), run=_run_apply, flops=4 * prod(shape))


@rule("aten.batch_norm")
def batch_norm_inference(view: View) -> Tiled:
    """Batch norm with fixed statistics (the training form never reaches the rules)."""
    shape = view.output_shapes[0]
    scope = Scope()
    maps = tuple(scope.factor(n, s) for n, s in zip(("b", "c", "h", "w", "d"), shape, strict=False))
    return Tiled(tuple(scope.factors), (maps, *([(maps[1],)] * (len(view.shapes) - 1))), (maps,), flops=4 * prod(shape))


@rule("aten.layer_norm", "aten.rms_norm")
def layer_norm(view: View) -> Tiled:
    """The normalised dimensions are needed whole; all others are free."""
    shape = view.shapes[0]
    normalized = len(view.get("normalized_shape"))
    scope = Scope()
    maps = (*scope.like(shape[: len(shape) - normalized], "b"), *(WHOLE,) * normalized)
    rest = tuple((WHOLE,) * len(s) for s in view.shapes[1:])
    return Tiled(tuple(scope.factors), (maps, *rest), (maps,), flops=8 * prod(shape), saved_bytes=2 * view.itemsize * prod(shape))


def _run_group_norm(local: Local) -> torch.Tensor:
    groups = local.get("num_groups")
    share = (local.boxes[0][1][1] - local.boxes[0][1][0]) / local.shapes[0][1]
    out: torch.Tensor = local.plain(num_groups=max(1, round(groups * share)))
    return out


@rule("aten.group_norm")
def group_norm(view: View) -> Tiled:
    """Whole groups of channels; space is needed whole."""
    shape, groups = view.shapes[0], view.get("num_groups")
    scope = Scope()
    b, g = scope.factor("b", shape[0]), scope.factor("g", groups)
    span = shape[1] // groups
    channels = DimMap(g.factor, span, 0, span) if g.factor is not None else WHOLE
    maps = (b, channels, *(WHOLE,) * (len(shape) - 2))
    return Tiled(tuple(scope.factors), (maps, *([(channels,)] * (len(view.shapes) - 1))), (maps,), run=_run_group_norm, flops=8 * prod(shape))


def along(view: View, whole_dims: set[int], **options: Any) -> Tiled:
    """Shape-preserving call that needs some dimensions whole."""
    shape = view.shapes[0]
    scope = Scope()
    maps = tuple(WHOLE if i in whole_dims else scope.factor(f"d{i}", size) for i, size in enumerate(shape))
    return Tiled(tuple(scope.factors), (maps,), (maps,) * len(view.output_shapes), **options)


@rule("aten.softmax", "aten.log_softmax", "aten._softmax", "aten._log_softmax", "aten.cumsum", "aten.cumprod", "aten.logcumsumexp")
def softmax(view: View) -> Tiled:
    """One dimension is needed whole."""
    shape = view.shapes[0]
    return along(view, {view.get("dim") % max(1, len(shape))}, flops=5 * prod(shape))
