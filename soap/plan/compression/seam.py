"""What a plan knows of a compressed parameter: which exchanges its synchronization takes, and how many bytes travel in each.

All sizes follow from the parameter's shape, the settings and the number of peers, so no rank has to tell another how much will come.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from math import prod
from typing import Literal, get_args

from soap.strategy.compression import Compression

ExchangeKind = Literal["all_gather", "all_to_all", "sum", "ragged"]
Work = Literal["select", "combine", "restore"]
"""What a device does: before the first exchange, between the two, and after the last."""
WORKS: tuple[Work, ...] = get_args(Work)


@dataclass(frozen=True, slots=True)
class Effort:
    """What work takes of a device: bytes that it reads and writes one after the other, elements that it reads or writes at places of their
    own, and calls (on a GPU: kernels)."""

    traffic_bytes: int
    scattered: int
    calls: int

    def moved_bytes(self, *, on_host: bool) -> int:
        """All bytes that memory moves: an element at a place of its own moves a line of a processor's cache, or a sector of a GPU's."""
        return self.traffic_bytes + self.scattered * (LINE_BYTES if on_host else SECTOR_BYTES)


LINE_BYTES, SECTOR_BYTES = 64, 32
PROBES = 24
"""How often a binary search halves its interval at most."""
SUM_COPIES = 4
"""Of a vector that is summed part by part: itself, everyone's parts, and the sums, padded."""
RAGGED_COPIES = 3
"""Of a message whose size varies: padded, without padding, and one of the others', padded. Everyone's are there twice: as they came behind
those of other shards, and by themselves."""
INTERVAL = 5
"""Steps from one search for a threshold to the next, where it is used again (``sampled``): the paper's."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective among the peers.

    ``message_bytes``: with ``all_gather`` each rank's message, which all get; with ``all_to_all`` the message to each peer; with ``sum``
    the vector that is summed in the order of the ranks. ``ragged``: an all-gather of messages of unlike sizes, which ranks have told each
    other in the exchange before; ``message_bytes`` is what is expected on average, ``most_bytes`` the largest.
    """

    kind: ExchangeKind
    message_bytes: int
    most_bytes: int = 0

    def sent_bytes(self, peers: int) -> int:
        """What each of the peers puts on the wire: its message (and those passed on) to all others, or for a sum both halves of
        Rabenseifner's algorithm, 2 (p - 1) / p of the vector, rounded up."""
        if self.kind == "sum":
            return -(-2 * (peers - 1) * self.message_bytes // peers)
        return (peers - 1) * self.message_bytes


@dataclass(frozen=True, slots=True)
class Layout(ABC):
    """Messages of one parameter of this ``shape`` among so many ``peers``. ``value_bytes``: of an element as it is summed and kept, see
    ``kept_bytes``."""

    shape: tuple[int, ...]
    value_bytes: int
    peers: int

    @property
    def elements(self) -> int:
        """Elements of the parameter."""
        return prod(self.shape)

    @property
    @abstractmethod
    def exchanges(self) -> tuple[Exchange, ...]:
        """The exchanges, one after the other."""

    @abstractmethod
    def effort(self, compression: Compression, work: Work, *, on_host: bool) -> Effort:
        """What a device does to compress and decompress. ``on_host``: a processor, whose cores select by their own code."""

    @abstractmethod
    def room_bytes(self, compression: Compression, *, on_host: bool) -> int:
        """At most what this work takes of memory for a while, beside gradient, state, messages and the sum."""

    def state_bytes(self, compression: Compression) -> int:
        """What a peer keeps from step to step."""
        return len(compression.summed_state) * self.whole_bytes

    @property
    def whole_bytes(self) -> int:
        """Of all elements in the type in which they are kept."""
        return self.elements * self.value_bytes

    @property
    def message_bytes(self) -> int:
        """What a peer sends and receives: its own messages and everyone's; a sum is sent in parts, which are added and sent to all."""
        copies = {"all_gather": 1 + self.peers, "all_to_all": 2 * self.peers, "sum": SUM_COPIES, "ragged": RAGGED_COPIES + 2 * self.peers}
        return sum(copies[each.kind] * (each.most_bytes or each.message_bytes) for each in self.exchanges)

    @property
    def sent_bytes(self) -> int:
        """What each peer puts on the wire in a step."""
        return sum(exchange.sent_bytes(self.peers) for exchange in self.exchanges)

    def real_bytes(self, count: int) -> int:
        """Of an all-gathered message, what is no padding if it holds so many elements."""
        return self.exchanges[0].message_bytes


def joined(layouts: Sequence[Layout]) -> tuple[Exchange, ...]:
    """The exchanges of several shards that are compressed alike: messages lie one behind the other, without padding between them."""
    return tuple(
        replace(own[0], message_bytes=sum(each.message_bytes for each in own), most_bytes=sum(each.most_bytes for each in own))
        for own in zip(*(layout.exchanges for layout in layouts), strict=True)
    )


def kept_bytes(element_bytes: int) -> int:
    """Bytes of an element of residuals and sums: those of the gradient, but at least float32's four."""
    return max(4, element_bytes)


def kept_count(elements: int, density: float) -> int:
    """k: how many of so many elements a density means; at least one."""
    return min(elements, max(1, round(elements * density)))


def rounded_up(number: int, unit: int) -> int:
    """The next multiple of ``unit``."""
    return -(-number // unit) * unit


def layout_of(compression: Compression, shape: Sequence[int], element_bytes: int, peers: int) -> Layout:
    """The messages of a parameter whose gradient's elements have so many bytes: ``LAYOUT`` of the method's module."""
    kind = import_module(f"soap.plan.compression.{compression.module}").LAYOUT
    layout = kind.of(compression, tuple(shape), kept_bytes(element_bytes), peers)
    assert isinstance(layout, Layout)
    return layout
