"""Messages of PowerSGD: two thin matrices, summed one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Self

from soap.plan.compression.seam import Effort, Exchange, Layout, Work
from soap.strategy.compression import Compression, PowerSgd


@dataclass(frozen=True, slots=True)
class LowRankLayout(Layout):
    """The parameter as a matrix of ``rows`` (its first dimension) and ``columns`` (all others), and its approximation's rank."""

    rank: int

    @classmethod
    def of(cls, compression: PowerSgd, shape: tuple[int, ...], value_bytes: int, peers: int) -> Self:
        """The rank is at most the matrix's."""
        bare = cls(shape, value_bytes, peers, 0)
        return cls(shape, value_bytes, peers, min(compression.rank, bare.rows, bare.columns))

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return self.shape[0] if self.shape else 1

    @property
    def columns(self) -> int:
        """Columns of the matrix."""
        return prod(self.shape[1:])

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Two sums: of the left and of the right matrix."""
        return tuple(Exchange("sum", length * self.rank * self.value_bytes) for length in (self.rows, self.columns))

    def effort(self, compression: Compression, work: Work, *, on_host: bool) -> Effort:
        """Each product with a thin matrix reads the whole one. ``combine`` also makes the left matrix's columns orthogonal, one by one, and
        takes what is sent from the residual."""
        whole, thin = self.whole_bytes, (self.rows + self.columns) * self.rank * self.value_bytes
        if work == "select":
            return Effort(5 * whole + thin, 0, 4)
        if work == "combine":
            return Effort(6 * whole + (4 + 4 * self.rank) * thin, 0, 6 + 12 * self.rank)
        return Effort(whole + thin, 0, 6)

    def room_bytes(self, compression: Compression, *, on_host: bool) -> int:
        """What both matrices make, before it is taken from the residual; copies of thin matrices."""
        return self.whole_bytes + 6 * (self.rows + self.columns) * self.rank * self.value_bytes

    def state_bytes(self, compression: Compression) -> int:
        """With the right matrix."""
        return len(compression.summed_state) * self.whole_bytes + self.columns * self.rank * self.value_bytes


LAYOUT = LowRankLayout
