"""Messages of RGC: one buffer [length, positions, values], padded to as many elements as a selection can have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from soap.errors import StrategyError
from soap.plan.compression.seam import INTERVAL, PROBES, Effort, Exchange, Layout, Work, kept_count, rounded_up
from soap.strategy.compression import Compression, Rgc, RgcAsq, Selection

LENGTH_BYTES = 8
MOST_SHORT = 2**31
"""Up to so many elements positions take four bytes, else eight."""
HOST_BLOCK, DEVICE_BLOCK = 128, 64
"""Elements that share a maximum, see ``soap.runtime.compression.selection`` and ``device_selection``."""
HOST_CALLS, PROBE_CALLS, RESTORE_CALLS = 20, 9, 3
"""Calls to select on a processor; kernels of a probe on a GPU; calls to add one peer's message."""
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

    def effort(self, compression: Compression, work: Work, *, on_host: bool) -> Effort:
        """``select``: the gradient is added to the residual (two reads, a write), and a pass over the result notes maxima and the mean.
        Elements are then collected from the blocks that can hold the largest: at a density of a thousandth an eighth of the memory. A
        processor looks for a threshold among what it has collected; a GPU counts in these blocks, once a probe, as its shapes may not
        depend on values. ``restore``: zeros are written, and each peer's elements are added to them."""
        assert isinstance(compression, Rgc | RgcAsq)
        whole, held = self.whole_bytes, self.kept * (self.index_bytes + self.value_bytes)
        if work == "restore":
            scattered = self.peers * self.capacity
            return Effort(whole + self.peers * self.exchanges[0].message_bytes, scattered, 1 + RESTORE_CALLS * self.peers)
        exact = compression.selection in EXACT
        if on_host:
            looked_at = min(whole, HOST_BLOCK * self.kept * self.value_bytes)
            return Effort(5 * whole + looked_at + 4 * held, 3 * self.capacity, HOST_CALLS)
        candidates = min(whole, DEVICE_BLOCK * self.capacity * self.value_bytes)
        passes, calls = (8, 30) if exact else (10, 40)
        probes = 0.0 if exact else PROBES / INTERVAL if compression.selection == "sampled" else PROBES
        traffic = passes * whole + (4 + round(2 * probes)) * candidates
        return Effort(traffic, 3 * self.capacity, calls + round(PROBE_CALLS * probes))

    def room_bytes(self, compression: Compression, *, on_host: bool) -> int:
        """A processor has maxima of blocks, and positions of what it collects; a GPU the keys, a padded copy, and marks of both."""
        positions = 8 * min(self.elements, 4 * self.capacity + 4 * HOST_BLOCK)
        return self.whole_bytes // 16 + 4 * positions if on_host else 5 * self.whole_bytes + 4 * positions

    def real_bytes(self, count: int) -> int:
        """Header, positions and values of so many elements."""
        return self.header_bytes + count * (self.index_bytes + self.sent_value_bytes)


def capacity_of(selection: Selection, kept: int, elements: int) -> int:
    """The most elements that a selection gives for k = ``kept``. StrategyError for ``policy``."""
    if selection == "policy":
        raise StrategyError("selection 'policy' has no size yet: soap.plan.compression.policy chooses one for each layer")
    return kept if selection in EXACT else min(2 * kept, elements)


LAYOUT = SparseLayout
