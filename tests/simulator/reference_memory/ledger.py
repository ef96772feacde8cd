"""A ledger of memory: pieces that devices hold for some time, and the curves that these add up to."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from soap.plan.memory_kinds import MemoryKind
from soap.plan.plan import Plan
from soap.plan.syncs.gathering import UNDER_WAY
from soap.simulator.memory.curves import BEGINS, EARLY, ENDS, FREED, LATE, LEAVES, MADE, OVER, PLACES, MemoryCurve, settled, turns
from tests.simulator.reference_memory.moving import Send, Stay, until_free


class Ledger:
    """Collects, for each device, when bytes are taken and freed."""

    def __init__(self, plan: Plan, end_ns: int) -> None:
        self._plan, self._end_ns = plan, end_ns
        # By device, four numbers a change: time in ns, order, bytes that are taken or, below 0, freed, place of its kind.
        self._changes = [array("q") for _ in range(plan.device_count)]
        self._sends: list[list[Send]] = [[] for _ in range(plan.device_count)]
        self._receives: list[list[Send]] = [[] for _ in range(plan.device_count)]
        self._few: list[list[Send]] = [[] for _ in range(plan.device_count)]

    def hold(
        self,
        device: int,
        start_ns: int,
        end_ns: int,
        size: int,
        kind: MemoryKind,
        *,
        early: bool = False,
        late: bool = False,
        leaves: bool = False,
        freed: bool = False,
        made: bool = False,
        over: bool = False,
    ) -> None:
        """A device holds ``size`` bytes of a kind from ``start_ns`` to ``end_ns``. At the same time, ends come before beginnings, but what
        begins ``early`` is made from what ends ``late``, so both are held for that moment. Before all that, what ``leaves`` begins to, and
        then something is ``freed``. After it something is ``made`` from what is then ``over``."""
        ends = OVER if over else LATE if late or end_ns == start_ns else FREED if freed else ENDS
        begins = LEAVES if leaves else EARLY if early else MADE if made else BEGINS
        if size and (start_ns, begins) < (end_ns, ends):
            self._changes[device].extend((start_ns, begins, size, PLACES[kind], end_ns, ends, -size, PLACES[kind]))

    def send(
        self,
        device: int,
        start_ns: int,
        answer_ns: int,
        size: int,
        *,
        held: int | None = None,
        copied: bool = False,
        made: bool = False,
        stays: Iterable[Stay] = (),
    ) -> None:
        """A device sends ``size`` bytes, and keeps them until ``answer_ns`` or until later sends push them out. ``held``: bytes that it has
        packed for that; all by default. ``copied``, ``made``, ``stays``: see ``Send``."""
        self._sends[device].append(Send(start_ns, answer_ns, size, size if held is None else held, 0, copied, made, tuple(stays)))

    def receive(self, device: int, start_ns: int, end_ns: int, size: int, *, few: bool = False, sum_bytes: int = 0) -> None:
        """A device receives ``size`` bytes for itself, and keeps them until ``end_ns`` or until later ones push them out, as for sends;
        with ``few`` until ``UNDER_WAY`` later ones do. Of that it then makes ``sum_bytes``, which stay."""
        (self._few if few else self._receives)[device].append(Send(start_ns, end_ns, size, size, sum_bytes))

    def arrived(self, device: int, end_ns: int) -> int:
        """When the runtime learns that a send that ends at ``end_ns`` is over: on CPUs only at the end, when it asks the library."""
        return end_ns if device in self._plan.accelerators else self._end_ns

    def curves(self) -> tuple[MemoryCurve, ...]:
        """The curve of each device.

        What is sent is let go when the next one has been packed, or when there is room to add up what answers it.
        """
        for device, moving in enumerate(self._sends):
            self._sent(device, moving)
            moving.clear()
        for queues, most in ((self._receives, None), (self._few, UNDER_WAY)):
            for device, moving in enumerate(queues):
                self._received(device, moving, most)
                moving.clear()
        return tuple(curve_of(np.array(changes, np.int64).reshape(-1, 4)) for changes in self._changes)

    def _sent(self, device: int, moving: Sequence[Send]) -> None:
        """What a device packs to send it, and what it sends from where that lies."""
        lying: dict[int, tuple[int, int, int]] = {}
        for send, end in until_free(moving):
            if end > send.start_ns:
                self.hold(device, send.start_ns, end, send.held, MemoryKind.BUFFERS, early=send.copied, late=True, made=send.made)
            for stay in send.stays:
                self.hold(device, send.start_ns, min(end, stay.since_ns), stay.copy_bytes, MemoryKind.BUFFERS, early=True)
                _, last, _ = lying.get(stay.of, (0, 0, 0))
                lying[stay.of] = (stay.since_ns, max(last, end), stay.size)
        for since_ns, end, size in lying.values():
            if end > since_ns:
                self.hold(device, since_ns, end, size, MemoryKind.BUFFERS, late=True)

    def _received(self, device: int, moving: Sequence[Send], most: int | None) -> None:
        """What a device receives, and the sums that it makes of that: one after the other, the oldest first. Where few may be under way it
        adds up before there is room for others (gradients of gathered values may leave while these are there), else when they are there."""
        spans = list(until_free(moving, most))
        left = sorted(own for own in spans if own[0].sum_bytes and own[1] == own[0].answer_ns)
        turns = {send: place - len(left) for place, (send, _) in enumerate(left)}
        for send, end in spans:
            if send.sum_bytes:
                end = max(send.start_ns, end + turns.get(send, 1 if most is None else -1))
                self.hold(device, end, self._end_ns, send.sum_bytes, MemoryKind.GRADIENTS, early=True)
            late = send.sum_bytes > 0 or end == send.start_ns
            self.hold(device, send.start_ns, end, send.held, MemoryKind.BUFFERS, leaves=most is not None, late=late)


def curve_of(changes: NDArray[np.int64]) -> MemoryCurve:
    """The curve of one device: at each time the most that it holds as things are taken then, or what is left. ``changes``: rows (time in
    ns, order, bytes that are taken or, below 0, freed, place of its kind)."""
    rows = np.concatenate(([[0, ENDS, 0, 0]], changes))  # the curve begins at 0
    rows = rows[np.lexsort((turns(*rows[:, 1:].T), rows[:, 1], rows[:, 0]))]
    times, _, sizes, kinds = rows.T
    level = np.cumsum(sizes)
    begins = np.flatnonzero(np.diff(times, prepend=-1))
    ends = np.append(begins[1:], len(rows))
    taken = np.maximum.reduceat(np.where(sizes > 0, level, 0), begins)
    held = np.maximum(level[ends - 1], taken)
    at = int(held.argmax())
    own = slice(begins[at], ends[at])
    most = np.flatnonzero((sizes[own] > 0) & (level[own] == taken[at]))
    before = slice(0, begins[at] + (int(most[-1]) + 1 if len(most) else 1))
    at_peak = settled({kind: sizes[before][kinds[before] == place].sum() for kind, place in PLACES.items()})
    shown = np.maximum.reduceat(np.where(level == np.repeat(held, ends - begins), np.arange(len(rows)), -1), begins)
    by_kind = settled({kind: np.cumsum(np.where(kinds == place, sizes, 0))[shown] for kind, place in PLACES.items()})
    return MemoryCurve(times[begins], held, {kind: int(size) for kind, size in at_peak.items()}, by_kind)
