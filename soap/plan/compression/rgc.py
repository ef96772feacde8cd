"""Messages of RGC: one buffer [length, positions, values], padded to as many elements as a selection can have; or *ragged*, of just its
length, behind an exchange of all messages' sizes.

How long a ragged message is is known only when it is made. Plans take what is expected by the law of the selection: a binary search ends
at any threshold between that of k and that of 2 k elements alike, and in a distribution's tail the logarithm of the number of elements
above a threshold falls evenly with it. On average 2^u k elements are then above it, u even on (0, 1): k / ln 2, or 1.44 k.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log, prod
from typing import Self

from soap.errors import StrategyError
from soap.plan.compression.seam import INTERVAL, Effort, Exchange, Layout, Work, kept_count, rounded_up
from soap.strategy.compression import EXACT, Compression, Rgc, RgcAsq, Selection

LENGTH_BYTES = 8
MOST_SHORT = 2**31
"""Up to so many elements positions take four bytes, else eight."""
HOST_BLOCK, DEVICE_BLOCK = 128, 64
"""Elements that share a maximum, see ``soap.runtime.compression.selection`` and ``device_selection``."""
HOST_CALLS, RESTORE_CALLS = 20, 3
"""Calls to select on a processor; calls to add one peer's message."""
LEAST_IN_BLOCKS = 2**25
"""Of fewer elements a GPU finds the largest sooner without blocks: their kernels take longer to launch than they save."""
ADDING, REUSE = 3, (12.0, 13.0)
"""Of a GPU: passes that add a gradient to the residual; passes and kernels of a selection by a threshold of an earlier step."""
SIZE_BYTES = 8
"""Of a message's size, as ranks tell it each other."""


@dataclass(frozen=True, slots=True)
class SparseLayout(Layout):
    """A message of up to ``capacity`` elements, at least ``kept`` (fewer only where fewer have the right sign). A ``ragged`` all-gather
    sends it with a capacity of just its length, ``likely`` elements on average."""

    kept: int
    capacity: int
    likely: int
    ragged: bool

    @classmethod
    def of(cls, compression: Rgc | RgcAsq, shape: tuple[int, ...], value_bytes: int, peers: int) -> Self:
        """StrategyError if the selection is left to the policy, which knows the layer."""
        elements = prod(shape)
        kept = kept_count(elements, compression.density)
        capacity, likely = capacity_of(compression.selection, kept, elements), likely_of(compression.selection, kept, elements)
        return cls(shape, value_bytes, peers, kept, capacity, likely, compression.ragged)

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
    def row_bytes(self) -> int:
        """A message: a multiple of eight bytes, as messages lie behind each other."""
        return rounded_up(self.values_at + self.capacity * self.sent_value_bytes, LENGTH_BYTES)

    def holding(self, count: int) -> Self:
        """The layout of a message of just so many elements."""
        return replace(self, capacity=count)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """One all-gather, or a small one of sizes and a ragged one."""
        if not self.ragged:
            return (Exchange("all_gather", self.row_bytes),)
        return (Exchange("all_gather", SIZE_BYTES), Exchange("ragged", self.holding(self.likely).row_bytes, self.row_bytes))

    def effort(self, compression: Compression, work: Work, *, on_host: bool) -> Effort:
        """``select``: the gradient is added to the residual (two reads, a write), and a pass over the result notes maxima and the mean.
        Elements are then collected from the blocks that can hold the largest: at a density of a thousandth an eighth of the memory. A
        processor looks for a threshold among what it has collected; a GPU finds it from the largest of these, see ``_on_device``.
        ``restore``: zeros are written, and each peer's elements are added to them."""
        assert isinstance(compression, Rgc | RgcAsq)
        if work == "combine":  # sizes are read
            return Effort(self.peers * SIZE_BYTES, 0, 2)
        copied = 2 * (self.row_bytes + self.holding(self.likely).row_bytes) if self.ragged else 0  # padding is taken away, or added
        whole, held = self.whole_bytes, self.kept * (self.index_bytes + self.value_bytes)
        if work == "restore":
            scattered = self.peers * self.capacity
            return Effort(whole + self.peers * (self.row_bytes + copied), scattered, 1 + RESTORE_CALLS * self.peers)
        exact = compression.selection in EXACT
        if on_host:
            looked_at = min(whole, HOST_BLOCK * self.kept * self.value_bytes)
            return Effort(5 * whole + looked_at + 4 * held + copied, 3 * self.capacity, HOST_CALLS)
        passes, calls = self._on_device(exact=exact)
        if compression.selection == "sampled":
            passes, calls = ((a + (INTERVAL - 1) * b) / INTERVAL for a, b in zip((passes, calls), REUSE, strict=True))
        return Effort(round((ADDING + passes) * whole) + copied, 3 * self.capacity, round(calls))

    def _on_device(self, *, exact: bool) -> tuple[float, float]:
        """(Times that a GPU moves the whole tensor, kernels) to select without a threshold of an earlier step, as an H200 took them for 1,
        16 and 64 M elements (``benchmarks.selection``, 2026-11-27): torch's kernels read more often than they would have to."""
        times = 1 if exact else 2
        if self.elements < LEAST_IN_BLOCKS:
            return 30.0 * times, 45 if exact else 86
        candidates = min(1.0, DEVICE_BLOCK * self.capacity / self.elements)
        return (10 + 30 * candidates) * times, 91 if exact else 134

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


def likely_of(selection: Selection, kept: int, elements: int) -> int:
    """How many elements are expected of a selection, see the module."""
    return kept if selection in EXACT else min(round(kept / log(2)), elements)


LAYOUT = SparseLayout
