"""Several tensors as one piece of memory: what is sent together, and where it is received, without copies where it lies so already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from soap.tracing.calls import as_real


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements, one tensor after the other; a single contiguous tensor is not copied."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    return flat[0].contiguous() if len(flat) == 1 else torch.cat(flat)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a type that backends know. Numbers that are only marked as conjugated or negated are written out first."""
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    return as_real(tensor) if tensor.is_complex() else tensor.resolve_neg()


def are_adjacent(places: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors, one after the other, are one piece of memory."""
    if len({place.untyped_storage().data_ptr() for place in places}) != 1 or not all(place.is_contiguous() for place in places):
        return False
    return all(place.data_ptr() + place.nbytes == other.data_ptr() for place, other in pairwise(places))


def land(places: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """Where to receive what ``pack`` has made of such tensors: flat memory, and what brings it from there to its places.

    If the places themselves lie one after the other, they are that memory.
    """
    if are_adjacent(places):
        return places[0].as_strided((sum(place.numel() for place in places),), (1,)), None
    buffer = places[0].new_empty(sum(place.numel() for place in places))

    def copy() -> None:
        for place, part in zip(places, torch.split(buffer, [place.numel() for place in places]), strict=True):
            place.copy_(part.view(place.shape))

    return buffer, copy
