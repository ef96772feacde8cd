"""How results lie in memory, so that an operator that is equal to one that was run needs no run: its results are made like them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Layout:
    """One result. ``memory``: number of the operand whose memory it has; below 0: a piece of the results' own, of so many ``bytes``."""

    memory: int
    bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def layouts_of(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> tuple[Layout, ...] | None:
    """The layouts of results beside the operands; None if ``like`` could not make the same."""
    memories = {tensor.untyped_storage()._cdata: (place, tensor.dtype) for place, tensor in reversed(list(enumerate(operands)))}
    found = []
    for result in results:
        storage = result.untyped_storage()
        memory, dtype = memories.setdefault(storage._cdata, (-1 - len(memories), result.dtype))
        if result.is_conj() or result.is_neg() or dtype != result.dtype or storage.nbytes() % result.itemsize:
            return None
        found.append(Layout(memory, storage.nbytes(), result.dtype, tuple(result.shape), result.stride(), int(result.storage_offset())))
    return tuple(found)


def like(layouts: Sequence[Layout], operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Tensors with these layouts, beside operands that lie as those did."""
    memories = dict(enumerate(operands))
    for own in layouts:
        if own.memory not in memories:
            memories[own.memory] = torch.empty(own.bytes // own.dtype.itemsize, dtype=own.dtype)
    return tuple([memories[own.memory].as_strided(own.shape, own.strides, own.offset) for own in layouts])
