"""A ledger of memory: pieces that devices hold for some time, many at once as arrays, and the curves that these add up to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from soap.plan.memory_kinds import MemoryKind
from soap.plan.syncs.gathering import UNDER_WAY
from soap.simulator.memory.curves import (
    BEGINS,
    EARLY,
    ENDS,
    FREED,
    LATE,
    LEAVES,
    MADE,
    ORDERS,
    OVER,
    PLACES,
    Held,
    MemoryCurve,
    curve_of,
    peak_of,
)
from soap.simulator.memory.grouped import Bools, Longs, least, most
from soap.simulator.memory.transit import NO_STAY, SENT_BYTES, SENT_TENSORS

Flags = bool | Bools


class ArrayLedger:
    """Collects, for each device, when bytes are taken and freed. Arguments are arrays of one length, or single values for all."""

    def __init__(self, devices: int, accelerators: frozenset[int], end_ns: int) -> None:
        self.end_ns = end_ns
        self.is_accelerator = np.zeros(devices, np.bool_)
        self.is_accelerator[list(accelerators)] = True
        self._devices = np.min_scalar_type(devices)  # sorting narrow numbers is fast
        self._held: list[tuple[NDArray[Any], ...]] = [(np.zeros(0, self._devices), *Held(*np.zeros((4, 0), np.int64)))]
        """Columns: devices, then those of ``Held``."""
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
        kind: MemoryKind | Longs,
        *,
        early: Flags = False,
        late: Flags = False,
        leaves: Flags = False,
        freed: Flags = False,
        made: Flags = False,
        over: Flags = False,
    ) -> None:
        """Devices hold ``size`` bytes of a kind (or of kinds by ``PLACES``) from ``start_ns`` to ``end_ns``. At the same time, ends come
        before beginnings, but what begins ``early`` is made from what ends ``late``, so both are held for that moment. Before all that,
        what ``leaves`` begins to, and then something is ``freed``. After it something is ``made`` from what is then ``over``."""
        columns = (np.atleast_1d(np.asarray(own, np.int64)) for own in (device, start_ns, end_ns, size))
        device, start, end, size = np.broadcast_arrays(*columns)
        ends = np.where(over, OVER, np.where(np.logical_or(late, end == start), LATE, np.where(freed, FREED, ENDS)))
        begins = np.where(leaves, LEAVES, np.where(early, EARLY, np.where(made, MADE, BEGINS)))
        first, last = ORDERS * start + begins, ORDERS * end + ends
        place = np.broadcast_to(np.int8(PLACES[kind]) if isinstance(kind, MemoryKind) else kind.astype(np.int8), device.shape)
        own = device.astype(self._devices), first, last, size, place
        there = (size != 0) & (first < last)
        self._held.append(own if there.all() else tuple([column[there] for column in own]))

    def send(
        self, device: Any, start_ns: Any, answer_ns: Any, size: Any, *, held: Any = None, copied: Flags = False, made: Flags = False
    ) -> Longs:
        """Devices send ``size`` bytes, and keep them until ``answer_ns`` or until later sends push them out. ``held``: bytes that they have
        packed for that; all by default. ``copied``: packed first, while what it is made of is there. ``made``: packed of something that has
        been made for that. Returns the sends' numbers, for ``stay``."""
        own = np.broadcast_arrays(*(np.atleast_1d(np.asarray(one, np.int64)) for one in (device, start_ns, answer_ns, size)))
        held = own[3] if held is None else held
        rows = np.stack([*own, *(np.broadcast_to(np.asarray(one, np.int64), own[0].shape) for one in (held, copied, made))])
        numbers = self._sent_count + np.arange(rows.shape[1])
        self._sends.append(rows)
        self._sent_count += rows.shape[1]
        return numbers

    def stay(self, send: Any, of: Any, since_ns: Any, size: Any, copy_bytes: Any = 0) -> None:
        """Say that sends lie in memory ``of`` this number, which stays for that once its readers have let it go, at ``since_ns``; it is
        there once, however many parts of it are sent. ``copy_bytes``: of what may be a copy until then."""
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
        """The curve of each device."""
        return tuple(map(curve_of, self._by_device()))

    def peaks(self) -> Longs:
        """[device]: the most that it holds at any time."""
        return np.array(list(map(peak_of, self._by_device())), np.int64)

    def _by_device(self) -> Iterator[Held]:
        """All that each device holds. A send is let go when the next one has been packed, or when there is room to add up what answers
        it."""
        self._let_go_of_sent()
        for rows, limit in ((self._received, None), (self._few, UNDER_WAY)):
            self._let_go_of_received(rows, limit)
            rows.clear()
        device, *columns = (np.concatenate(column) for column in zip(*self._held, strict=True))
        self._held = [(device, *columns)]
        ends = np.cumsum(np.bincount(device, minlength=len(self.is_accelerator)))
        for own in np.split(np.argsort(device, kind="stable"), ends[:-1]):
            yield Held(*(column[own] for column in columns))

    def _let_go_of_sent(self) -> None:
        """Hold what devices pack to send it, and what they send from where that lies."""
        if not self._sends:
            return
        device, start, answer, size, held, copied, made = np.concatenate(self._sends, axis=1)
        count, stays = len(device), np.concatenate([np.zeros((5, 0), np.int64), *self._stays], axis=1)
        self._sends, self._stays, self._sent_count = [], [], 0
        lies = least(stays[0], stays[1], count, NO_STAY)
        end = _until_free(np.stack([device, start, answer, size]), np.lexsort((lies, made, copied, held, size, answer, start, device)))
        later = end > start
        own, flags = (device[later], start[later], end[later], held[later]), {"early": copied[later] == 1, "made": made[later] == 1}
        self.hold(*own, MemoryKind.BUFFERS, late=True, **flags)
        send, of, since, whole, copy_bytes = stays
        self.hold(device[send], start[send], np.minimum(end[send], since), copy_bytes, MemoryKind.BUFFERS, early=True)
        keys = of * len(self.is_accelerator) + device[send]
        _, first, lying = np.unique(keys, return_index=True, return_inverse=True)
        gone = most(lying, end[send], len(first), 0)
        still = gone > since[first]
        first, gone = first[still], gone[still]
        self.hold(device[send][first], since[first], gone, whole[first], MemoryKind.BUFFERS, late=True)

    def _let_go_of_received(self, rows: list[Longs], limit: int | None) -> None:
        """Hold what devices receive, and the sums that they make of that: one after the other, the oldest first. Where few may be under
        way they add up before there is room for others (gradients of gathered values may leave while these are there), else when they are
        there."""
        if not rows:
            return
        received = np.concatenate(rows, axis=1)
        device, start, answer, size, sums = received
        summed = sums > 0
        end = _until_free(received[:4], np.lexsort((sums, size, answer, start, device)), limit)
        turn = self._turns(received, np.flatnonzero(summed & (end == answer)), 1 if limit is None else -1)
        end = np.where(summed, np.maximum(start, end + turn), end)
        self.hold(device[summed], end[summed], self.end_ns, sums[summed], MemoryKind.GRADIENTS, early=True)
        self.hold(device, start, end, size, MemoryKind.BUFFERS, leaves=limit is not None, late=summed | (end == start))

    def _turns(self, received: Longs, left: Longs, default: int) -> Longs:
        """[received]: how many ns after it has come it is added up: those that are ``left`` in turn, so that the last one of a device is
        1 ns before; equal ones together. ``default``: of the others."""
        if not len(left):
            return np.full(received.shape[1], default)
        device, start, answer, size, sums = received
        left = left[np.lexsort((sums[left], size[left], answer[left], start[left], device[left]))]
        counts = np.bincount(device[left], minlength=len(self.is_accelerator))
        place = np.arange(len(left)) - np.cumsum(counts)[device[left]]
        _, alike = np.unique(received, axis=1, return_inverse=True)
        return most(alike[left], place, int(alike.max(initial=0)) + 1, default)[alike]


def _until_free(moving: Longs, order: Longs, limit: int | None = None) -> Longs:
    """When each of these moves is free: at its answer, or when later ones of its device push it out. ``moving``: by move its device, start,
    answer and bytes; ``order``: places by device, then by start. ``limit``: tensors at a time. The rule is that of
    ``Communicator.keep``, except that a send that has been answered leaves at once."""
    end: Longs = moving[2].copy()
    limit = SENT_TENSORS if limit is None else limit
    crowded = np.isin(moving[0][order], _crowded(moving[:, order], limit))
    own = order[crowded]
    for place, time in _pushed_out(own.tolist(), moving[:, own].T.tolist(), limit):
        end[place] = time
    return end


def _crowded(moving: Longs, limit: int) -> Longs:
    """Devices on which moves may push others out: where more may be under way at a time. ``moving``: as in ``_until_free``, in order."""
    device, start, answer, size = moving
    scale, begun = int(answer.max(initial=0)) + 2, np.arange(1, len(device) + 1)
    answers = device * scale + np.maximum(answer, start + 1)
    by_answer = np.argsort(answers)
    answered = np.searchsorted(answers[by_answer], device * scale + start, side="right")
    under_way = np.cumsum(size) - np.append(0, np.cumsum(size[by_answer]))[answered]
    crowded: Longs = np.unique(device[(begun - answered > limit) | ((begun - answered > 1) & (under_way > SENT_BYTES))])
    return crowded


def _pushed_out(places: Iterable[int], moving: Iterable[tuple[int, int, int, int]], limit: int) -> Iterator[tuple[int, int]]:
    """(place, when) of the moves that later ones push out."""
    queue: deque[tuple[int, int, int]] = deque()
    under_way, before, soonest = 0, -1, 0  # no answer comes before the soonest one
    for place, (device, start, answer, size) in zip(places, moving, strict=True):
        if device != before:
            queue.clear()
            under_way, before, soonest = 0, device, answer
        if soonest <= start:
            queue = deque([other for other in queue if other[1] > start])
            under_way = sum(other[2] for other in queue)
            soonest = min((other[1] for other in queue), default=answer)
        queue.append((place, answer, size))
        soonest = min(soonest, answer)
        under_way += size
        while len(queue) > limit or (len(queue) > 1 and under_way > SENT_BYTES):
            oldest, _, freed = queue.popleft()
            under_way -= freed
            yield oldest, start
