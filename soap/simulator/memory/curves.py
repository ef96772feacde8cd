"""Curves of what devices hold over time, and their peaks, made of all changes at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from soap.plan.memory_kinds import MemoryKind
from soap.simulator.memory.grouped import Longs

ENDS, LEAVES, FREED, EARLY, LATE, MADE, OVER, BEGINS = range(ORDERS := 8)
"""The order of changes at the same time. Of those with one order, what frees bytes comes before what takes some."""

SPARED = (MemoryKind.GRADIENTS, MemoryKind.KEPT, MemoryKind.BUFFERS, MemoryKind.VALUES, MemoryKind.BATCH, MemoryKind.STATES)
"""The kinds of memory of which backward passes hold less than is counted, in this order."""

PLACES = {kind: place for place, kind in enumerate(MemoryKind)}


@dataclass(frozen=True)
class MemoryCurve:
    """The bytes that one device holds: ``bytes_held[i]`` from ``times_ns[i]`` on. Both are int64 arrays of one length; times rise from 0.
    ``at_peak``: bytes by kind when the peak is first reached; they add up to it, and none is below 0. ``by_kind``: the same at every time,
    arrays as ``bytes_held``, at the last moment at which so much is held then."""

    times_ns: Longs
    bytes_held: Longs
    at_peak: Mapping[MemoryKind, int] = field(default_factory=dict)
    by_kind: Mapping[MemoryKind, Longs] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """The most at any time."""
        return int(self.bytes_held.max())


class Held(NamedTuple):
    """Pieces that one device holds: from ``first`` to ``last``, times in ns by ``ORDERS`` plus the order then; bytes, below 0 if others
    hold less for it; and the place of their kind."""

    first: Longs
    last: Longs
    bytes: Longs
    kind: NDArray[np.int8]

    def changes(self) -> tuple[Longs, Longs, Longs]:
        """(times by ``ORDERS`` plus the order then, bytes that are taken or, below 0, freed, which of ``Held`` twice), in their order."""
        moments = np.concatenate([2 * self.first + (self.bytes > 0), 2 * self.last + (self.bytes < 0)])
        order = np.argsort(moments)
        return moments[order] // 2, np.concatenate([self.bytes, -self.bytes])[order], order


def peak_of(held: Held) -> int:
    """The most that a device holds at any time."""
    return int(np.cumsum(held.changes()[1]).max(initial=0))


def curve_of(held: Held) -> MemoryCurve:
    """The curve of a device: at each time the most that it holds as things are taken then, or what is left. It begins at 0."""
    moments, sizes, order = held.changes()
    times, sizes = np.append(0, moments // ORDERS), np.append(0, sizes)
    kinds = np.append(0, np.tile(held.kind, 2)[order])
    rows, level = np.arange(len(times)), np.cumsum(sizes)
    begins = np.flatnonzero(np.diff(times, prepend=-1))
    counts = np.diff(begins, append=len(times))
    taken = np.maximum.reduceat(np.where(sizes > 0, level, 0), begins)
    most = np.maximum(level[begins + counts - 1], taken)
    at_most = np.maximum.reduceat(np.where((sizes > 0) & (level == np.repeat(taken, counts)), rows, -1), begins)
    shown = np.maximum.reduceat(np.where(level == np.repeat(most, counts), rows, -1), begins)
    peak = most.argmax()
    peak_row = begins[peak] if at_most[peak] < 0 else at_most[peak]
    of_kind = {kind: np.cumsum(np.where(kinds == place, sizes, 0)) for kind, place in PLACES.items()}
    at_peak = settled({kind: int(sums[peak_row]) for kind, sums in of_kind.items()})
    by_kind = settled({kind: sums[shown] for kind, sums in of_kind.items()})
    return MemoryCurve(times[begins], most, {kind: int(own) for kind, own in at_peak.items()}, by_kind)


def settled(held: Mapping[MemoryKind, Any]) -> dict[MemoryKind, Any]:
    """Bytes by kind, numbers or arrays, with the same sum, none below 0. Workspace below 0 means that passes never hold all of their
    operands and gradients at once (``Footprint``): it is less of the gradients that they make, then of what they free."""
    found = dict(held)
    for kind in SPARED:
        spared = np.minimum(found[kind], np.maximum(0, -found[MemoryKind.WORKSPACE]))
        found[kind] = found[kind] - spared
        found[MemoryKind.WORKSPACE] = found[MemoryKind.WORKSPACE] + spared
    return found
