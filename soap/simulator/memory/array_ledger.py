"""A ledger of memory: pieces that devices hold for some time, many at once as arrays, and the curves that these add up to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from soap.plan.memory_kinds import MemoryKind
from soap.plan.syncs.gathering import UNDER_WAY
from soap.simulator.memory.ledger import BEGINS, EARLY, ENDS, FREED, LATE, LEAVES, MADE, OVER, PLACES, MemoryCurve, curve_of
from soap.simulator.memory.transit import SENT_BYTES, SENT_TENSORS

Longs = NDArray[np.int64]
Flags = bool | NDArray[np.bool_]


class ArrayLedger:
    """Collects, for each device, when bytes are taken and freed. Arguments are arrays of one length, or single values for all."""

    def __init__(self, devices: int, accelerators: frozenset[int], end_ns: int) -> None:
        self.end_ns = end_ns
        self.is_accelerator = np.zeros(devices, np.bool_)
        self.is_accelerator[list(accelerators)] = True
        self.changes: list[Longs] = []
        """Rows (device, time in ns, order, bytes that are taken or, below 0, freed, place of its kind)."""
        self._sends: list[Longs] = []
        self._stays: list[Longs] = []
        self._received: list[Longs] = []
        self._few: list[Longs] = []
        self._sent_count = 0

    def hold(
        self,
        device: Any,
        start_ns: Any,
        end_ns: Any,
        size: Any,
        kind: MemoryKind,
        *,
        early: Flags = False,
        late: Flags = False,
        leaves: Flags = False,
        freed: Flags = False,
        made: Flags = False,
        over: Flags = False,
    ) -> None:
        """Devices hold ``size`` bytes of a kind from ``start_ns`` to ``end_ns``. At the same time, ends come before beginnings, but what
        begins ``early`` is made from what ends ``late``, so both are held for that moment. Before all that, what ``leaves`` begins to, and
        then something is ``freed``. After it something is ``made`` from what is then ``over``."""
        device, start, end, size = np.broadcast_arrays(*(np.asarray(own, np.int64) for own in (device, start_ns, end_ns, size)))
        ends = np.where(over, OVER, np.where(np.logical_or(late, end == start), LATE, np.where(freed, FREED, ENDS)))
        begins = np.where(leaves, LEAVES, np.where(early, EARLY, np.where(made, MADE, BEGINS)))
        begins, ends = np.broadcast_arrays(begins, ends, device)[:2]
        there = (size != 0) & ((start < end) | ((start == end) & (begins < ends)))
        place = np.full(len(np.atleast_1d(device)), PLACES[kind])
        rows = np.stack([np.atleast_1d(own) for own in (device, start, begins, size)] + [place])[:, np.atleast_1d(there)]
        freeing = np.stack([np.atleast_1d(own) for own in (device, end, ends, -size)] + [place])[:, np.atleast_1d(there)]
        self.changes += [rows, freeing]

    def send(
        self, device: Any, start_ns: Any, answer_ns: Any, size: Any, *, held: Any = None, copied: Flags = False, made: Flags = False
    ) -> Longs:
        """Devices send ``size`` bytes, and keep them until ``answer_ns`` or until later sends push them out. ``held``: bytes that they have
        packed for that; all by default. ``copied``, ``made``: see ``transit.Send``. Returns the sends' numbers, for ``stay``."""
        own = np.broadcast_arrays(*(np.atleast_1d(np.asarray(one, np.int64)) for one in (device, start_ns, answer_ns, size)))
        held = own[3] if held is None else held
        rows = np.stack([*own, *(np.broadcast_to(np.asarray(one, np.int64), own[0].shape) for one in (held, copied, made))])
        numbers = self._sent_count + np.arange(rows.shape[1])
        self._sends.append(np.vstack([rows, numbers]))
        self._sent_count += rows.shape[1]
        return numbers

    def stay(self, send: Any, of: Any, since_ns: Any, size: Any, copy_bytes: Any = 0) -> None:
        """What is sent lies in memory ``of`` this number, which stays for that once its readers have let it go, at ``since_ns``; it is
        there once, however many parts of it are sent. ``copy_bytes``: of what may be a copy until then (``transit.Stay``)."""
        own = (np.atleast_1d(np.asarray(one, np.int64)) for one in (send, of, since_ns, size, copy_bytes))
        self._stays.append(np.stack(np.broadcast_arrays(*own)))

    def receive(self, device: Any, start_ns: Any, end_ns: Any, size: Any, *, few: bool = False, sum_bytes: Any = 0) -> None:
        """Devices receive ``size`` bytes for themselves, and keep them until ``end_ns`` or until later ones push them out, as for sends;
        with ``few`` until ``UNDER_WAY`` later ones do. Of that they then make ``sum_bytes``, which stay."""
        own = (np.atleast_1d(np.asarray(one, np.int64)) for one in (device, start_ns, end_ns, size, sum_bytes))
        (self._few if few else self._received).append(np.stack(np.broadcast_arrays(*own)))

    def arrived(self, device: Any, end_ns: Any) -> Longs:
        """When the runtime learns that sends that end at ``end_ns`` are over: on CPUs only at the end, when it asks the library."""
        return np.where(self.is_accelerator[device], end_ns, self.end_ns)

    def curves(self) -> tuple[MemoryCurve, ...]:
        """The curve of each device. What is sent is let go when the next one has been packed, or when there is room to add up what answers
        it."""
        self._let_go_of_sent()
        for rows, most in ((self._received, None), (self._few, UNDER_WAY)):
            self._let_go_of_received(rows, most)
        changes = np.concatenate([np.zeros((5, 0), np.int64), *self.changes], axis=1)
        by_device = changes[:, np.argsort(changes[0], kind="stable")]
        ends = np.searchsorted(by_device[0], np.arange(len(self.is_accelerator) + 1))
        return tuple(curve_of(by_device[1:, a:b].T) for a, b in zip(ends[:-1], ends[1:], strict=True))

    def _let_go_of_sent(self) -> None:
        """What devices pack to send it, and what they send from where that lies."""
        if not self._sends:
            return
        sends = np.concatenate(self._sends, axis=1)
        device, start, answer, size, held, copied, made, number = sends
        end_of = np.zeros(self._sent_count, np.int64)
        for place, end in _until_free(
            np.stack([device, start, answer, size]), np.lexsort((made, copied, held, size, answer, start, device))
        ):
            end_of[number[place]] = end
        end = end_of[number]
        later = end > start
        own = (one[later] for one in (device, start, end, held))
        self.hold(*own, MemoryKind.BUFFERS, early=copied[later] == 1, late=True, made=made[later] == 1)
        if not self._stays:
            return
        send, of, since, whole, copy_bytes = np.concatenate(self._stays, axis=1)
        at, begun, gone = np.zeros(self._sent_count, np.int64), np.zeros(self._sent_count, np.int64), end_of[send]
        at[number], begun[number] = device, start
        self.hold(at[send], begun[send], np.minimum(gone, since), copy_bytes, MemoryKind.BUFFERS, early=True)
        order = np.lexsort((gone, of, at[send]))
        last = np.flatnonzero(np.append((np.diff(of[order]) != 0) | (np.diff(at[send][order]) != 0), True)) if len(order) else order
        kept = order[last]
        still = kept[gone[kept] > since[kept]]
        self.hold(at[send][still], since[still], gone[still], whole[still], MemoryKind.BUFFERS, late=True)

    def _let_go_of_received(self, rows: list[Longs], most: int | None) -> None:
        """What devices receive, and the sums that they make of that: one after the other, the oldest first. Where few may be under way they
        add up before there is room for others (gradients of gathered values may leave while these are there), else when they are there."""
        if not rows:
            return
        received = np.concatenate(rows, axis=1)
        device, start, answer, size, sums = received
        end = np.zeros(len(device), np.int64)
        free = list(_until_free(received[:4], np.lexsort((sums, size, answer, start, device)), most))
        for place, own in free:
            end[place] = own
        places = np.array([place for place, _ in free], np.int64)
        left = places[(sums[places] > 0) & (end[places] == answer[places])]
        left = left[np.lexsort((sums[left], size[left], answer[left], start[left], device[left]))]
        turn = np.full(len(device), 1 if most is None else -1, np.int64)
        counts = np.bincount(device[left], minlength=len(self.is_accelerator))
        begins = np.cumsum(counts) - counts
        turn[left] = np.arange(len(left)) - begins[device[left]] - counts[device[left]]
        summed = sums > 0
        end = np.where(summed, np.maximum(start, end + turn), end)
        self.hold(device[summed], end[summed], self.end_ns, sums[summed], MemoryKind.GRADIENTS, early=True)
        self.hold(device, start, end, size, MemoryKind.BUFFERS, leaves=most is not None, late=summed | (end == start))


def _until_free(moving: Longs, order: Longs, most: int | None = None) -> Iterator[tuple[int, int]]:
    """(place, when it is free) of each of these moves: until its answer, or until later ones of its device push it out. ``moving``: by move
    its device, start, answer and bytes; ``order``: places by device, then by start. ``most``: tensors at a time. See
    ``transit.until_free``."""
    queue: deque[tuple[int, int, int]] = deque()
    total, most, before = 0, SENT_TENSORS if most is None else most, -1
    for place, (device, start, answer, size) in zip(order.tolist(), moving[:, order].T.tolist(), strict=True):
        if device != before:
            yield from ((own, free) for own, free, _ in queue)
            queue.clear()
            total, before = 0, device
        for other in [other for other in queue if other[1] <= start]:
            queue.remove(other)
            total -= other[2]
            yield other[:2]
        queue.append((place, answer, size))
        total += size
        while len(queue) > most or (len(queue) > 1 and total > SENT_BYTES):
            pushed_out = queue.popleft()
            total -= pushed_out[2]
            yield pushed_out[0], start
    yield from ((own, free) for own, free, _ in queue)
