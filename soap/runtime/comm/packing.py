"""Several tensors as one piece of memory, without copies if they are adjacent already; and regions of tensors, cut out and put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch

from soap.model.regions import Box, lengths, relative
from soap.tracing.calls import as_real

_UNKNOWN = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
"""Types that gloo cannot carry."""


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements, one tensor after the other. Each is copied once; a single contiguous tensor is not copied."""
    own = [tensor.detach() for tensor in tensors]
    if len(own) == 1:
        return own[0].reshape(-1).contiguous()
    if all(tensor.is_contiguous() for tensor in own):
        return torch.cat([tensor.view(-1) for tensor in own])
    packed = own[0].new_empty(sum(tensor.numel() for tensor in own))
    for place, tensor in zip(torch.split(packed, [tensor.numel() for tensor in own]), own, strict=True):
        place.view(tensor.shape).copy_(tensor)
    return packed


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor viewed as a dtype that backends know. Lazy conjugation and negation are resolved first."""
    if tensor.dtype is torch.bool or (tensor.is_floating_point() and tensor.dtype.itemsize == 1):
        return tensor.view(torch.uint8)
    return as_real(tensor) if tensor.is_complex() else tensor.resolve_neg()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor, to be copied alone, viewed as a dtype that backends know: whole numbers that they do not know as bytes."""
    return tensor.view(-1).view(torch.uint8) if tensor.dtype in _UNKNOWN else plain(tensor)


def are_adjacent(places: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors, in this order, form one contiguous piece of memory."""
    if len({place.untyped_storage().data_ptr() for place in places}) != 1 or not all(place.is_contiguous() for place in places):
        return False
    return all(place.data_ptr() + place.nbytes == other.data_ptr() for place, other in pairwise(places))


def adjacent(like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Room for tensors of these shapes and one dtype, one behind the other: what comes for all of them lands there without a copy."""
    if not like:
        return []
    flat = like[0].detach().new_empty(sum(own.numel() for own in like))
    parts = torch.split(flat, [own.numel() for own in like])
    return [part.view(own.shape) for part, own in zip(parts, like, strict=True)]


def land(places: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """(flat memory that receives what ``pack`` made of such tensors, function that then copies it to its places).

    If the places are adjacent, they are that memory themselves, and the function is None.
    """
    if are_adjacent(places):
        return places[0].as_strided((sum(place.numel() for place in places),), (1,)), None
    buffer = places[0].new_empty(sum(place.numel() for place in places))

    def copy() -> None:
        for place, part in zip(places, torch.split(buffer, [place.numel() for place in places]), strict=True):
            place.copy_(part.view(place.shape))

    return buffer, copy


class _Assemble(torch.autograd.Function):
    """Assemble disjoint pieces that cover a box into one tensor; the gradient is cut into the same pieces."""

    @staticmethod
    def forward(ctx: Any, box: Box, boxes: Sequence[Box], *pieces: torch.Tensor) -> torch.Tensor:
        ctx.box, ctx.boxes = box, boxes
        whole = pieces[0].new_empty(lengths(box))
        for own, piece in zip(boxes, pieces, strict=True):
            whole[relative(own, box)] = piece
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        parts = [gradients[0][relative(own, ctx.box)] if need else None for own, need in zip(ctx.boxes, needed, strict=True)]
        return (None, None, *parts)


def assemble(box: Box, boxes: Sequence[Box], pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor for ``box`` from pieces with the boxes ``boxes``; differentiable. A single piece that is the box is returned as it is."""
    if len(boxes) == 1 and boxes[0] == box:
        return pieces[0]
    return cast(torch.Tensor, _Assemble.apply(box, tuple(boxes), *pieces))  # type: ignore[no-untyped-call]


def cut(tensor: torch.Tensor, held: Box, box: Box) -> torch.Tensor:
    """The part ``box`` of a tensor that holds ``held``: a view, or the tensor itself."""
    return tensor if box == held else tensor[relative(box, held)]
