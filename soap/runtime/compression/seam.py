"""The seam between whoever synchronizes gradients and the methods of compressing them.

A rank has one ``Compressor`` and one ``State`` for each compressed parameter. In a step, after the last micro-batch:

    message = compressor.compress(state, gradient)            selection, on the device
    received = <exchange 0 of compressor.layout.exchanges>    on the wire
    message = compressor.answer(state, received)              only if there is a second exchange
    received = <exchange 1>
    total = compressor.total(state, received)                 decompression; the same bits on all ranks

What an exchange gives: ``all_gather`` all ranks' messages as rows, in the order of the ranks; ``all_to_all`` takes a row for each rank and
gives a row from each; ``sum`` takes and gives numbers; ``ragged`` takes messages of any sizes, which ``all_gather`` has told all ranks just
before (``sizes_of``), and gives them one behind the other. Local gradients carry their share of the batch, so they are summed, not
averaged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Generic, TypeVar

import torch

from soap.errors import RuntimeFailure
from soap.plan.compression.seam import Layout, layout_of
from soap.strategy.compression import Compression


def on_host(tensor: torch.Tensor) -> bool:
    """Whether Python may look at values. Of a GPU it would have to wait for all that is queued; within a step nobody does."""
    return tensor.device.type == "cpu"


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """Rows of numbers as rows of bytes. (Torch has no views of other types of what is empty.)"""
    if rows.numel() == 0:
        return torch.zeros(rows.shape[0], rows.shape[1] * rows.element_size(), dtype=torch.uint8, device=rows.device)
    return rows.contiguous().view(torch.uint8)


def from_bytes(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of bytes, perhaps cut out of longer ones, as the numbers that they are."""
    if rows.numel() == 0:
        return torch.zeros(rows.shape[0], rows.shape[1] // dtype.itemsize, dtype=dtype, device=rows.device)
    aligned = rows.storage_offset() % dtype.itemsize == 0 and rows.stride(0) % dtype.itemsize == 0 and rows.stride(1) == 1
    return (rows if aligned else rows.clone(memory_format=torch.contiguous_format)).view(dtype)


Settings = TypeVar("Settings", bound=Compression)
Sizes = TypeVar("Sizes", bound=Layout)


@dataclass
class State:
    """What one rank keeps of one parameter from step to step, for checkpoints.

    ``summed``: flat tensors of the parameter's size, this rank's own (``Compression.summed_state``). ``common``: tensors that are equal on
    all ranks. ``own``, ``numbers``: what means nothing to another number of ranks, as a reused threshold
    and its age; numbers that are equal on all ranks (the sign whose turn it is) go on. ``step``: what the exchanges of a step hand on to
    each other and to ``Compressor.sent``; it need not be saved.
    """

    summed: dict[str, torch.Tensor] = field(default_factory=dict)
    common: dict[str, torch.Tensor] = field(default_factory=dict)
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    step: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def residual(self) -> torch.Tensor:
        """What has not been sent yet."""
        return self.summed["residual"]


@dataclass(frozen=True)
class Selected:
    """Elements that travel: ``positions`` and ``values``, of which the first ``count`` (on the device; None: all); the rest is padding."""

    positions: torch.Tensor
    values: torch.Tensor
    count: torch.Tensor | None = None

    def clear(self, kept: torch.Tensor) -> None:
        """Set these elements of a flat tensor to zero: exactly, as x - x is. Padding changes nothing."""
        own = kept[self.positions]
        kept.index_add_(0, self.positions, -(own if self.count is None else torch.where(self.real, own, 0)))

    @property
    def real(self) -> torch.Tensor:
        """Which elements are no padding."""
        places = torch.arange(len(self.positions), device=self.positions.device)
        return places < (len(self.positions) if self.count is None else self.count)


class Compressor(ABC, Generic[Settings, Sizes]):
    """A method's arithmetic for one parameter on one rank. It has no state; ``State`` has."""

    def __init__(self, compression: Settings, layout: Sizes, dtype: torch.dtype, rank: int) -> None:
        self.compression, self.layout, self.rank = compression, layout, rank
        self.dtype, self.kept_dtype = dtype, kept_dtype(dtype)

    def fresh(self, device: torch.device | str = "cpu") -> State:
        """The state before the first step."""
        size = self.layout.elements
        return State({name: torch.zeros(size, dtype=self.kept_dtype, device=device) for name in self.compression.summed_state})

    def compress(self, state: State, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's message for the first exchange, whose size the layout gives. The gradient is left as it is.

        RuntimeFailure in one line, with the state untouched, if the gradient has another shape or type, or an element that is not finite.
        """
        return self.message(state, self.checked(gradient))

    @abstractmethod
    def message(self, state: State, gradient: torch.Tensor) -> torch.Tensor:
        """``compress`` for a gradient that is flat, finite, and in the type that is kept. It must not be changed."""

    def answer(self, state: State, received: torch.Tensor) -> torch.Tensor:
        """This rank's message for the second exchange."""
        raise NotImplementedError(f"{self.compression.name} has one exchange")

    @abstractmethod
    def total(self, state: State, received: torch.Tensor) -> torch.Tensor:
        """The sum of what all ranks sent, in the gradient's shape and type."""

    def sent(self, state: State) -> Selected | None:
        """Which elements the last message carried, for factor masking; None if the method sends a bit of each."""
        return None

    def real_bytes(self, message: torch.Tensor) -> int:
        """What of an all-gathered message is no padding."""
        return self.layout.real_bytes(0)

    def checked(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient as ``message`` takes it: flat, finite, and in the type that is kept. RuntimeFailure as for ``compress``."""
        if tuple(gradient.shape) != self.layout.shape or gradient.dtype != self.dtype:
            raise RuntimeFailure(
                f"a gradient of shape {tuple(gradient.shape)} and {gradient.dtype} for a compressor of {self.layout.shape} and "
                f"{self.dtype}; expected the parameter's own"
            )
        flat = gradient.detach().reshape(-1)
        if on_host(flat):  # a GPU is not asked: what is not finite reaches all ranks' sums, and the loss
            require_finite(flat)
        return flat.to(self.kept_dtype)

    def shaped(self, total: torch.Tensor) -> torch.Tensor:
        """A sum in the gradient's shape and type."""
        return total.to(self.dtype).reshape(self.layout.shape)


def sizes_of(told: torch.Tensor) -> list[int]:
    """The sizes in bytes of all ranks' messages, as an all-gather has brought them: a row of eight bytes from each."""
    found: list[int] = told.contiguous().view(torch.int64).flatten().tolist()
    return found


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of residuals and sums, at least float32. RuntimeFailure if gradients of this type cannot be compressed."""
    if dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise RuntimeFailure(f"a gradient of {dtype} cannot be compressed; expected float32, float64, float16 or bfloat16: leave it dense")
    return torch.promote_types(dtype, torch.float32)


def require_finite(flat: torch.Tensor) -> None:
    """RuntimeFailure in one line if an element is not a finite number. A sum tells it in one pass, unless it overflows."""
    if not torch.isfinite(flat.sum(dtype=kept_dtype(flat.dtype))) and len(bad := flat[~torch.isfinite(flat)]):
        raise RuntimeFailure(not_finite(float(bad[0])))


def compressor_of(
    compression: Compression, shape: Sequence[int], dtype: torch.dtype, rank: int, peers: int
) -> Compressor[Compression, Layout]:
    """The compressor of one parameter on one of so many ranks: ``COMPRESSOR`` of the method's module."""
    layout = layout_of(compression, shape, dtype.itemsize, peers)
    kind = import_module(f"soap.runtime.compression.{compression.module}").COMPRESSOR
    made: Compressor[Compression, Layout] = kind(compression, layout, dtype, rank)
    return made


def not_finite(value: float) -> str:
    """The line about a gradient that cannot be compressed."""
    return f"a gradient to be compressed has an element that is {value}; expected finite numbers: lower the learning rate, or clip"
