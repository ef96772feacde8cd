"""Messages in bfloat16: each peer gets its part of everyone's gradient, sums it, and gives the sum to all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from soap.plan.compression.seam import Effort, Exchange, Layout, Work
from soap.strategy.compression import Compression

NARROW_BYTES = 2


@dataclass(frozen=True, slots=True)
class PartsLayout(Layout):
    """Every peer owns ``part`` elements; the last ones are padded with zeros."""

    @classmethod
    def of(cls, compression: Compression, shape: tuple[int, ...], value_bytes: int, peers: int) -> Self:
        """There are no settings."""
        return cls(shape, value_bytes, peers)

    @property
    def part(self) -> int:
        """Elements that each peer owns."""
        return -(-self.elements // self.peers)

    @property
    def part_bytes(self) -> int:
        """A part as it travels."""
        return self.part * NARROW_BYTES

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Parts to their owners, sums to all: together as much as an all-reduce."""
        return (Exchange("all_to_all", self.part_bytes), Exchange("all_gather", self.part_bytes))

    def effort(self, compression: Compression, work: Work, *, on_host: bool) -> Effort:
        """``select``: a padded copy is rounded. ``combine``: parts are widened and added. ``restore``: sums are widened."""
        whole, narrow = self.whole_bytes, self.peers * self.part_bytes
        if work == "select":
            return Effort(4 * whole + narrow, 0, 6)
        if work == "combine":
            return Effort(4 * self.peers * self.part * self.value_bytes + narrow, 0, 4 + self.peers)
        return Effort(2 * whole + narrow, 0, 3)

    def room_bytes(self, compression: Compression, *, on_host: bool) -> int:
        """The padded copy, and what is widened."""
        return 3 * self.peers * self.part * self.value_bytes


LAYOUT = PartsLayout
