"""The tasks of a played iteration as arrays, from whatever has played it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from soap.plan.marks.seam import row_names
from soap.plan.plan import Part, Plan
from soap.simulator.memory.grouped import Longs, owners
from soap.simulator.tasks import Schedule, TaskGraph, TaskKind, times_of

KINDS = {kind: number for number, kind in enumerate(TaskKind)}
NONE = -1
"""In place of a task's number: there is none."""


class Replayable(NamedTuple):
    """By task what playing it once more needs: times in ns, and ``rank``, its place among all by id, which breaks ties. It holds the
    resources ``held[held_ptr[k]:held_ptr[k + 1]]`` (``tasks.Task.resources``)."""

    duration: Longs
    launch: Longs
    latency: Longs
    overhead: Longs
    rank: Longs
    held_ptr: Longs
    held: Longs


class Played(NamedTuple):
    """By task: ``kind`` (``KINDS``), ``tile`` of a pass or NONE, ``start`` and ``end`` in ns. ``waits_of``: of some tasks, pairs (place
    among them, a task that it waits for), by place. ``replayable``: makes the rest, which few ask for.

    The tasks, or NONE: by tile ``forward``, ``backward``, ``weights``, ``again`` (second run), and by name all ``rows`` of marks; by
    carrier of ``PlanArrays`` ``brought``, ``returned`` and ``gathered`` (its second time);
    by reduction ``summed``, ``summed_back`` and ``summed_again``. ``named``: by name of a
    synchronization's or an update's task, its first and its last chunk.
    """

    kind: Longs
    tile: Longs
    start: Longs
    end: Longs
    waits_of: Callable[[Longs], tuple[Longs, Longs]]
    replayable: Callable[[], Replayable]
    forward: Longs
    backward: Longs
    weights: Longs
    again: Longs
    rows: Mapping[str, Longs]
    brought: Longs
    returned: Longs
    gathered: Longs
    summed: Longs
    summed_back: Longs
    summed_again: Longs
    named: Mapping[str, tuple[int, int]]


PASSES = (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHTS, TaskKind.RECOMPUTE)
"""Passes of tiles, in the order of ``Played``'s fields."""
NAMED = (TaskKind.SYNC, TaskKind.COMPRESS, TaskKind.UPDATE)
"""Kinds of tasks of synchronizations and updates."""


def played_of(tasks: TaskGraph, schedule: Schedule) -> Played:
    """Tasks that were played with this outcome."""
    plan, todo, own = tasks.plan, tasks.tasks, tasks.places
    kind = np.array([KINDS[task.kind] for task in todo], np.int64)
    tile = np.array([NONE if task.tile is None else task.tile for task in todo], np.int64)
    tiles, sums, parts = len(plan.tiles), range(len(plan.reductions)), _first_parts(plan)
    passes = np.full((len(PASSES), tiles), NONE)
    for number, which in enumerate(PASSES):
        places = np.flatnonzero((kind == KINDS[which]) & (tile != NONE))
        passes[number, tile[places]] = places
    named: dict[str, tuple[int, int]] = {}
    for place in np.flatnonzero(np.isin(kind, [KINDS[which] for which in NAMED])).tolist():
        name = todo[place].name
        named[name] = named.get(name, (place,))[0], place
    fields: list[Any] = [
        kind,
        tile,
        schedule.start_ns,
        schedule.end_ns,
        lambda tasks: _pairs([todo[task].predecessors for task in tasks.tolist()]),
        lambda: Replayable(*times_of(tasks), _ranks([task.id for task in todo]), *_rows([task.resources for task in todo])),
        *passes,
        {name: _by_number(own.rows.get(name, {}), range(tiles)) for name in row_names()},
        *(_by_number(places, parts) for places in (own.brought, own.returned, own.gathered)),
        *(_by_number(places, sums) for places in (own.summed, own.summed_back, own.summed_again)),
        named,
    ]
    return Played(*fields)


def _first_parts(plan: Plan) -> list[Part]:
    """By carrier of ``PlanArrays``, the first part that it brings."""
    messages, exchanges, found = iter(plan.messages), iter(plan.exchanges), list[Part]()
    for own in plan.deliveries:
        found += (carrier.parts[0] for carrier in islice(messages, len(own.like.messages)))
        found += (carrier.parts[0] for carrier in islice(exchanges, len(own.like.exchanges)))
    return found


def _by_number(places: Mapping[Any, int], keys: Sequence[Any]) -> Longs:
    """The tasks of these, or NONE."""
    return np.array([places.get(key, NONE) for key in keys] if places else [NONE] * len(keys), np.int64)


def _rows(rows: Sequence[Sequence[int]]) -> tuple[Longs, Longs]:
    """Where each row begins, and all rows joined."""
    return np.cumsum([0, *map(len, rows)]), np.array([item for row in rows for item in row], np.int64)


def _pairs(rows: Sequence[Sequence[int]]) -> tuple[Longs, Longs]:
    begins, items = _rows(rows)
    return owners(begins), items


def _ranks(ids: Sequence[tuple[int, ...]]) -> Longs:
    """The place of each id among all."""
    ranks = np.empty(len(ids), np.int64)
    ranks[sorted(range(len(ids)), key=ids.__getitem__)] = np.arange(len(ids))
    return ranks
