"""Plays the strategy that an engine holds or proposes under each of several draws of its costs (compiled). The counterpart of ``draws``.

The strategy is lowered once. For each draw only the times of its tasks are written anew, into a second set of arrays (``Drawing.state``),
and the event loop runs over those, with a heap alone: the delays against the usual times differ from task to task (``readiness``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from soap.cluster.topology import Topology
from soap.plan.syncs.seam import COMBINE, RESTORE, SELECT
from soap.simulator.compiled.arrays import copy, sort
from soap.simulator.compiled.events import NO_BOUND, simulate_all
from soap.simulator.compiled.graph_arrays import Floats, Ints, Longs, device_types
from soap.simulator.compiled.handles import blank, handle
from soap.simulator.compiled.jit import compiled, inlined
from soap.simulator.compiled.machine_code import entry
from soap.simulator.compiled.marks import AGAIN, PRICE
from soap.simulator.compiled.rows import is_sparse_lookup
from soap.simulator.compiled.second_runs import weights_slot
from soap.simulator.compiled.state import BACKWARD_TILE, FORWARD_TILE, SLOTS, UPDATE_DEVICE, State
from soap.simulator.compiled.task_keys import SYNC, phase_of, stage_of
from soap.simulator.compiled.tile_times import PASSES, WEIGHTS
from soap.simulator.compiled.trial import Trial, make_trial
from soap.simulator.compiled.variants import CELLS, COSTS, ROW_COSTS
from soap.simulator.compiled.world import World
from soap.simulator.draws import COMMUNICATED, Draws, Risk

MEAN, TAIL, Q80, WORST = range(len(Risk))
"""Places in ``Risk``."""

SERVER = len(COMMUNICATED)
"""The group of a server's work in ``DrawTables.group``, after those of communications."""
COMPRESSING = SERVER + 1
"""The group of selections on the first type of device; then that of its other work for compressed gradients, then the next type's."""


class DrawTables(NamedTuple):
    """``count``: how many draws (0: none are played), and how their makespans become one cost. ``between_hosts``: by link. ``factor``:
    [group of tasks, draw], where groups are ``COMMUNICATED``, then ``SERVER``, then from ``COMPRESSING`` on. ``overhead``: by draw.
    ``launch``, ``update``: [device type, draw]. ``makespan``: by draw, of the last strategy played. ``ascending``: the same in order.
    ``group``: by slot, scratch memory."""

    count: Longs  # type: ignore[assignment]  # not tuple's method
    between_hosts: Ints
    factor: Floats
    overhead: Floats
    launch: Floats
    update: Floats
    makespan: Longs
    ascending: Longs
    group: Ints


class Drawing(NamedTuple):
    """``state``: the engine's state, with arrays of its own for what a draw changes. ``trial``: room for a simulation."""

    tables: DrawTables
    state: State
    trial: Trial


DRAWN = ("duration", "launch", "latency", "overhead")
"""The fields of a state that a draw changes."""


def draw_tables(draws: Draws, topology: Topology, between_hosts: NDArray[np.bool_], slots: int) -> DrawTables:
    """The tables of these draws, for a state with so many slots. ``between_hosts``: by link."""
    spreads, types = draws.spreads, {device.type.name: device.type for device in topology.devices}
    kinds = [types[name] for name in device_types(topology)]
    compressing = [spreads.of_compression(kind, selects=selects) for kind in kinds for selects in (True, False)]
    groups = [*(spreads.of_communication(kind) for kind in COMMUNICATED), spreads.of_server(), *compressing]
    return DrawTables(
        count=np.array([draws.count, list(Risk).index(draws.risk)], np.int64),
        between_hosts=between_hosts.astype(np.int32),
        factor=np.array([draws.factors(errors) for errors in groups]).ravel(),
        overhead=draws.factors(spreads.of_overhead()),
        launch=np.array([draws.factors(spreads.of_launch(kind)) for kind in kinds]).ravel(),
        update=np.array([draws.factors(spreads.of_update(kind)) for kind in kinds]).ravel(),
        makespan=np.zeros(draws.count, np.int64),
        ascending=np.zeros(draws.count, np.int64),
        group=np.zeros(slots, np.int32),
    )


def make_drawing(tables: DrawTables, state: State, resources: int, devices: int) -> Drawing:
    """What plays a state under draws."""
    slots = len(state.duration)
    own: dict[str, Any] = {name: np.zeros(slots, np.int64) for name in DRAWN}
    return Drawing(tables, state._replace(**own), make_trial(slots, resources, devices))


NO_DRAWING = handle(blank(Drawing))
"""Plays no draws."""


@entry
def play_draws(W: World, D: Drawing) -> int:
    """Play the strategy as it is lowered now, under each draw; the cost that follows from the makespans (``risk``), in ns."""
    B, T = D.tables, D.trial
    _group_tasks(W, B)
    for draw in range(B.count[0]):
        _draw_tiles(W, B, D.state, draw)
        _draw_others(W, B, D.state, draw)
        B.makespan[draw] = simulate_all(W.graph, D.state, W.groups, T, T, 0, NO_BOUND)
    return risk(B)


@compiled
def risk(B: DrawTables) -> int:
    """One cost of all makespans, in ns, rounded down: as ``draws.Risk`` says."""
    count, how = B.count[0], B.count[1]
    copy(B.ascending, 0, B.makespan, 0, count)
    sort(B.ascending, 0, count)
    if how == WORST:
        return B.ascending[count - 1]
    if how == Q80:
        return B.ascending[count - 1 - count // 5]
    total = worst = 0
    quarter = max(1, count // 4)
    for k in range(count):
        total += B.ascending[k]
        if k >= count - quarter:
            worst += B.ascending[k]
    return total // count if how == MEAN else (total // count + worst // quarter) // 2


@compiled
def _group_tasks(W, B):  # type: ignore[no-untyped-def]
    """Fill ``group`` for all tasks but tiles and devices' updates."""
    K, C, R = W.cluster, W.state, W.groups
    devices = len(C.busy)
    for slot in range(devices, C.used[SLOTS]):
        if FORWARD_TILE <= C.kind[slot] <= BACKWARD_TILE:
            continue
        first, links, far = C.resource[slot], False, False
        for i in range(C.resource_n[slot]):
            held = R.static[first + i] if first >= 0 else C.arena[i - 1 - first]
            if devices <= held < devices + len(B.between_hosts):
                links = True
                far |= B.between_hosts[held - devices] != 0
        B.group[slot] = 2 * far + (C.latency[slot] == 0) if links else SERVER
        phase, stage = phase_of(C.key[slot]), stage_of(C.key[slot])
        if not links and phase == SYNC and stage in (SELECT, COMBINE, RESTORE):
            B.group[slot] = COMPRESSING + 2 * K.device_type[C.resource[slot]] + (stage != SELECT)


@compiled
def _draw_tiles(W, B, D, draw):  # type: ignore[no-untyped-def]
    """Write the times of tiles under a draw into ``D``."""
    G, V, K, C = W.graph, W.variants, W.cluster, W.state
    draws = B.count[0]
    for op in range(len(G.backward)):
        row, count, slot = V.rows[C.variant[op]], C.tiles[op], C.tile_slot[op]
        cells = row[CELLS]
        costs = row[ROW_COSTS] if row[ROW_COSTS] != row[COSTS] and is_sparse_lookup(G, C, op) else row[COSTS]
        for backward in range(2):
            for tile in range(count):
                kind = K.device_type[C.resource[slot]]
                D.duration[slot] = V.drawn[(costs + (kind * PASSES + backward) * cells + tile % cells) * draws + draw]
                D.launch[slot] = _times(C.launch[slot], B.launch[kind * draws + draw])
                slot += 1
        begin, end = C.marks.ptr[C.marked[op]], C.marks.ptr[C.marked[op] + 1]
        for row in range(begin, end):
            price = C.marks.rows[row, PRICE]
            for tile in range(count if C.marks.rows[row, AGAIN] else 0):
                kind, own = K.device_type[C.resource[C.tile_slot[op] + tile]], slot + (row - begin) * count + tile
                D.duration[own] = V.drawn[(costs + (kind * PASSES + price) * cells + tile % cells) * draws + draw]
                D.launch[own] = _times(C.launch[own], B.launch[kind * draws + draw])
        for tile in range(count if C.divided[op] else 0):
            slot = weights_slot(C, op) + tile
            kind = K.device_type[C.resource[slot]]
            D.duration[slot] = V.drawn[(costs + (kind * PASSES + WEIGHTS) * cells + tile % cells) * draws + draw]
            D.launch[slot] = _times(C.launch[slot], B.launch[kind * draws + draw])


@compiled
def _draw_others(W, B, D, draw):  # type: ignore[no-untyped-def]
    """Write the times of all other tasks under a draw into ``D``."""
    K, C = W.cluster, W.state
    draws, overhead = B.count[0], B.overhead[draw]
    for slot in range(C.used[SLOTS]):
        kind = C.kind[slot]
        if kind == UPDATE_DEVICE:
            D.duration[slot] = _times(C.duration[slot], B.update[K.device_type[slot] * draws + draw])
        elif not FORWARD_TILE <= kind <= BACKWARD_TILE:
            factor = B.factor[B.group[slot] * draws + draw]
            D.duration[slot] = _times(C.duration[slot], factor)
            D.latency[slot] = min(max(0, D.duration[slot] - 1), _times(C.latency[slot], factor))
            D.overhead[slot] = _times(C.overhead[slot], overhead)


@inlined
def _times(duration, factor):  # type: ignore[no-untyped-def]
    """``draws.drawn_ns``."""
    return max(1, int(duration * factor)) if duration > 0 else 0
