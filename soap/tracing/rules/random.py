"""Random numbers as a function of the element's global position, so that every tiling draws the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from soap.model.graph import DimMap, drawn_blocks
from soap.model.regions import Box, lengths
from soap.tracing.calls import Ref, argument, substitute
from soap.tracing.rules.notation import Local, Maps, Scope, Tiled, View, pointwise, rule

NOTHING = DimMap(None, 0, 0, 0)
"""Marks a dimension of which no element is read."""


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Within this context torch's generators start from ``seed``; afterwards they go on as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in box)


def uniform(seed: int, shape: Sequence[int], box: Box) -> torch.Tensor:
    """The region ``box`` of numbers from 0 to 1 over ``shape``, the same whatever region is asked for."""
    return torch.rand(tuple(shape), generator=torch.Generator().manual_seed(seed))[_region(box)]


def keep_mask(local: Local, shape: Sequence[int], box: Box, probability: float, device: torch.device) -> torch.Tensor:
    """The region ``box`` of a mask over ``shape``, true where dropout keeps the element: the same whatever region is asked for.

    It is drawn in blocks (``drawn_blocks``).
    """
    if not shape:
        return keep_mask(local, (1,), ((0, 1),), probability, device).reshape(())
    mask = torch.empty(lengths(box), dtype=torch.bool, device=device)
    if mask.numel() == 0:
        return mask
    seed, generator = local.random_seed, torch.Generator(device)
    for number, (start, stop) in enumerate(drawn_blocks(shape[0])):
        first, last = max(start, box[0][0]), min(stop, box[0][1])
        if first >= last:
            continue
        generator.manual_seed((seed + number * 0x9E3779B97F4A7C15) % 2**63)
        part = mask[first - box[0][0] : last - box[0][0]]
        if part.shape == (stop - start, *shape[1:]):
            part.bernoulli_(1.0 - probability, generator=generator)
        else:
            block = mask.new_empty((stop - start, *shape[1:])).bernoulli_(1.0 - probability, generator=generator)
            part.copy_(block[(slice(first - start, last - start), *_region(box[1:]))])
    return mask


class _Dropped(torch.autograd.Function):
    """x where ``keep`` is true, times ``scale``; else 0. It keeps the mask alone: a byte an element, whatever the type of x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return _kept(x, keep, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return _kept(grad, keep, ctx.scale), None, None


def _kept(x: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
    """x times a mask times ``scale``."""
    if x.device.type != "cpu":
        return (x * keep).mul_(scale)
    # On a CPU that would make a copy of the mask in x's type, and from bool that takes five times as long as from uint8.
    factors = keep.view(torch.uint8).to(x.dtype).mul_(scale)
    return factors.mul_(x) if factors.shape == x.shape else factors * x


def dropped(x: torch.Tensor, keep: torch.Tensor, probability: float) -> torch.Tensor:
    """Dropout of x with a mask: what stays is as much larger as is dropped on average."""
    return cast(torch.Tensor, _Dropped.apply(x, keep, 1.0 if probability >= 1.0 else 1.0 / (1.0 - probability)))  # type: ignore[no-untyped-call]


def _mask_region(local: Local) -> tuple[tuple[int, ...], Box]:
    """(shape of the whole mask, this tile's region of it): whole channels at a time for feature dropout."""
    shape, box = local.output_shapes[0], local.output_boxes[0]
    if local.call.kind.startswith("feature_"):
        shape, box = (*shape[:2], *(1,) * (len(shape) - 2)), (*box[:2], *((0, 1),) * (len(box) - 2))
    return shape, box


def run_dropout(local: Local) -> torch.Tensor:
    """Dropout of a region."""
    x, probability = local.tensors[0], float(local.get("p"))
    if probability == 0.0 or not local.get("train"):
        return x
    return dropped(x, keep_mask(local, *_mask_region(local), probability, x.device), probability)


def masked(view: View) -> int:
    """Elements of the mask that a call draws for its output: none outside of training."""
    if not view.get("train") or not view.get("p"):
        return 0
    shape = view.output_shapes[0]
    return prod(shape[:2] if view.call.kind.startswith("feature_") else shape)


@rule("aten.dropout", "aten.feature_dropout")
def dropout(view: View) -> Tiled:
    """Pointwise, with a mask drawn for it."""
    # An upper bound: the mask is kept for the backward pass.
    saved, drawn = prod(view.output_shapes[0]) * view.itemsize, masked(view)
    return pointwise(view, run=run_dropout, saved_bytes=saved, fused_bytes=0 if drawn else saved, drawn=drawn)


def _run_native_dropout(local: Local) -> tuple[torch.Tensor, torch.Tensor]:
    x, probability = local.tensors[0], float(local.get("p"))
    if probability == 0.0 or not local.get("train"):
        return x, torch.ones_like(x, dtype=torch.bool)
    mask = keep_mask(local, *_mask_region(local), probability, x.device)
    return dropped(x, mask, probability), mask


@rule("aten.native_dropout")
def native_dropout(view: View) -> Tiled:
    """Dropout; the name in core ATen also gives the mask."""
    saved_bytes = 2 * prod(view.output_shapes[0]) * view.itemsize
    return pointwise(view, run=_run_native_dropout, saved_bytes=saved_bytes, drawn=masked(view))


_SELU_FLOOR = -1.7580993408473766
"""The value to which alpha dropout sets elements: the limit of SELU for small numbers (Klambauer et al. 2017, section 3)."""


def _run_alpha_dropout(local: Local) -> torch.Tensor:
    x, p = local.tensors[0], float(local.get("p"))
    if p == 0.0 or not local.get("train"):
        return x
    if p == 1.0:
        return x * 0
    keep = keep_mask(local, *_mask_region(local), p, x.device)
    scale = ((1 - p) * (1 + p * _SELU_FLOOR**2)) ** -0.5
    dropped = torch.full((), scale * _SELU_FLOOR * (1 - p), dtype=x.dtype, device=x.device)
    return torch.where(keep, scale * x - scale * _SELU_FLOOR * p, dropped)


@rule("aten.alpha_dropout", "aten.feature_alpha_dropout")
def alpha_dropout(view: View) -> Tiled:
    """Dropout that keeps mean and variance of SELU's results."""
    saved_bytes = prod(view.output_shapes[0]) * (view.itemsize + 1)
    return pointwise(view, run=_run_alpha_dropout, saved_bytes=saved_bytes, drawn=masked(view))


def _run_bernoulli(local: Local) -> torch.Tensor:
    chance = local.tensors[-1]
    drawn = uniform(local.random_seed, local.output_shapes[0], local.output_boxes[0]).to(chance.device)
    return (drawn < chance).to(local.tensors[0].dtype)


@rule("aten.bernoulli.default", "aten.bernoulli.Tensor")
def bernoulli(view: View) -> Tiled:
    """Ones and zeros, each with a probability of its own."""
    return pointwise(view, run=_run_bernoulli, drawn=prod(view.output_shapes[0]), drawn_at_once=True)


def _run_rrelu(local: Local) -> torch.Tensor:
    x, low, high = local.tensors[0], float(local.get("lower")), float(local.get("upper"))
    if not local.get("training"):
        return torch.where(x >= 0, x, x * ((low + high) / 2))
    drawn = uniform(local.random_seed, local.output_shapes[0], local.output_boxes[0]).to(x.device, x.dtype)
    return torch.where(x >= 0, x, x * (low + (high - low) * drawn))


@rule("aten.rrelu")
def rrelu(view: View) -> Tiled:
    """Pointwise, with a slope drawn for each element."""
    count = prod(view.output_shapes[0])
    drawn = {"drawn": count, "drawn_at_once": True} if view.get("training") else {}
    return pointwise(view, run=_run_rrelu, saved_bytes=3 * count * view.itemsize, **drawn)


def run_drawn(local: Local) -> torch.Tensor:
    """The local region of what the call draws for whole tensors; floating-point numbers in float32, rounded, for all types alike."""
    like = local.tensors[0] if local.tensors else torch.empty(0)
    named = argument(local.call, "dtype")  # by its number, if it is the schema's default
    shapes = iter(local.shapes)

    def drawn_as(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return torch.zeros(next(shapes), dtype=_drawn_type(like.dtype))
        return _drawn_type(leaf) if isinstance(leaf, torch.dtype) else leaf

    with seeded(local.random_seed, torch.device("cpu")):
        drawn: torch.Tensor = local.call.target(*substitute(local.call.args, drawn_as), **substitute(dict(local.call.kwargs), drawn_as))
    region = drawn[_region(local.output_boxes[0])]
    wanted = named if isinstance(named, torch.dtype) else like.dtype if local.tensors else region.dtype
    if wanted != region.dtype:
        region = region.to(wanted)
        if local.call.kind in ("rand", "rand_like"):  # rounding might make it 1
            region = region.clamp_max(1 - torch.finfo(wanted).eps / 2)
    return region.to(like.device)


def _drawn_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else dtype


@rule(
    "aten.rand", "aten.randn", "aten.rand_like", "aten.randn_like", "aten.randint", "aten.randint_like", "aten.bernoulli.p", "aten.uniform",
    "aten.exponential", "aten.normal_functional", "aten.normal.float_float", "aten.randperm",
)  # fmt: skip
def drawn(view: View) -> Tiled:
    """Numbers that depend on no operand's values, only on its shape: nothing of it is read."""
    scope = Scope()
    out = scope.like(view.output_shapes[0])
    nothing: list[Maps] = [(NOTHING,) * len(shape) for shape in view.shapes]
    count = prod(view.output_shapes[0])
    return Tiled(tuple(scope.factors), tuple(nothing), (out,), light=True, run=run_drawn, drawn=count, drawn_at_once=True)
