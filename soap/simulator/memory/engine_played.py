"""The tasks of what an engine holds, or has proposed, as arrays (``played``): which of its slots is which task of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from soap.plan.marks.seam import row_names
from soap.plan.plan import Plan
from soap.simulator.communication.synchronizing import possible_tasks
from soap.simulator.compiled import task_keys
from soap.simulator.compiled.state import (
    AGAIN_TILE,
    BACKWARD_TILE,
    FORWARD_TILE,
    ROW,
    UPDATE_DEVICE,
    WEIGHTS_TILE,
)
from soap.simulator.engine import Engine
from soap.simulator.memory.grouped import Bools, Longs
from soap.simulator.memory.plan_arrays import MESSAGE, PlanArrays
from soap.simulator.memory.played import KINDS, NONE, Played, Replayable
from soap.simulator.task_list import BACKWARD, FORWARD, GATHER, SUM, SYNC
from soap.simulator.tasks import CHUNKS, TaskKind

BY_TILE = {
    "forward": (FORWARD_TILE, TaskKind.FORWARD),
    "backward": (BACKWARD_TILE, TaskKind.BACKWARD),
    "weights": (WEIGHTS_TILE, TaskKind.WEIGHTS),
    "again": (AGAIN_TILE, TaskKind.RECOMPUTE),
}
"""Fields of ``Played`` by tile: kind of the slot, and of the task."""


def engine_played(engine: Engine, plan: Plan, arrays: PlanArrays) -> Played:
    """The tasks of the proposal, or if there is none of the strategy that is held and was simulated. ``plan``: of that strategy, with its
    ``arrays``; of a folded engine, that of the folding."""
    C, slots = engine.state, np.sort(engine.taken())
    kinds, operators, (start, end) = C.kind[slots], C.owner[slots], engine.times(slots)
    passes, added = (kinds > 0) & (kinds <= BACKWARD_TILE), kinds >= ROW
    tiles = np.array(plan.first_tile, np.int64)[operators] + C.index[slots]
    others = np.flatnonzero(~passes & ~added)
    ids, kind = _Ids(engine.keys(slots[others]), others), np.empty(len(kinds), np.int64)
    kind[others] = np.where(ids.phase < SYNC, KINDS[TaskKind.REDUCE], KINDS[TaskKind.SYNC])
    carriers, sums = _carrier_ids(plan, arrays), _sum_ids(plan, arrays)
    brought, returned, gathered = (ids.places(own) for own in carriers)
    summed, summed_back, summed_again = (ids.places(own) for own in sums)
    found = {name: np.full(len(arrays.tiles.device), NONE) for name in BY_TILE}
    for name, (slot_kind, task_kind) in BY_TILE.items():
        own = np.flatnonzero(kinds == slot_kind)
        found[name][tiles[own]] = own
        kind[own] = KINDS[task_kind]
    rows = {name: np.full(len(arrays.tiles.device), NONE) for name in row_names()} | {"again": found["again"]}
    for marked in dict.fromkeys(plan.marked.values()):
        mine = added & np.isin(operators, [position for position, own in plan.marked.items() if own is marked])
        for place, row in enumerate(marked.rows):
            own = np.flatnonzero(mine & (kinds == ROW + place))
            rows[row.name][tiles[own]] = own
            kind[own] = KINDS[TaskKind(row.kind)]
    moved = np.where(arrays.carriers.pattern == MESSAGE, KINDS[TaskKind.TRANSFER], KINDS[TaskKind.EXCHANGE])
    for own in (brought, returned, gathered):
        kind[own[own >= 0]] = moved[own >= 0]

    def replayable() -> Replayable:
        waiting, rank = ~passes & (kinds != UPDATE_DEVICE), np.empty(len(kinds), np.int64)
        rank[np.lexsort(engine.keys(slots).T[::-1])] = np.arange(len(kinds))
        launch = np.where(passes, C.launch[slots], 0)
        latency, overhead = (np.where(waiting, column[slots], 0) for column in (C.latency, C.overhead))
        return Replayable(C.duration[slots], launch, latency, overhead, rank, *engine.held(slots))

    def waits_of(tasks: Longs) -> tuple[Longs, Longs]:
        place, other = engine.waits(slots[tasks])
        task_of = np.zeros(slots.max(initial=0) + 1, np.int64)
        task_of[slots] = np.arange(len(slots))
        return place, task_of[other]

    return Played(
        kind=kind,
        tile=np.where(passes, tiles, NONE),
        start=start,
        end=end,
        waits_of=waits_of,
        replayable=replayable,
        brought=brought,
        returned=returned,
        gathered=gathered,
        summed=summed,
        summed_back=summed_back,
        summed_again=summed_again,
        named=_named(plan, ids, kind),
        rows=rows,
        **found,
    )


class _Ids:
    """The ids of tasks, each as two numbers (``task_keys``). ``phase``: the first part of each."""

    def __init__(self, keys: Longs, tasks: Longs) -> None:
        """``keys``: of these tasks, see ``Engine.keys``."""
        key, subkey = keys.T
        phase_of: Any = task_keys.phase_of
        self.phase: Longs = phase_of.py_func(key)
        order = np.lexsort((subkey, key))
        self._tasks, self._key, self._subkey = tasks[order], key[order], subkey[order]
        self._subkeys = np.unique(subkey)
        self._codes = self._code(self._key, self._subkey)
        begins = np.ones(len(tasks), np.bool_)
        begins[1:] = (self._key[1:] != self._key[:-1]) | (self._subkey[1:] // CHUNKS != self._subkey[:-1] // CHUNKS)
        self._last = np.repeat(*_ends(begins))

    def _code(self, key: Longs, subkey: Longs) -> Longs:
        """One number in place of two, in the order of both, of ids that occur."""
        return np.searchsorted(self._key, key) * len(self._subkeys) + np.searchsorted(self._subkeys, subkey)

    def _sorted_places(self, ids: Longs) -> Longs:
        packed: Any = task_keys.packed
        key, subkey = packed.py_func(*ids.T, 0)
        at = np.minimum(np.searchsorted(self._codes, self._code(key, subkey)), len(self._codes) - 1)
        return np.where((self._key[at] == key) & (self._subkey[at] == subkey), at, NONE)

    def places(self, ids: Longs) -> Longs:
        """[id, part of it] -> the task with each id, or NONE."""
        at = self._sorted_places(ids)
        return np.where(at < 0, NONE, self._tasks[at])

    def chunks(self, ids: Longs) -> tuple[Longs, Longs]:
        """[id, part of it] -> the first and the last chunk of the communication with each id, or the task itself twice; or NONE."""
        at = self._sorted_places(ids)
        return np.where(at < 0, NONE, self._tasks[at]), np.where(at < 0, NONE, self._tasks[self._last[at]])


def _ends(begins: Bools) -> tuple[Longs, Longs]:
    """(the last place of each group, how many it has), of groups that begin at these places."""
    first = np.flatnonzero(begins)
    after = np.append(first[1:], len(begins))
    return after - 1, after - first


def _columns(phase: int, *parts: Longs | int) -> Longs:
    """[task, part of its id], of columns."""
    return np.stack(np.broadcast_arrays(phase, *parts), axis=1)


def _carrier_ids(plan: Plan, arrays: PlanArrays) -> tuple[Longs, Longs, Longs]:
    """The ids of all carriers' tasks, of those that bring their gradients back, and of their second times
    (``lowering._Lowering._carrier_task``)."""
    piece = arrays.carriers.part[arrays.carriers.parts[:-1]]
    fetch = arrays.pieces.fetch[piece]
    reader = arrays.fetches.readers[fetch]
    operator, tile = _numbers(plan, arrays, arrays.readers.tile[reader])
    own = tile, arrays.readers.operand[reader], piece - arrays.fetches.pieces[fetch]
    back = len(plan.graph.operators) - 1 - operator
    return _columns(FORWARD, operator, 0, *own), _columns(BACKWARD, back, 2, *own), _columns(BACKWARD, back, GATHER, *own)


def _sum_ids(plan: Plan, arrays: PlanArrays) -> tuple[Longs, Longs, Longs]:
    """The ids of all reductions' tasks, of those of their gradients, and of their second times (``lowering._Lowering._reduce_task``)."""
    operator, tile = _numbers(plan, arrays, arrays.sums.member[arrays.sums.members[:-1]])
    own = tile, arrays.sums.output, 0
    back = len(plan.graph.operators) - 1 - operator
    return _columns(FORWARD, operator, 2, *own), _columns(BACKWARD, back, 0, *own), _columns(BACKWARD, back, SUM, *own)


def _numbers(plan: Plan, arrays: PlanArrays, tile: Longs) -> tuple[Longs, Longs]:
    """The operators of tiles, and their numbers in these."""
    operator = arrays.tiles.operator[tile]
    return operator, tile - np.array(plan.first_tile, np.int64)[operator]


def _named(plan: Plan, ids: _Ids, kind: Longs) -> Mapping[str, tuple[int, int]]:
    """``Played.named``. Sets ``kind`` of these tasks."""
    possible = list(possible_tasks(plan))
    first, last = ids.chunks(np.array([own for own, *_ in possible], np.int64))
    kinds = np.array([KINDS[own] for *_, own in possible])
    kind[first[first >= 0]] = kinds[first >= 0]
    spans = zip(first.tolist(), last.tolist(), strict=True)
    return {name: span for (_, name, _), span in zip(possible, spans, strict=True) if span[0] >= 0}
