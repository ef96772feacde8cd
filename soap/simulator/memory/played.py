"""The tasks of a played iteration as arrays, from whatever has played it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from soap.simulator.tasks import TaskKind

Longs = NDArray[np.int64]

KINDS = {kind: number for number, kind in enumerate(TaskKind)}
NONE = -1
"""In place of a task's number: there is none."""


class Played(NamedTuple):
    """By task: ``kind`` (``KINDS``), ``tile`` of a pass or NONE, ``start`` and ``end``, and what may be played once more: ``duration``,
    ``launch``, ``latency``, ``overhead``, all in ns, and ``rank``: its place among all by id, which breaks ties. It waits for the tasks
    ``waits[waits_ptr[k]:waits_ptr[k + 1]]`` and holds the resources ``held[held_ptr[k]:held_ptr[k + 1]]`` (``tasks.Task.resources``).

    The tasks, or NONE: by tile ``forward``, ``backward``, ``weights``, ``again`` (second run), ``need``, ``away`` and ``back`` (copies
    to its host and back); by carrier of ``PlanArrays`` ``brought`` and ``returned``; by reduction ``summed`` and ``summed_back``. ``named``: by
    name of a synchronization's or an update's task, its first and its last chunk.
    """

    kind: Longs
    tile: Longs
    start: Longs
    end: Longs
    duration: Longs
    launch: Longs
    latency: Longs
    overhead: Longs
    rank: Longs
    waits_ptr: Longs
    waits: Longs
    held_ptr: Longs
    held: Longs
    forward: Longs
    backward: Longs
    weights: Longs
    again: Longs
    need: Longs
    away: Longs
    back: Longs
    brought: Longs
    returned: Longs
    summed: Longs
    summed_back: Longs
    named: Mapping[str, tuple[int, int]]
