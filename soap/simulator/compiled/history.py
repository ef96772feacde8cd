"""Snapshots of the current strategy's simulation, so that the next one may begin where it first differs (compiled)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from soap.simulator.compiled.arrays import copy, fill
from soap.simulator.compiled.change import CHANGED, FIELDS, OLD_SLOTS, REPLACED, REPLACED_OPERATORS, REPULLED, Edit, Undo
from soap.simulator.compiled.events import (
    CURSOR,
    DELAY,
    IN_RUN,
    MAKESPAN,
    PER_DEVICE,
    RUN,
    SKIPPED,
    TAKEN,
    WAITING,
    Trial,
    has_ports,
    hold,
    push,
)
from soap.simulator.compiled.graph_arrays import GraphTables, Ints, Longs
from soap.simulator.compiled.jit import compiled, entry
from soap.simulator.compiled.state import BACKWARD_TILE, FORWARD_TILE, OTHER, SLOTS, SYNC_BUCKET, UPDATE_DEVICE, Groups, State

LEAST_SNAPSHOTS, MOST_SNAPSHOTS = 4, 24
MOST_BYTES = 2**26
"""What all snapshots may take together."""

MADE, NOW, LATEST, READY, COUNT, SINCE, BETWEEN = range(7)
"""Places in ``History.at``: snapshots that are made; the place before which ``met_now`` to ``gone_now`` are valid; latest end till
there; how many slots have been ready till there; how many snapshots there are to be; proposals since something was accepted; and how many
it has been of late (times ``SMOOTHING``)."""

SMOOTHING = 8


class History(NamedTuple):
    """Snapshot k is of the time before the task at ``place[k]`` of the order is taken. Per slot: ``met`` (predecessors that have ended),
    ``ready`` (by these). Twice per resource, then ``PER_DEVICE`` times per device: ``free`` (see ``Trial``). Per device: ``gone`` (ns of
    tiles that have been taken). ``pending[k, :pending_n[k]]``: ready slots. Snapshots are made when they are first needed, one after the
    other.

    ``first_sum``: place of the first backward pass or sum of gradients. ``first_update``: a place before which no device has done its last
    backward pass, nor its update; ``last_backward``: places of these passes. ``met_now`` to ``gone_now``: working memory."""

    place: Longs
    makespan: Longs
    met: NDArray[np.int32]
    ready: NDArray[np.int64]
    free: NDArray[np.int64]
    gone: NDArray[np.int64]
    pending: NDArray[np.int32]
    pending_n: Longs
    at: Longs
    first_sum: Longs
    first_update: Longs
    last_backward: Longs
    met_now: Ints
    ready_now: Longs
    free_now: Longs
    gone_now: Longs


def make_history(slots: int, resources: int, devices: int) -> History:
    """Room for snapshots of a state with so many slots."""
    count = min(MOST_SNAPSHOTS, max(1, MOST_BYTES // (16 * slots + 8 * resources)))
    longs, ints = (lambda *n: np.zeros(n, np.int64)), (lambda *n: np.zeros(n, np.int32))
    free = 2 * resources + PER_DEVICE * devices
    tables = (ints(count, slots), longs(count, slots), longs(count, free), longs(count, devices), ints(count, slots))
    now = (ints(slots), longs(slots), longs(free), longs(devices))
    return History(longs(count), longs(count), *tables, longs(count), longs(8), longs(1), longs(1), longs(devices), *now)


@entry
def retrace(C: State, P: Trial, H: History) -> None:
    """Begin with the history of ``P``, a complete simulation of the current state."""
    slots, total = C.used[SLOTS], P.size[TAKEN]
    fill(H.met_now, 0, slots, 0)
    fill(H.ready_now, 0, slots, 0)
    fill(H.free_now, 0, len(H.free_now), 0)
    fill(H.gone_now, 0, len(H.gone_now), 0)
    fill(H.last_backward, 0, len(H.last_backward), 0)
    H.first_sum[0] = H.first_update[0] = total
    ready = last_forward = 0
    for place in range(total):
        slot = P.order[place]
        kind = C.kind[slot]
        ready += C.waits[slot] == 0
        if kind == FORWARD_TILE:
            last_forward = place
        elif kind == BACKWARD_TILE:
            H.last_backward[C.resource[slot]] = place
        if kind == BACKWARD_TILE or C.owner[slot] < 0:
            H.first_sum[0] = min(H.first_sum[0], place)
    for device in range(len(H.last_backward)):
        if C.alive[device]:
            H.first_update[0] = min(H.first_update[0], H.last_backward[device])
    H.at[MADE], H.at[NOW], H.at[LATEST], H.at[READY] = 0, 0, 0, ready
    _choose_count(H)
    count = H.at[COUNT]
    for k in range(count):
        H.place[k] = k * (last_forward + 1) // count  # a change makes a difference to a tile's forward pass, if to anything


@compiled
def _choose_count(H):  # type: ignore[no-untyped-def]
    """Making k snapshots takes time in proportion to k, once per strategy; they save each proposal what is proportional to 1 - 1/k."""
    H.at[BETWEEN] += H.at[SINCE] - H.at[BETWEEN] // SMOOTHING
    H.at[SINCE] = 0
    count = LEAST_SNAPSHOTS
    while count < len(H.place) and count * count * SMOOTHING < 6 * H.at[BETWEEN]:
        count += 1
    H.at[COUNT] = min(count, len(H.place))


@compiled
def take_snapshots(G: GraphTables, C: State, R: Groups, P: Trial, H: History, latest: int) -> None:
    """Make those that are not behind the place ``latest``. Before anything is changed."""
    slots = C.used[SLOTS]
    H.at[SINCE] += 1
    while H.at[MADE] < H.at[COUNT] and H.place[H.at[MADE]] <= latest:
        k = H.at[MADE]
        H.at[LATEST] = _advance(
            C.kind, C.owner, C.index, C.alive, C.arena, C.row, C.back_row, C.sync_row, C.tiles, C.resource, C.resource_n, C.duration,
            C.launch, C.latency, C.handling, C.waits, G.source_ptr, G.source, R.static, R.port_device, R.restart, R.sets.ptr, R.sets.item,
            P.order, P.start, P.end, H.met_now, H.ready_now, H.free_now, H.gone_now, H.at, H.place[k], H.at[LATEST],
        )  # fmt: skip
        H.makespan[k] = H.at[LATEST]
        copy(H.met[k], 0, H.met_now, 0, slots)
        copy(H.ready[k], 0, H.ready_now, 0, slots)
        copy(H.free[k], 0, H.free_now, 0, len(H.free_now))
        copy(H.gone[k], 0, H.gone_now, 0, len(H.gone_now))
        H.pending_n[k] = _pending(C.waits, P.order, H.met_now, H.pending[k], H.place[k], H.at[READY] - H.place[k])
        H.at[MADE] = k + 1


@compiled
def _pending(waits, order, met, pending, taken, count):  # type: ignore[no-untyped-def]
    """Find the slots that are ready and have not been taken: so many."""
    n, place = 0, taken
    while n < count:
        slot = order[place]
        if met[slot] == waits[slot]:
            pending[n] = slot
            n += 1
        place += 1
    return n


@compiled
def _advance(  # type: ignore[no-untyped-def]
    kinds, owner, index, alive, arena, rows, back_row, sync_row, tiles, resources, resource_n, durations, launches, latencies, handlings,
    waits, source_ptr, source, static, port_device, restart, set_ptr, set_item, order, starts, ends, met, ready, free, gone, at, last,
    makespan,
):  # fmt: skip
    """Take the tasks before the place ``last`` again; the latest end so far."""
    slow = len(free) - len(gone)
    computed = slow - len(gone)
    launched = computed - len(gone)
    handled = launched - len(gone)
    lasts = restart[len(restart) - 2]
    sums_yield, devices = has_ports(port_device), len(gone)
    ready_n = at[READY]
    for place in range(at[NOW], last):
        slot = order[place]
        end, kind, op, resource = ends[slot], kinds[slot], owner[slot], resources[slot]
        makespan = max(makespan, end)
        if kind <= BACKWARD_TILE or kind == UPDATE_DEVICE:
            free[resource] = end
            if kind != UPDATE_DEVICE:
                gone[resource] += durations[slot]
                free[launched + resource] += launches[slot]
                if starts[slot] > free[computed + resource]:
                    free[slow + resource] = lasts
                free[slow + resource] = max(0, free[slow + resource] - durations[slot])
                free[computed + resource] = end
        else:
            count, left_ns, own_ns, taken = resource_n[slot], end - latencies[slot], handlings[slot], place + 1
            start, sent, yields = starts[slot], durations[slot] - latencies[slot], sums_yield and kind == SYNC_BUCKET
            held, first = (static, resource) if resource >= 0 else (arena, -1 - resource)
            hold(free, held, first, count, ready[slot], start, left_ns, sent, own_ns, yields, devices, taken, handled, port_device)
        first_row, last_row, own = 0, 1, -1
        if kind == FORWARD_TILE:
            own = slot + tiles[op]
            if not alive[own]:
                own = -1
        elif kind == BACKWARD_TILE:
            first_row, last_row, own = source_ptr[op], source_ptr[op + 1] + (sync_row[op] >= 0), resource
        elif kind == SYNC_BUCKET:
            last_row = 0
            for i in range(set_ptr[index[slot]], set_ptr[index[slot] + 1]):
                met[set_item[i]] += 1
                ready[set_item[i]] = max(ready[set_item[i]], end)
                ready_n += met[set_item[i]] == waits[set_item[i]]
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
                met[arena[k]] += 1
                ready[arena[k]] = max(ready[arena[k]], end)
                ready_n += met[arena[k]] == waits[arena[k]]
        if own >= 0:
            met[own] += 1
            ready[own] = max(ready[own], end)
            ready_n += met[own] == waits[own]
    at[NOW], at[READY] = last, ready_n
    return makespan


@compiled
def first_tile(C: State, P: Trial, E: Edit) -> int:
    """The place of the first tile of the operators that are to be changed."""
    place = P.size[TAKEN]
    for i in range(E.count[REPLACED_OPERATORS]):
        op = E.operator[i]
        for slot in range(C.tile_slot[op], C.tile_slot[op] + C.tiles[op]):
            place = min(place, P.place[slot])
    return place


@compiled
def first_difference(G: GraphTables, C: State, U: Undo, P: Trial) -> int:
    """A place of the order of ``P`` before which a change makes no difference: no source of an edge of a changed block is taken before."""
    place = P.size[TAKEN]
    if U.what[REPULLED]:
        return 0
    for n in range(U.what[CHANGED]):
        at = n * FIELDS
        op = U.fields[at]
        for slot in range(U.fields[at + 6], U.fields[at + 6] + U.fields[at + 7]):
            place = min(place, P.place[slot])
            if n < U.what[REPLACED] and P.ready[slot] == 0:
                return 0  # a tile that is replaced was ready from the beginning
        for i in range(G.reader_ptr[op], G.reader_ptr[op + 1]):
            reader = G.reader[i]
            first = C.tile_slot[reader] + C.tiles[reader]
            for slot in range(first, first + C.tiles[reader]):
                if C.alive[slot] and slot < U.what[OLD_SLOTS]:
                    place = min(place, P.place[slot])
    for n in range(U.what[REPLACED]):
        op = U.fields[n * FIELDS]
        for slot in range(C.tile_slot[op], C.tile_slot[op] + C.tiles[op]):
            if C.waits[slot] == 0:
                return 0
    return place


@compiled
def resume(C: State, U: Undo, P: Trial, T: Trial, H: History, latest: int, sums: bool) -> bool:
    """Begin a simulation at the last snapshot that is not behind the place ``latest``. False if there is none but the beginning itself.
    Without ``sums``, those of gradients are left out: they will be made when the simulation has paused. With them, no device's update was
    ready before ``latest``; one whose last tile has gone to another device may be now."""
    k = 0
    while k + 1 < H.at[MADE] and H.place[k + 1] <= latest:
        k += 1
    if H.place[k] == 0:
        return False
    _copy_met(T.left, T.ready, C.waits, H.met[k], H.ready[k], U.what[OLD_SLOTS], C.used[SLOTS])
    copy(T.free, 0, H.free[k], 0, len(T.free))
    for device in range(len(T.rest)):
        T.rest[device] = C.busy[device] - H.gone[k, device] + (C.duration[device] if sums else 0)
    fill(T.size, 0, len(T.size), 0)
    T.size[CURSOR] = T.size[TAKEN] = T.size[SKIPPED] = H.place[k]
    T.size[RUN], T.size[MAKESPAN], T.size[WAITING], T.size[DELAY] = P.size[TAKEN], H.makespan[k], 0, 0
    for i in range(H.pending_n[k]):
        slot = H.pending[k, i]
        if sums or C.owner[slot] >= 0:
            T.left[slot] = IN_RUN
            T.size[WAITING] += 1
    if sums:
        for device in range(len(T.rest)):
            if C.alive[device] and T.left[device] == 0:
                push(T.heap_ready, T.heap_key, T.heap_slot, T.size, T.ready[device], C.key[device], device, C.subkey)
    return True


@compiled
def _copy_met(left, ready, waits, met, ready_then, old, slots):  # type: ignore[no-untyped-def]
    for slot in range(old):
        left[slot] = waits[slot] - met[slot]
        ready[slot] = ready_then[slot]
    for slot in range(old, slots):
        left[slot] = waits[slot]
        ready[slot] = 0


@entry
def complete(P: Trial, T: Trial) -> None:
    """Take over from the earlier simulation what was skipped."""
    for place in range(T.size[SKIPPED]):
        slot = P.order[place]
        T.order[place] = slot
        T.ready[slot], T.start[slot], T.end[slot] = P.ready[slot], P.start[slot], P.end[slot]
    T.size[SKIPPED] = 0
