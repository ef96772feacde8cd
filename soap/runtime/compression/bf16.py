"""Gradients in bfloat16, summed in float32: what PyTorch's hook for bfloat16 does, but for the order and precision of its sums."""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, TypeVar

import torch

from soap.plan.compression.bf16 import PartsLayout
from soap.runtime.compression import seam
from soap.runtime.compression.seam import Compressor, State
from soap.strategy.compression import Bf16, Compression

Settings = TypeVar("Settings", bound=Compression)
Sizes = TypeVar("Sizes", bound=PartsLayout)


class NarrowParts(Compressor[Settings, Sizes], Generic[Settings, Sizes]):
    """Methods that send every element in fewer bits: each rank gets its part of all gradients in the narrow format, sums it at full
    precision in the order of the ranks, and sends the sum to all, narrow again.

    Methods that keep a residual add to it what both roundings take; the second one's is kept by the part's owner."""

    def message(self, state: State, gradient: torch.Tensor) -> torch.Tensor:
        """A narrow part for each rank, as rows."""
        residual = state.summed.get("residual")
        if residual is not None:
            gradient = residual.add_(gradient)
        layout = self.layout
        padded = torch.nn.functional.pad(gradient, (0, layout.peers * layout.part - layout.elements)).view(layout.peers, layout.part)
        rows = self.narrow(padded)
        if residual is not None:
            residual.sub_(self.wide(rows).view(-1)[: layout.elements])
        return rows

    def answer(self, state: State, received: torch.Tensor) -> torch.Tensor:
        """The sum of this rank's part."""
        total = torch.zeros(self.layout.part, dtype=self.kept_dtype, device=received.device)
        for row in self.wide(received):
            total += row
        message = self.narrow(total[None])
        residual = state.summed.get("residual")
        if residual is not None:
            begin = self.rank * self.layout.part
            own = residual[begin : begin + self.layout.part]
            own.add_((total - self.wide(message)[0])[: len(own)])
        return message[0]

    def total(self, state: State, received: torch.Tensor) -> torch.Tensor:
        """The parts' sums, one behind the other."""
        return self.shaped(self.wide(received).reshape(-1)[: self.layout.elements])

    @abstractmethod
    def narrow(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of ``part`` numbers as rows of ``part_bytes`` bytes."""

    @abstractmethod
    def wide(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of bytes as the numbers that they mean."""


class Rounded(NarrowParts[Bf16, PartsLayout]):
    """See the module. Sent is the gradient rounded to bfloat16, and the total is the rounded sum of these; nothing is kept."""

    def narrow(self, rows: torch.Tensor) -> torch.Tensor:
        """Rounded to the nearest, ties to even."""
        return seam.as_bytes(rows.to(torch.bfloat16))

    def wide(self, rows: torch.Tensor) -> torch.Tensor:
        """The same numbers."""
        return seam.from_bytes(rows, torch.bfloat16).to(self.kept_dtype)


COMPRESSOR = Rounded
