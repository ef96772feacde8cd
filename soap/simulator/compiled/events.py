"""The event loop (compiled). The counterpart of ``reference.simulate``.

Tasks are taken in the order of (ready time, key). Beside a heap, the loop knows the order of an earlier simulation, its *run*. As long as
tasks become ready with one and the same delay against the earlier simulation, their order then is their order now, and they need no
heap. What
becomes ready with another delay goes through the heap. The first of both is taken, so that the outcome never depends on the run.

A simulation may be bounded. On each device all tiles that have not been taken are still to come, one after the other, and its update: as
soon as a device that has just been idle cannot be done in time, nor can the iteration.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from soap.simulator.compiled.arrays import copy, fill
from soap.simulator.compiled.graph_arrays import GraphTables, Ints, Longs
from soap.simulator.compiled.jit import compiled, entry
from soap.simulator.compiled.state import (
    BACKWARD_TILE,
    FORWARD_TILE,
    OTHER,
    PULLS,
    SLOTS,
    SYNC_BUCKET,
    SYNCS,
    UPDATE_DEVICE,
    Groups,
    State,
)

IN_RUN = -1
"""``left`` of a task that is ready and waits in the run."""

HEAP, CURSOR, WAITING, DELAY, TAKEN, MAKESPAN, RUN, HEAPED, SKIPPED = range(9)
"""Places in ``Trial.size``: entries of the heap; the run's next place; tasks that wait in the run, and their delay; tasks taken; latest
end; length of the run; how many tasks went through the heap; how many at the beginning were as in the earlier simulation."""

STOPPED, PAUSED = -1, -2
"""Instead of a makespan: the bound cannot be kept; a backward pass is next, and gradients' sums are to be made first."""

NO_BOUND = 1 << 62

PER_DEVICE = 4
"""Figures of each device behind those of the resources in ``Trial.free``."""


class Trial(NamedTuple):
    """A simulation under way, and its outcome. Per slot: ``left`` (predecessors that have not ended), ``ready``, ``start``, ``end`` in ns.
    ``order``: slots as they were taken. ``free``: when each resource is free; then, when it is but for what yields; then, per device, the
    place in the order, from 1 on, of the communication that it was last busy with; ns until what was taken has been launched; when its last
    tile ended; and for how many ns of the next ones it is slower, as it has waited. ``rest``: per device, ns at least of what it has still
    to do. ``heap_``: the heap. ``place``: where a slot stands in ``order`` (valid once it has become a run)."""

    size: Longs
    left: Ints
    ready: Longs
    start: Longs
    end: Longs
    order: Ints
    place: Ints
    free: Longs
    rest: Longs
    heap_ready: Longs
    heap_key: Longs
    heap_slot: Ints


def make_trial(slots: int, resources: int, devices: int) -> Trial:
    """Room for so many slots and resources."""
    longs, ints = (lambda n: np.zeros(n, np.int64)), (lambda n: np.zeros(n, np.int32))
    per_slot = (ints(slots), longs(slots), longs(slots), longs(slots), ints(slots), ints(slots))
    return Trial(longs(16), *per_slot, longs(2 * resources + PER_DEVICE * devices), longs(devices), longs(slots), longs(slots), ints(slots))


@compiled
def _is_before(heap_ready, heap_key, heap_slot, i, ready, key, slot, subkey):  # type: ignore[no-untyped-def]
    """Whether entry ``i`` of a heap is taken before a slot, by when they are ready, then by their keys. ``subkey``: of all slots."""
    if heap_ready[i] != ready:
        return heap_ready[i] < ready
    return heap_key[i] < key or (heap_key[i] == key and subkey[heap_slot[i]] < subkey[slot])


@compiled
def push(heap_ready, heap_key, heap_slot, size, ready, key, slot, subkey):  # type: ignore[no-untyped-def]
    """Into a heap of four children per node."""
    i = size[HEAP]
    size[HEAP] = i + 1
    size[HEAPED] += 1
    while i > 0:
        parent = (i - 1) >> 2
        if _is_before(heap_ready, heap_key, heap_slot, parent, ready, key, slot, subkey):
            break
        heap_ready[i], heap_key[i], heap_slot[i] = heap_ready[parent], heap_key[parent], heap_slot[parent]
        i = parent
    heap_ready[i], heap_key[i], heap_slot[i] = ready, key, slot


@compiled
def _pop(heap_ready, heap_key, heap_slot, size, subkey):  # type: ignore[no-untyped-def]
    """Remove the first entry; its slot."""
    first = heap_slot[0]
    last = size[HEAP] - 1
    size[HEAP] = last
    ready, key, slot = heap_ready[last], heap_key[last], heap_slot[last]
    i = 0
    while True:
        child = 4 * i + 1
        if child >= last:
            break
        best = child
        for other in range(child + 1, min(child + 4, last)):
            if _is_before(heap_ready, heap_key, heap_slot, other, heap_ready[best], heap_key[best], heap_slot[best], subkey):
                best = other
        if not _is_before(heap_ready, heap_key, heap_slot, best, ready, key, slot, subkey):
            break
        heap_ready[i], heap_key[i], heap_slot[i] = heap_ready[best], heap_key[best], heap_slot[best]
        i = best
    heap_ready[i], heap_key[i], heap_slot[i] = ready, key, slot
    return first


@compiled
def _settle(size, left, ready, place, before, key, subkey, heap_ready, heap_key, heap_slot, slot, end):  # type: ignore[no-untyped-def]
    """One more predecessor of a slot has ended. ``place``, ``before``: places and ready times of the earlier simulation."""
    rest = left[slot] - 1
    left[slot] = rest
    when = max(ready[slot], end)
    ready[slot] = when
    if rest == 0:
        at = place[slot]
        waits = False
        if size[CURSOR] <= at < size[RUN]:
            delay = when - before[slot]
            if size[WAITING] == 0:
                size[DELAY] = delay
            waits = delay == size[DELAY]
        if waits:
            left[slot] = IN_RUN
            size[WAITING] += 1
        else:
            push(heap_ready, heap_key, heap_slot, size, when, key[slot], slot, subkey)


@compiled
def make_ready(C: State, P: Trial, T: Trial, slot: int) -> None:
    """A slot that waits for nothing."""
    at = P.place[slot]
    if T.size[CURSOR] <= at < T.size[RUN] and (T.size[WAITING] == 0 or T.size[DELAY] == -P.ready[slot]):
        T.size[DELAY] = -P.ready[slot]
        T.left[slot] = IN_RUN
        T.size[WAITING] += 1
    else:
        push(T.heap_ready, T.heap_key, T.heap_slot, T.size, 0, C.key[slot], slot, C.subkey)


@compiled
def begin(G: GraphTables, C: State, P: Trial, T: Trial, run: int, sums: bool) -> None:
    """Before the first task. ``run``: how much of the earlier simulation's order is one; 0 for none. ``sums``: whether those of
    gradients are
    made, or will be when the simulation has paused."""
    slots = C.used[SLOTS]
    fill(T.free, 0, len(T.free), 0)
    for device in range(len(C.busy)):
        T.rest[device] = C.busy[device] + (C.duration[device] if sums else 0)
    copy(T.left, 0, C.waits, 0, slots)
    fill(T.ready, 0, slots, 0)
    fill(T.size, 0, len(T.size), 0)
    T.size[RUN] = run
    for slot in range(C.pull_slot[0], C.pull_slot[0] + C.used[PULLS]):
        if T.left[slot] == 0:
            make_ready(C, P, T, slot)
    for op in range(len(G.backward)):
        if C.loose[op]:
            for slot in range(C.tile_slot[op], C.tile_slot[op] + C.tiles[op]):
                if T.left[slot] == 0:
                    make_ready(C, P, T, slot)
    if sums:
        make_sums_ready(C, P, T)


@compiled
def make_sums_ready(C: State, P: Trial, T: Trial) -> None:
    """Sums and updates, none of whose predecessors has ended: those of parameters to which no gradient flows are ready."""
    for part in range(2):
        first, last = (0, len(C.busy)) if part else (C.sync_slot[0], C.sync_slot[0] + C.used[SYNCS])
        for slot in range(first, last):
            T.left[slot], T.ready[slot] = C.waits[slot], 0
            if C.waits[slot] == 0:
                make_ready(C, P, T, slot)


@compiled
def any_sum_is_ready(C: State) -> bool:
    """Whether some sum or update waits for nothing at all."""
    found = False
    for slot in range(len(C.busy)):
        found |= C.waits[slot] == 0
    for slot in range(C.sync_slot[0], C.sync_slot[0] + C.used[SYNCS]):
        found |= C.waits[slot] == 0
    return found


@compiled
def is_late(T: Trial, at_most: int) -> bool:
    """Whether some device cannot be done in time."""
    late = False
    for device in range(len(T.rest)):
        late |= T.free[device] + T.rest[device] > at_most
    return late


@compiled
def hold(free, held, first, count, ready, start, end, sent, handling, yields, devices, taken, handled, port_device):  # type: ignore[no-untyped-def]
    """Something that is no tile, the ``taken``-th task, holds ``count`` resources until ``end``; the devices of their ports are busy with
    it for ``handling`` ns, each once. ``sent``: for how long it would hold links that it has for itself. ``handled``: where in ``free`` it
    says of each device what it was busy with last."""
    for i in range(first, first + count):
        resource = held[i]
        if yields or resource < devices:
            free[resource] = end
        else:
            free[(handled >> 1) + resource] = end
            free[resource] = max(end, free[resource] + sent if free[resource] > start else 0)
        device = port_device[resource]
        if device >= 0 and free[handled + device] != taken:
            free[handled + device] = taken
            free[device] = max(free[device], ready) + handling


@compiled
def free_at(free, held, first, count, ready, yields, devices, passable):  # type: ignore[no-untyped-def]
    """When something that is no tile can start: links need be free but for what yields, unless it does so itself."""
    start = ready
    for i in range(first, first + count):
        start = max(start, free[held[i]] if yields or held[i] < devices else free[passable + held[i]])
    return start


@compiled
def shared_ns(free, held, first, count, start, devices):  # type: ignore[no-untyped-def]
    """For how long it shares links with what yields, at most."""
    longest = 0
    for i in range(first, first + count):
        if held[i] >= devices:
            longest = max(longest, free[held[i]] - start)
    return longest


@compiled
def has_ports(port_device):  # type: ignore[no-untyped-def]
    """Whether sums of gradients yield."""
    found = False
    for device in port_device:
        found |= device >= 0
    return found


@compiled
def longer_ns(restart, computed):  # type: ignore[no-untyped-def]
    """``Restart.longer_ns``."""
    i = 2
    while i < len(restart) and restart[i] <= computed:
        i += 2
    before, less = restart[i - 2], restart[i - 1]
    return less if i == len(restart) else less + (restart[i + 1] - less) * (computed - before) // (restart[i] - before)


@compiled
def play(G: GraphTables, C: State, R: Groups, P: Trial, T: Trial, at_most: int, pause: bool) -> int:
    """Take tasks until none is left, and return the makespan in ns; or STOPPED if that would exceed ``at_most``; or PAUSED, if
    ``pause``, before the first backward pass of a tile."""
    return _play(
        T.size, T.left, T.ready, T.start, T.end, T.order, T.free, T.rest, T.heap_ready, T.heap_key, T.heap_slot, P.order, P.place, P.ready,
        C.key, C.subkey, C.duration, C.launch, C.latency, C.handling, C.resource, C.resource_n, C.kind, C.owner, C.index, C.alive, C.alias,
        C.arena, C.row, C.back_row, C.sync_row, C.tiles, G.source_ptr, G.source, R.static, R.port_device, R.restart, R.sets.ptr,
        R.sets.item, at_most, pause,
    )  # fmt: skip


@compiled
def _play(  # type: ignore[no-untyped-def]
    size, left, ready, starts, ends, order, free, rest, heap_ready, heap_key, heap_slot, run, place, before, key, subkey, durations,
    launches, latencies, handlings, resources, resource_n, kinds, owner, index, alive, alias, arena, rows, back_row, sync_row, tiles,
    source_ptr, source, static, port_device, restart, set_ptr, set_item, at_most, pause,
):  # fmt: skip
    """``play`` on plain arrays: without reference counts, which would cost more than everything else."""
    slow = len(free) - len(rest)
    computed = slow - len(rest)
    launched = computed - len(rest)
    handled = launched - len(rest)
    lasts = restart[len(restart) - 2]
    sums_yield, devices = has_ports(port_device), len(rest)
    while True:
        from_run = size[WAITING] > 0
        slot = 0
        if from_run:
            cursor = size[CURSOR]
            slot = alias[run[cursor]]
            while slot < 0 or left[slot] != IN_RUN:
                cursor += 1
                slot = alias[run[cursor]]
            size[CURSOR] = cursor
            if size[HEAP] > 0 and _is_before(heap_ready, heap_key, heap_slot, 0, ready[slot], key[slot], slot, subkey):
                from_run = False
        elif size[HEAP] == 0:
            return size[MAKESPAN]
        if not from_run:
            slot = heap_slot[0]
        kind = kinds[slot]
        if pause and kind == BACKWARD_TILE:
            return PAUSED
        if from_run:
            size[CURSOR] += 1
            size[WAITING] -= 1
            left[slot] = 0
        else:
            _pop(heap_ready, heap_key, heap_slot, size, subkey)
        order[size[TAKEN]] = slot
        size[TAKEN] += 1
        start, duration, resource = ready[slot], durations[slot], resources[slot]
        if kind <= BACKWARD_TILE or kind == UPDATE_DEVICE:
            if kind <= BACKWARD_TILE:
                launch = launches[slot]
                free[launched + resource] += launch
                start = max(start, free[launched + resource] - min(launch, duration) if launch > 0 else 0)
            idle = start > free[resource]
            start = max(start, free[resource])
            end = start + duration
            if kind <= BACKWARD_TILE:
                if start > free[computed + resource]:
                    free[slow + resource] = lasts
                if free[slow + resource] > 0:
                    end -= longer_ns(restart, lasts - free[slow + resource])
                    free[slow + resource] = max(0, free[slow + resource] - duration)
                    end += longer_ns(restart, lasts - free[slow + resource])
                free[computed + resource] = end
            free[resource] = end
            rest[resource] -= duration
            if idle and end + rest[resource] > at_most:
                return STOPPED
        else:
            count, yields, at, own_ns = resource_n[slot], sums_yield and kind == SYNC_BUCKET, size[TAKEN], handlings[slot]
            sent = duration - latencies[slot]
            held, first = (static, resource) if resource >= 0 else (arena, -1 - resource)
            start = free_at(free, held, first, count, start, yields, devices, handled >> 1)
            end = start + duration + (0 if yields else min(sent, shared_ns(free, held, first, count, start, devices)))
            left_ns = end - latencies[slot]
            hold(free, held, first, count, ready[slot], start, left_ns, sent, own_ns, yields, devices, at, handled, port_device)
        starts[slot], ends[slot] = start, end
        if end > size[MAKESPAN]:
            size[MAKESPAN] = end
            if end > at_most:
                return STOPPED
        first_row, last_row, own, op = 0, 1, -1, owner[slot]
        if kind == FORWARD_TILE:
            own = slot + tiles[op]
            if not alive[own]:
                own = -1
        elif kind == BACKWARD_TILE:
            first_row, last_row, own = source_ptr[op], source_ptr[op + 1] + (sync_row[op] >= 0), resource
        elif kind == SYNC_BUCKET:
            for i in range(set_ptr[index[slot]], set_ptr[index[slot] + 1]):
                _settle(size, left, ready, place, before, key, subkey, heap_ready, heap_key, heap_slot, set_item[i], end)
            last_row = 0
        elif kind == UPDATE_DEVICE:
            last_row = 0
        for i in range(first_row, last_row):
            if kind == FORWARD_TILE:
                row = rows[op] + index[slot]
            elif kind == OTHER:
                row = index[slot]
            elif i < source_ptr[op + 1]:
                row = back_row[source[i]] + index[slot]
            else:
                row = sync_row[op] + index[slot]
            for k in range(arena[row], arena[row + 1]):
                _settle(size, left, ready, place, before, key, subkey, heap_ready, heap_key, heap_slot, arena[k], end)
        if own >= 0:  # a tile's own backward pass; behind that, the device's update
            _settle(size, left, ready, place, before, key, subkey, heap_ready, heap_key, heap_slot, own, end)


@entry
def simulate_all(G: GraphTables, C: State, R: Groups, P: Trial, T: Trial, run: int, at_most: int) -> int:
    """Play all tasks; the makespan in ns, or STOPPED if that would exceed ``at_most``. Start and end are left in ``T``. ``P``: an earlier
    simulation, of whose order the first ``run`` places are used."""
    begin(G, C, P, T, run, True)
    return play(G, C, R, P, T, at_most, False)


@entry
def keep_order(T: Trial) -> None:
    """Make the order of a complete simulation fit to be a run. What was not taken (tiles without a backward pass, devices without an
    update)
    has no place in it, whatever this trial held before."""
    fill(T.place, 0, len(T.place), -1)
    for place in range(T.size[TAKEN]):
        T.place[T.order[place]] = place
