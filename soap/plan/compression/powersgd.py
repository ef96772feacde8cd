"""Messages of PowerSGD: two thin matrices, summed one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Self

from soap.plan.compression.seam import Exchange, Layout
from soap.strategy.compression import PowerSgd


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


LAYOUT = LowRankLayout
