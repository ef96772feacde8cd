"""Messages of RGC: one buffer [length, positions, values], padded to as many elements as a selection can have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from soap.errors import StrategyError
from soap.plan.compression.seam import Exchange, Layout, kept_count, rounded_up
from soap.strategy.compression import Rgc, RgcAsq, Selection

LENGTH_BYTES = 8
MOST_SHORT = 2**31
"""Up to so many elements positions take four bytes, else eight."""
EXACT: tuple[Selection, ...] = ("exact", "trimmed")
"""Selections of k elements; the others select up to 2 k."""


@dataclass(frozen=True, slots=True)
class SparseLayout(Layout):
    """A message of up to ``capacity`` elements, usually ``kept``. A ragged all-gather sends it with a capacity of just its length."""

    kept: int
    capacity: int

    @classmethod
    def of(cls, compression: Rgc | RgcAsq, shape: tuple[int, ...], value_bytes: int, peers: int) -> Self:
        """StrategyError if the selection is left to the policy, which knows the layer."""
        bare = cls(shape, value_bytes, peers, 0, 0)
        kept = kept_count(bare.elements, compression.density)
        return cls(shape, value_bytes, peers, kept, capacity_of(compression.selection, kept, bare.elements))

    @property
    def header_bytes(self) -> int:
        """The length alone."""
        return LENGTH_BYTES

    @property
    def index_bytes(self) -> int:
        """Bytes of a position."""
        return 4 if self.elements <= MOST_SHORT else 8

    @property
    def sent_value_bytes(self) -> int:
        """Bytes of a value as it travels."""
        return self.value_bytes

    @property
    def values_at(self) -> int:
        """Where values begin: behind the positions, at a multiple of their own size."""
        return rounded_up(self.header_bytes + self.capacity * self.index_bytes, self.value_bytes)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """One all-gather, of a multiple of eight bytes: messages lie behind each other."""
        return (Exchange("all_gather", rounded_up(self.values_at + self.capacity * self.sent_value_bytes, LENGTH_BYTES)),)

    def real_bytes(self, count: int) -> int:
        """Header, positions and values of so many elements."""
        return self.header_bytes + count * (self.index_bytes + self.sent_value_bytes)


def capacity_of(selection: Selection, kept: int, elements: int) -> int:
    """The most elements that a selection gives for k = ``kept``. StrategyError for ``policy``."""
    if selection == "policy":
        raise StrategyError("selection 'policy' has no size yet: soap.plan.compression.policy chooses one for each layer")
    return kept if selection in EXACT else min(2 * kept, elements)


LAYOUT = SparseLayout
