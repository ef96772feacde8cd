"""Curves of what devices hold over time, and their peaks, made of all changes at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from soap.plan.memory_kinds import MemoryKind
from soap.simulator.memory.grouped import Longs

ENDS, LEAVES, FREED, EARLY, LATE, MADE, OVER, BEGINS = range(8)
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


def peaks_of(changes: Longs, devices: int) -> Longs:
    """[device]: the most that it holds at any time. ``changes``: columns (device, time in ns, order, bytes that are taken or, below 0,
    freed, place of their kind); what a device takes of a kind, it frees as well."""
    order = _in_order(changes)
    device, sizes = changes[0][order], changes[3][order]
    found = np.zeros(devices, np.int64)
    there = np.flatnonzero(np.diff(device, prepend=-1))
    if len(there):
        found[device[there]] = np.maximum(0, np.maximum.reduceat(np.cumsum(sizes), there))
    return found


def curves_of(changes: Longs, devices: int) -> tuple[MemoryCurve, ...]:
    """The curve of each device: at each time the most that it holds as things are taken then, or what is left. ``changes``: see
    ``peaks_of``."""
    first = np.zeros((5, devices), np.int64)  # the curves begin at 0
    first[0] = np.arange(devices)
    changes = np.concatenate([first, changes], axis=1)
    device, times, _, sizes, kinds = changes[:, _in_order(changes)]
    rows, level = np.arange(len(device)), np.cumsum(sizes)
    begins = np.flatnonzero((np.diff(times, prepend=-1) != 0) | (np.diff(device, prepend=-1) != 0))
    ends = np.append(begins[1:], len(device))
    taken = np.maximum.reduceat(np.where(sizes > 0, level, 0), begins)
    held = np.maximum(level[ends - 1], taken)
    counts = ends - begins
    at_most = np.maximum.reduceat(np.where((sizes > 0) & (level == np.repeat(taken, counts)), rows, -1), begins)
    shown = np.maximum.reduceat(np.where(level == np.repeat(held, counts), rows, -1), begins)
    own = np.searchsorted(device[begins], np.arange(devices + 1))
    peaks = np.array([a + held[a:b].argmax() for a, b in pairwise(own)], np.int64)
    peak_rows = np.where(at_most[peaks] < 0, begins[peaks], at_most[peaks])
    of_kind = {kind: np.cumsum(np.where(kinds == place, sizes, 0)) for kind, place in PLACES.items()}
    at_peak = settled({kind: sums[peak_rows] for kind, sums in of_kind.items()})
    by_kind = settled({kind: sums[shown] for kind, sums in of_kind.items()})
    found = []
    for number, (a, b) in enumerate(pairwise(own)):
        most = {kind: int(sums[number]) for kind, sums in at_peak.items()}
        found.append(MemoryCurve(times[begins[a:b]], held[a:b], most, {kind: sums[a:b] for kind, sums in by_kind.items()}))
    return tuple(found)


def _in_order(changes: Longs) -> Longs:
    """Places of the changes by device, time and order."""
    device, time, order, sizes, _ = changes
    place = (device * (time.max(initial=0) + 1) + time) * (BEGINS + 1) + order
    return np.argsort(2 * place + (sizes > 0))


def settled(held: Mapping[MemoryKind, Any]) -> dict[MemoryKind, Any]:
    """Bytes by kind, numbers or arrays, with the same sum, none below 0. Workspace below 0 means that passes never hold all of their
    operands and gradients at once (``Footprint``): it is less of the gradients that they make, then of what they free."""
    found = dict(held)
    for kind in SPARED:
        spared = np.minimum(found[kind], np.maximum(0, -found[MemoryKind.WORKSPACE]))
        found[kind] = found[kind] - spared
        found[MemoryKind.WORKSPACE] = found[MemoryKind.WORKSPACE] + spared
    return found
