"""Snapshots of the current strategy's simulation, so that the next simulation can start near its first difference (compiled)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from soap.simulator.compiled.arrays import copy, fill
from soap.simulator.compiled.change import CHANGED, FIELDS, OLD_SLOTS, REPLACED, REPLACED_OPERATORS, REPULLED, Edit, Undo
from soap.simulator.compiled.events import NO_BOUND, begin, play
from soap.simulator.compiled.graph_arrays import GraphTables, IntRows, LongRows, Longs
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.machine_code import entry
from soap.simulator.compiled.readiness import push, queue_of
from soap.simulator.compiled.state import BACKWARD_TILE, FORWARD_TILE, SLOTS, WEIGHTS_TILE, Groups, State
from soap.simulator.compiled.trial import CURSOR, DELAY, IN_RUN, MAKESPAN, RUN, SKIPPED, TAKEN, WAITING, Trial, clock_count, make_trial

LEAST_SNAPSHOTS, MOST_SNAPSHOTS = 4, 24
MOST_BYTES = 2**26
"""Most bytes of all snapshots together."""

MADE, COUNT, SINCE, BETWEEN = range(4)
"""Places in ``History.at``. ``MADE``: snapshots made so far. ``COUNT``: how many there will be. ``SINCE``: proposals since the last
accepted one. ``BETWEEN``: a running mean of proposals between two accepted ones, times ``SMOOTHING``."""

SMOOTHING = 8


class History(NamedTuple):
    """Snapshot k shows the simulation before it takes the task at ``place[k]`` of the order. ``makespan[k]``: the latest end so far. Per
    slot: ``met`` (number of predecessors that have ended), ``ready`` (their latest end). ``clocks``: see ``Trial``. Per device: ``gone``
    (ns of tiles that have been taken). ``pending[k, :pending_n[k]]``: ready slots. Snapshots are made when they are first needed, one after
    the other, while ``now`` takes the same tasks again.

    ``first_sum``: place of the first backward pass or sum of gradients. ``last_backward``: by device, place of its last backward pass.
    ``first_update``: a place before which no device has done its last backward pass or its update.
    """

    place: Longs
    makespan: Longs
    met: IntRows
    ready: LongRows
    clocks: LongRows
    gone: LongRows
    pending: IntRows
    pending_n: Longs
    at: Longs
    first_sum: Longs
    first_update: Longs
    last_backward: Longs
    now: Trial


def make_history(slots: int, resources: int, devices: int) -> History:
    """Room for snapshots of a state with this many slots."""
    count = min(MOST_SNAPSHOTS, max(1, MOST_BYTES // (16 * slots + 8 * resources)))
    zeros: Any = np.zeros
    longs, ints = (lambda *n: zeros(n, np.int64)), (lambda *n: zeros(n, np.int32))
    return History(
        place=longs(count),
        makespan=longs(count),
        met=ints(count, slots),
        ready=longs(count, slots),
        clocks=longs(count, clock_count(resources, devices)),
        gone=longs(count, devices),
        pending=ints(count, slots),
        pending_n=longs(count),
        at=longs(8),
        first_sum=longs(1),
        first_update=longs(1),
        last_backward=longs(devices),
        now=make_trial(slots, resources, devices),
    )


@entry
def retrace(G: GraphTables, C: State, P: Trial, H: History) -> None:
    """Begin the history of ``P``, a complete simulation of the current state. No snapshot is made yet."""
    total = P.size[TAKEN]
    begin(G, C, P, H.now, total, True)
    fill(H.last_backward, 0, len(H.last_backward), 0)
    H.first_sum[0] = H.first_update[0] = total
    last_forward = 0
    for place in range(total):
        slot = P.order[place]
        kind = C.kind[slot]
        if kind == FORWARD_TILE:
            last_forward = place
        elif kind in (BACKWARD_TILE, WEIGHTS_TILE):
            H.last_backward[C.resource[slot]] = place
        if kind == BACKWARD_TILE or C.owner[slot] < 0:
            H.first_sum[0] = min(H.first_sum[0], place)
    for device in range(len(H.last_backward)):
        if C.alive[device]:
            H.first_update[0] = min(H.first_update[0], H.last_backward[device])
    H.at[MADE] = 0
    _choose_count(H)
    count = H.at[COUNT]
    for k in range(count):
        H.place[k] = k * (last_forward + 1) // count  # the first difference that a change makes is among forward passes


@compiled
def _choose_count(H):  # type: ignore[no-untyped-def]
    """Choose the number of snapshots. Making k of them takes time proportional to k, once per strategy, and saves each proposal time
    proportional to 1 - 1/k."""
    H.at[BETWEEN] += H.at[SINCE] - H.at[BETWEEN] // SMOOTHING
    H.at[SINCE] = 0
    count = LEAST_SNAPSHOTS
    while count < len(H.place) and count * count * SMOOTHING < 6 * H.at[BETWEEN]:
        count += 1
    H.at[COUNT] = min(count, len(H.place))


@compiled
def take_snapshots(G: GraphTables, C: State, R: Groups, P: Trial, H: History, latest: int) -> None:
    """Make the snapshots up to the place ``latest``. Call it before anything is changed."""
    H.at[SINCE] += 1
    while H.at[MADE] < H.at[COUNT] and H.place[H.at[MADE]] <= latest:
        k = H.at[MADE]
        H.makespan[k] = play(G, C, R, P, H.now, NO_BOUND, H.place[k], False)
        _note(C, P, H, H.now, k)
        H.at[MADE] = k + 1


@compiled
def _note(C, P, H, T, k):  # type: ignore[no-untyped-def]
    """Make snapshot k of ``T``. All of ``P`` is the run of ``T``, so the slots that are ready in ``T`` wait in the run."""
    for slot in range(C.used[SLOTS]):
        H.met[k, slot] = C.waits[slot] - max(0, T.left[slot])
        H.ready[k, slot] = T.ready[slot]
    for i in range(len(T.clocks)):
        H.clocks[k, i] = T.clocks[i]
    for device in range(len(T.rest)):
        H.gone[k, device] = C.busy[device] + C.duration[device] - T.rest[device]
    found, place = 0, T.size[TAKEN]
    while found < T.size[WAITING]:
        slot = P.order[place]
        if T.left[slot] == IN_RUN:
            H.pending[k, found] = slot
            found += 1
        place += 1
    H.pending_n[k] = found


@compiled
def first_tile(C: State, P: Trial, E: Edit) -> int:
    """The first place of a tile of the operators that the edit changes."""
    place = P.size[TAKEN]
    for i in range(E.count[REPLACED_OPERATORS]):
        op = E.operator[i]
        for slot in range(C.tile_slot[op], C.tile_slot[op] + C.tiles[op]):
            place = min(place, P.place[slot])
    return place


@compiled
def first_difference(G: GraphTables, C: State, U: Undo, P: Trial) -> int:
    """A place in the order of ``P`` before which a change makes no difference: no source of a changed block's edges is taken before it."""
    place = P.size[TAKEN]
    if U.what[REPULLED]:
        return 0
    for n in range(U.what[CHANGED]):
        at = n * FIELDS
        op = U.fields[at]
        if G.counts_labels[op]:
            return 0  # its block has tasks that wait for nothing
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
    """Begin a simulation at the last snapshot up to the place ``latest``. False if that is the beginning itself.

    ``sums``: whether the sums of gradients are made already; if not, they are left out, and will be made when the simulation pauses. If
    they are, no device's update was ready before ``latest``, but an update may be ready now if its device's last tile has moved to another
    one.
    """
    k = 0
    while k + 1 < H.at[MADE] and H.place[k + 1] <= latest:
        k += 1
    if H.place[k] == 0:
        return False
    _copy_met(T.left, T.ready, C.waits, H.met[k], H.ready[k], U.what[OLD_SLOTS], C.used[SLOTS])
    copy(T.clocks, 0, H.clocks[k], 0, len(T.clocks))
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
                push(queue_of(C, P, T), device, T.ready[device])
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
    """Copy from the earlier simulation the tasks that were skipped."""
    for place in range(T.size[SKIPPED]):
        slot = P.order[place]
        T.order[place] = slot
        T.ready[slot], T.start[slot], T.end[slot] = P.ready[slot], P.start[slot], P.end[slot]
    T.size[SKIPPED] = 0
