"""Normalisation. Training batch norm is imported as two calls of our own, so that its statistics cover the whole batch: sums of x and x²
per channel, and a pointwise application. On request it is ``batch_norm_local`` instead: torch's own kernel on each tile.

State: buffers that the forward pass itself changes. ``next_state`` takes the values that they have at the end of the step, whole and in
one place; ``keep_state`` puts them where the next step finds them, on every device (docs/internals/tracing.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from soap.model.graph import WHOLE
from soap.model.regions import Interval
from soap.tracing.calls import BufferRef
from soap.tracing.rules.notation import Local, Maps, Scope, Tiled, View, blocks, einsum, rule
from soap.tracing.torch_parts import stands_for_gpu


def next_state(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copies of the values, without gradients."""
    return tuple(value.detach().clone(memory_format=torch.contiguous_format) for value in values)


def keep_state(*values: torch.Tensor, buffers: Sequence[BufferRef]) -> torch.Tensor:
    """The values of ``buffers`` from the end of the step on. They go into the tile's context; the result has no meaning."""
    return torch.zeros((), dtype=torch.int32, device=values[0].device)


@rule("soap.next_state")
def next_values(view: View) -> Tiled:
    """Not split."""
    return Tiled((), _whole(view.shapes), _whole(view.output_shapes), run=lambda local: next_state(*local.tensors))


@rule("soap.keep_state")
def kept(view: View) -> Tiled:
    """Not split; on each device."""
    return Tiled((), _whole(view.shapes), _whole(view.output_shapes), run=_run_keep)


def _run_keep(local: Local) -> torch.Tensor:
    buffers = local.call.kwargs["buffers"]
    local.context.note_state({buffer.name: value for buffer, value in zip(buffers, local.tensors, strict=True)})
    return keep_state(*local.tensors, buffers=buffers)


def _whole(shapes: Sequence[tuple[int, ...]]) -> tuple[Maps, ...]:
    return tuple((WHOLE,) * len(shape) for shape in shapes)


class _Sums(torch.autograd.Function):
    """``batch_norm_statistics``. Autograd by itself would keep what x is widened to, beside x: the backward pass widens it again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        wide = x.double()
        sums = wide.sum(_all_but_channels(x))
        squares = wide * wide if wide is x else wide.mul_(wide)
        return torch.stack([sums, squares.sum(_all_but_channels(x))])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        shift, slope = (part.to(_wide(x.dtype)).view(_by_channel(x)) for part in (grad[0], 2 * grad[1]))
        return _product(x, slope).add_(shift).to(x.dtype)


class _Applied(torch.autograd.Function):
    """x * scale + shift by channel, in float32 or wider. As ``_Sums`` it keeps x alone, as narrow as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        return _product(x, scale.view(_by_channel(x))).add_(shift.view(_by_channel(x))).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        for_x, for_scale, for_shift = ctx.needs_input_grad
        to_scale = _product(x, grad, scale.dtype).sum(_all_but_channels(x)) if for_scale else None
        to_shift = grad.sum(_all_but_channels(x), dtype=scale.dtype) if for_shift else None
        return _product(grad, scale.view(_by_channel(x))).to(x.dtype) if for_x else None, to_scale, to_shift


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which normalization computes on such values: at least float32."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def _product(x: torch.Tensor, other: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x times ``other`` in a type, by default that of ``other``. Beside the result there is no widened copy of x."""
    dtype = dtype or other.dtype
    return x * other if x.dtype == dtype else x.to(dtype).mul_(other)


def _by_channel(x: torch.Tensor) -> tuple[int, ...]:
    return (1, -1, *(1,) * (x.dim() - 2))


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def batch_norm_statistics(x: torch.Tensor) -> torch.Tensor:
    """Sums of x and of x² over all but dimension 1, in float64 so that the variance survives the subtraction: shape (2, channels)."""
    if get_proxy_mode() is not None:  # what is traced is differentiated call by call: no results may be overwritten
        wide = x.double()
        return torch.stack([wide.sum(_all_but_channels(x)), (wide * wide).sum(_all_but_channels(x))])
    return cast(torch.Tensor, _Sums.apply(x))  # type: ignore[no-untyped-call]


def batch_norm_moments(sums: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance from ``sums`` over ``count`` elements."""
    mean = sums[0] / count
    return mean, (sums[1] / count - mean * mean).clamp_min(0.0)


def batch_norm_apply(
    x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Normalise, scale and shift each channel (dimension 1)."""
    scale = torch.rsqrt(variance + eps)
    shift = -mean * scale
    if weight is not None:
        scale, shift = scale * weight, shift * weight
    if bias is not None:
        shift = shift + bias
    dtype = _wide(x.dtype)
    if get_proxy_mode() is not None:
        return (x * scale.to(dtype).view(_by_channel(x)) + shift.to(dtype).view(_by_channel(x))).to(x.dtype)
    return cast(torch.Tensor, _Applied.apply(x, scale.to(dtype), shift.to(dtype)))  # type: ignore[no-untyped-call]


def batch_norm_local(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running: Sequence[torch.Tensor | None],
    momentum: float,
    eps: float,
) -> torch.Tensor:
    """Torch's training batch norm of these values. One value per channel is allowed, and changes no running statistics."""
    mean, variance = running if x.numel() > x.shape[1] else (None, None)
    return torch.batch_norm(x, weight, bias, mean, variance, True, momentum, eps, True)


Found = Sequence[tuple[Interval, torch.Tensor, torch.Tensor]]
"""Statistics that tiles have found for some channels: (channels, mean, unbiased variance)."""


def move_running_statistics(moves: Sequence[tuple[torch.Tensor, torch.Tensor, Found, float]]) -> None:
    """For each (running mean, running variance, found, momentum): move the running statistics in place, each channel once."""
    together: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}  # many small tensors: one call for all
    waiting: set[int] = set()

    def move_waiting() -> None:
        for momentum, (running, values) in together.items():
            torch._foreach_lerp_(running, values, momentum)
        together.clear()
        waiting.clear()

    for mean, variance, found, momentum in moves:
        if id(mean) in waiting:  # the same buffers as another call's
            move_waiting()
        if len(found) == 1 and found[0][0] == (0, mean.numel()):
            running, values = together.setdefault(momentum, ([], []))
            running += [mean, variance]
            values += [found[0][1].to(mean.dtype), found[0][2].to(variance.dtype)]
            waiting.add(id(mean))
        else:
            _move_parts(mean, variance, found, momentum)
    move_waiting()


def _move_parts(mean: torch.Tensor, variance: torch.Tensor, found: Found, momentum: float) -> None:
    moved = torch.zeros(mean.shape, dtype=torch.bool, device=mean.device)
    for (start, stop), new_mean, new_variance in found:
        span = slice(start, stop)
        for buffer, value in ((mean, new_mean), (variance, new_variance)):
            buffer[span] = torch.where(moved[span], buffer[span], buffer[span].lerp(value.to(buffer.dtype), momentum))
        moved[span] = True


@rule("soap.batch_norm_statistics")
def statistics(view: View) -> Tiled:
    """b, h, w are summed; c is the output's."""
    space = " ".join(("h", "w", "d")[: len(view.shapes[0]) - 2])
    return einsum(view, f"b c {space} -> [two] c", flops=3 * prod(view.shapes[0]))


def _run_apply(local: Local) -> torch.Tensor:
    options, operands = local.call.kwargs, iter(local.tensors)
    x, sums = next(operands), next(operands)
    weight, bias = (next(operands) if present else None for present in options["affine"])
    if local.call.operands[1] in local.context.unread:
        return _by_itself(local, x, weight, bias)
    count = options["count"]
    mean, variance = batch_norm_moments(sums, count)
    if moves_statistics(local.boxes[0]):
        local.note_statistics(local.boxes[0][1], mean.detach(), variance.detach() * (count / max(count - 1, 1)))
    return batch_norm_apply(x, mean, variance, weight, bias, options["eps"])


@rule("soap.batch_norm_apply")
def apply(view: View) -> Tiled:
    """Pointwise in x; c follows the statistics and the affine parameters."""
    shape = view.output_shapes[0]
    scope = Scope()
    maps = tuple(scope.factor(n, s) for n, s in zip(("b", "c", "h", "w", "d"), shape, strict=False))
    affine = [(maps[1],)] * (len(view.shapes) - 2)
    return Tiled(
        tuple(scope.factors), (maps, (WHOLE, maps[1]), *affine), (maps,), run=_run_apply, flops=4 * prod(shape), saved_bytes=64 * shape[1]
    )


def _run_local(local: Local) -> torch.Tensor:
    operands = iter(local.tensors)
    x = next(operands)
    weight, bias = (next(operands) if present else None for present in local.call.kwargs["affine"])
    return _by_itself(local, x, weight, bias)


def _by_itself(local: Local, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """Batch norm of a tile by its own statistics, by torch's kernel."""
    options, box = local.call.kwargs, local.boxes[0]
    if not moves_statistics(box) or options["buffers"][0] is None or x.numel() <= x.shape[1]:
        return batch_norm_local(x, weight, bias, (None, None), 0.0, options["eps"])
    kind = local.context.buffers[options["buffers"][0].name].dtype  # beside a narrower type, the kernel's way of computing depends on it
    found = torch.zeros(2, x.shape[1], dtype=kind, device=x.device).unbind()  # with a momentum of 1 they become the tile's own
    out = batch_norm_local(x, weight, bias, found, 1.0, options["eps"])
    local.note_statistics(box[1], *found)
    return out


def moves_statistics(box: Sequence[Interval]) -> bool:
    """Whether a region of batch norm's input updates its channels' running statistics: the first region along all other dimensions, which
    has samples in every batch; rank 0's are those that DistributedDataParallel keeps."""
    for dim, (start, _) in enumerate(box):  # noqa: SIM110 - in every step
        if start and dim != 1:
            return False
    return True


@rule("soap.batch_norm_local")
def local_batch_norm(view: View) -> Tiled:
    """Every dimension may be split; a tile knows nothing of the others."""
    scope, maps = _channelwise(view)
    affine = [(maps[1],)] * (len(view.shapes) - 1)
    saved_bytes = 8 * view.output_shapes[0][1]
    return Tiled(tuple(scope.factors), (maps, *affine), (maps,), run=_run_local, flops=7 * prod(view.shapes[0]), saved_bytes=saved_bytes)


def _channelwise(view: View) -> tuple[Scope, Maps]:
    shape = view.output_shapes[0]
    scope = Scope()
    return scope, tuple(scope.factor(n, s) for n, s in zip(("b", "c", "h", "w", "d"), shape, strict=False))


@rule("aten.batch_norm")
def batch_norm_inference(view: View) -> Tiled:
    """Batch norm with fixed statistics (the training form never reaches the rules)."""
    scope, maps = _channelwise(view)
    rest = [(maps[1],)] * (len(view.shapes) - 1)
    return Tiled(tuple(scope.factors), (maps, *rest), (maps,), flops=4 * prod(view.shapes[0]))


@rule("aten.instance_norm")
def instance_norm(view: View) -> Tiled:
    """Every channel of every sample by itself."""
    shape = view.shapes[0]
    scope = Scope()
    maps = (scope.factor("b", shape[0]), scope.factor("c", shape[1]), *(WHOLE,) * (len(shape) - 2))
    rest = [(maps[1],)] * (len(view.shapes) - 1)
    return Tiled(tuple(scope.factors), (maps, *rest), (maps,), flops=8 * prod(shape), saved_bytes=2 * view.itemsize * prod(shape))


class _RmsNorm(torch.autograd.Function):
    """The memory that CUDA's one kernel for it takes: it keeps a number for each row beside its operands."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, normalized: int) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[: x.dim() - normalized], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def _run_norm(local: Local) -> Any:
    one_kernel = local.call.kind == "rms_norm" and len({tensor.dtype for tensor in local.tensors}) == 1
    if one_kernel and stands_for_gpu():
        rows = len(local.get("normalized_shape"))
        return _RmsNorm.apply(local.tensors[0], (*local.tensors[1:], None)[0], rows)  # type: ignore[no-untyped-call]
    return local.plain()


@rule("aten.layer_norm", "aten.rms_norm", "aten.native_layer_norm")
def layer_norm(view: View) -> Tiled:
    """The normalised dimensions are needed whole; all others are free. The name in core ATen also gives mean and deviation. On a GPU it is
    one kernel."""
    shape = view.shapes[0]
    normalized = len(view.get("normalized_shape"))
    scope = Scope()
    maps = (*scope.like(shape[: len(shape) - normalized], "b"), *(WHOLE,) * normalized)
    rest = tuple((WHOLE,) * len(s) for s in view.shapes[1:])
    outputs, saved = (maps,) * len(view.output_shapes), 2 * view.itemsize * prod(shape)
    return Tiled(
        tuple(scope.factors), (maps, *rest), outputs, run=_run_norm, flops=8 * prod(shape), saved_bytes=saved, fused_bytes=saved,
        lean=view.call.kind == "rms_norm",
    )  # fmt: skip


def _groups(call: View | Local) -> int:
    return int(call.get("group" if call.call.kind == "native_group_norm" else "num_groups"))


def _run_group_norm(local: Local) -> Any:
    samples, channels = local.tensors[0].shape[:2]
    groups = channels * _groups(local) // local.shapes[0][1]
    if local.call.kind == "group_norm":
        return local.plain(num_groups=groups)
    return local.plain(N=samples, C=channels, group=groups)


@rule("aten.group_norm", "aten.native_group_norm")
def group_norm(view: View) -> Tiled:
    """Whole groups of channels; space is needed whole. The name in core ATen also gives means and deviations by group."""
    shape, groups = view.shapes[0], _groups(view)
    scope = Scope()
    b, g = scope.factor("b", shape[0]), scope.factor("g", groups)
    span = shape[1] // groups
    channels = blocks(g, span)
    maps = (b, channels, *(WHOLE,) * (len(shape) - 2))
    return Tiled(
        tuple(scope.factors),
        (maps, *([(channels,)] * (len(view.shapes) - 1))),
        (maps, *([(b, g)] * (len(view.output_shapes) - 1))),
        run=_run_group_norm,
        flops=8 * prod(shape),
        saved_bytes=2 * view.itemsize * prod(shape),
    )


@rule("aten._weight_norm")
def weight_norm(view: View) -> Tiled:
    """Directions of unit length times lengths: one dimension is free."""
    shape = view.shapes[0]
    dim = view.get("dim") % len(shape)
    scope = Scope()
    maps = tuple(scope.factor("n", size) if i == dim else WHOLE for i, size in enumerate(shape))
    lengths = tuple(maps[dim] if i == dim else WHOLE for i in range(len(view.shapes[1])))
    return Tiled(tuple(scope.factors), (maps, lengths), (maps,), flops=4 * prod(shape), saved_bytes=2 * view.itemsize * prod(shape))


@rule("aten.renorm")
def renorm(view: View) -> Tiled:
    """Slices along one dimension are shortened if they are too long."""
    shape = view.shapes[0]
    dim = view.get("dim") % len(shape)
    scope = Scope()
    maps = tuple(scope.factor("n", size) if i == dim else WHOLE for i, size in enumerate(shape))
    return Tiled(tuple(scope.factors), (maps,), (maps,), flops=4 * prod(shape), saved_bytes=4 * view.itemsize * prod(shape))
