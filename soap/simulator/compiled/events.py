"""The event loop (compiled). The counterpart of ``reference.simulate``.

Tasks are taken in the order of (ready time, key): see ``readiness``. The same loop plays a whole strategy; the part of one after the first
difference from an earlier simulation; and an earlier simulation once more, up to some place, to take a snapshot there (``history``).

A simulation may have a bound. Each device still has to run all its tiles that were not taken, one after the other, and its update. As soon
as a device that has just been idle cannot finish these in time, the iteration cannot either.
"""

from __future__ import annotations

from soap.simulator.compiled.arrays import copy, fill
from soap.simulator.compiled.device_clock import tile_end
from soap.simulator.compiled.graph_arrays import GraphTables
from soap.simulator.compiled.handles import arrays_of
from soap.simulator.compiled.jit import compiled, inlined
from soap.simulator.compiled.links import communicate
from soap.simulator.compiled.machine_code import entry
from soap.simulator.compiled.marks import ROW_BLOCKS
from soap.simulator.compiled.readiness import first_ready, make_ready, queue_of, settle, take
from soap.simulator.compiled.second_runs import weights_slot
from soap.simulator.compiled.state import (
    AGAIN_TILE,
    BACKWARD_TILE,
    FORWARD_TILE,
    PULLS,
    ROW,
    SLOTS,
    SYNCS,
    UPDATE_DEVICE,
    WEIGHTS_TILE,
    Groups,
    State,
)
from soap.simulator.compiled.trial import MAKESPAN, RUN, TAKEN, Trial

STOPPED, PAUSED = -1, -2
"""In place of a makespan. STOPPED: the bound cannot be kept. PAUSED: a backward pass is next, and sums of gradients must be made first."""

NO_BOUND = 1 << 62


@compiled
def begin(G: GraphTables, C: State, P: Trial, T: Trial, run: int, sums: bool) -> None:
    """Set up ``T`` before the first task. ``run``: how many places of the earlier simulation's order are used as the run; 0 for none.
    ``sums``: whether the sums of gradients are made already; if not, the simulation will pause for that."""
    slots = C.used[SLOTS]
    fill(T.clocks, 0, len(T.clocks), 0)
    for device in range(len(C.busy)):
        T.rest[device] = C.busy[device] + (C.duration[device] if sums else 0)
    copy(T.left, 0, C.waits, 0, slots)
    fill(T.ready, 0, slots, 0)
    fill(T.size, 0, len(T.size), 0)
    T.size[RUN] = run
    Q = queue_of(C, P, T)
    for slot in range(C.pull_slot[0], C.pull_slot[0] + C.used[PULLS]):
        if T.left[slot] == 0:
            make_ready(Q, slot, 0)
    for op in range(len(G.backward)):
        if C.loose[op]:
            for slot in range(C.tile_slot[op], C.tile_slot[op] + C.tiles[op]):
                if T.left[slot] == 0:
                    make_ready(Q, slot, 0)
        if G.counts_labels[op]:
            for slot in range(C.own_slot[op], C.own_slot[op] + C.own_count[op]):
                if T.left[slot] == 0:
                    make_ready(Q, slot, 0)
    if sums:
        make_sums_ready(C, P, T)


@compiled
def make_sums_ready(C: State, P: Trial, T: Trial) -> None:
    """Set up sums and updates, none of whose predecessors has ended. Those that wait for nothing (their parameters get no gradient) become
    ready."""
    Q = queue_of(C, P, T)
    for part in range(2):
        first, last = (0, len(C.busy)) if part else (C.sync_slot[0], C.sync_slot[0] + C.used[SYNCS])
        for slot in range(first, last):
            T.left[slot], T.ready[slot] = C.waits[slot], 0
            if C.waits[slot] == 0:
                make_ready(Q, slot, 0)


@compiled
def any_sum_is_ready(C: State) -> bool:
    """Whether some sum or update waits for nothing."""
    found = False
    for slot in range(len(C.busy)):
        found |= C.waits[slot] == 0
    for slot in range(C.sync_slot[0], C.sync_slot[0] + C.used[SYNCS]):
        found |= C.waits[slot] == 0
    return found


@compiled
def is_late(T: Trial, at_most: int) -> bool:
    """Whether some device cannot finish in time. One that has nothing left may be busy with communication for longer than the iteration."""
    late = False
    for device in range(len(T.rest)):
        late |= T.rest[device] > 0 and T.free[device] + T.rest[device] > at_most
    return late


@compiled
def play(graph: GraphTables, state: State, groups: Groups, earlier: Trial, trial: Trial, at_most: int, count: int, pause: bool) -> int:
    """Take tasks until none is left or ``count`` have been taken; returns the latest end in ns, which is the makespan if none is left.

    Returns STOPPED if that would exceed ``at_most``. With ``pause`` returns PAUSED before the first backward pass of a tile. ``earlier``:
    the simulation whose order is the run.
    """
    G, C, R, P, T = arrays_of(graph), arrays_of(state), arrays_of(groups), arrays_of(earlier), arrays_of(trial)
    Q, size = queue_of(C, P, T), T.size
    while size[TAKEN] < count:
        slot = first_ready(Q)
        if slot < 0:
            break
        kind = C.kind[slot]
        if pause and kind == BACKWARD_TILE:
            return PAUSED
        take(Q, slot)
        if kind <= BACKWARD_TILE or kind == UPDATE_DEVICE:
            device = C.resource[slot]
            before = T.free[device]
            end = _compute(C, R, T, slot)
            if T.start[slot] > before and end + T.rest[device] > at_most:
                return STOPPED
        else:
            end = communicate(C, R, T, slot)
        if end > size[MAKESPAN]:
            size[MAKESPAN] = end
            if end > at_most:
                return STOPPED
        tell_successors(G, C, settle, Q, slot, end)
    return size[MAKESPAN]


@inlined
def _compute(C, R, T, slot):  # type: ignore[no-untyped-def]
    """Run a pass of a tile, or a device's update; returns its end."""
    device, duration, start = C.resource[slot], C.duration[slot], T.ready[slot]
    tile = C.kind[slot] <= BACKWARD_TILE
    if tile:
        launch = C.launch[slot]
        T.launched[device] += launch
        start = max(start, T.launched[device] - min(launch, duration) if launch > 0 else 0)
    start = max(start, T.free[device])
    end = tile_end(R, T, device, start, duration) if tile else start + duration
    T.free[device] = end
    T.rest[device] -= duration
    T.start[slot], T.end[slot] = start, end
    return end


@inlined
def tell_successors(G, C, tell, Q, slot, end):  # type: ignore[no-untyped-def]
    """``tell(Q, successor, end)`` of each edge from a slot: ``settle``, or what notes the edge."""
    kind, op = C.kind[slot], C.owner[slot]
    if kind <= BACKWARD_TILE and C.follow[slot] > 0:
        tell(Q, C.follow[slot], end)
    if kind == FORWARD_TILE:
        _tell_row(C, tell, Q, C.row[op] + C.index[slot], end)
        if C.gather_row[op] >= 0:
            _tell_row(C, tell, Q, C.gather_row[op] + C.index[slot], end)
        own = slot + C.tiles[op]  # its own backward pass
        if C.alive[own]:
            tell(Q, own, end)
            _tell_blocks(C, tell, Q, slot, op, 0, end)
    elif kind == AGAIN_TILE:
        _tell_row(C, tell, Q, C.row[op] + C.tiles[op] + C.index[slot], end)
        _tell_blocks(C, tell, Q, slot, op, C.marks.again_block[C.marked[op]], end)
    elif kind >= ROW:
        if kind == ROW and C.marks.needed[C.marked[op]]:
            for i in range(G.source_ptr[op], G.source_ptr[op + 1]):
                if C.need_row[G.source[i]] >= 0:
                    _tell_row(C, tell, Q, C.need_row[G.source[i]] + C.index[slot], end)
        _tell_blocks(C, tell, Q, slot, op, ROW_BLOCKS + kind - ROW, end)
    elif kind == BACKWARD_TILE:
        for i in range(G.source_ptr[op], G.source_ptr[op + 1]):
            _tell_row(C, tell, Q, C.back_row[G.source[i]] + C.index[slot], end)
        if C.gather_row[op] >= 0:
            _tell_row(C, tell, Q, C.gather_row[op] + C.tiles[op] + C.index[slot], end)
        if C.divided[op]:
            tell(Q, weights_slot(C, op) + C.index[slot], end)
        else:
            _tell_gradients(C, tell, Q, slot, op, end)
    elif kind == WEIGHTS_TILE:
        _tell_gradients(C, tell, Q, slot, op, end)
    else:
        _tell_row(C, tell, Q, C.index[slot], end)


@inlined
def _tell_blocks(C, tell, Q, slot, op, block, end):  # type: ignore[no-untyped-def]
    """``tell_successors`` of what a tile's mark lets wait for its forward pass, or for one of the mark's rows. ``block``: of the slot."""
    M, mark = C.marks, C.marked[op]
    source = M.ptr[mark] + mark + (block - ROW_BLOCKS + 1 if block > 0 else 0)
    for i in range(M.tells_ptr[source], M.tells_ptr[source + 1]):
        tell(Q, slot + (M.tells[i] - block) * C.tiles[op], end)


@inlined
def _tell_gradients(C, tell, Q, slot, op, end):  # type: ignore[no-untyped-def]
    """``tell_successors`` of a tile that has made its parameters' gradients."""
    if C.sync_row[op] >= 0:
        _tell_row(C, tell, Q, C.sync_row[op] + C.tiles[op] + C.index[slot], end)
    tell(Q, C.resource[slot], end)  # the device's update


@inlined
def _tell_row(C, tell, Q, row, end):  # type: ignore[no-untyped-def]
    for k in range(C.arena[row], C.arena[row + 1]):
        tell(Q, C.arena[k], end)


@entry
def simulate_all(G: GraphTables, C: State, R: Groups, P: Trial, T: Trial, run: int, at_most: int) -> int:
    """Play all tasks; the makespan in ns, or STOPPED if it would exceed ``at_most``. Starts and ends are in ``T``. ``P``: an earlier
    simulation; the first ``run`` places of its order are the run."""
    begin(G, C, P, T, run, True)
    return play(G, C, R, P, T, at_most, len(T.order), False)


@entry
def keep_order(T: Trial) -> None:
    """Prepare the order of a complete simulation for use as a run: set every slot's place in it, -1 for slots that were not taken (tiles
    without a backward pass, devices without an update)."""
    fill(T.place, 0, len(T.place), -1)
    for place in range(T.size[TAKEN]):
        T.place[T.order[place]] = place
