"""The tasks that a compiled simulation has played, for Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from soap.simulator.compiled.graph_arrays import Ints, Longs
from soap.simulator.compiled.state import State
from soap.simulator.compiled.trial import TAKEN, Trial


class PlayedTask(NamedTuple):
    """A task that was played. ``key``: its id as two numbers (``task_keys``)."""

    key: tuple[int, int]
    duration_ns: int
    resources: tuple[int, ...]
    start_ns: int
    end_ns: int
    bytes: int


class PlayedTasks(NamedTuple):
    """All tasks of a simulation in the order in which they were taken, as arrays. ``key``: [task, 2], as in ``PlayedTask``."""

    key: Longs
    duration_ns: Longs
    start_ns: Longs
    end_ns: Longs
    bytes: Longs


def all_tasks(C: State, trial: Trial) -> PlayedTasks:
    """The tasks of a simulation of the held strategy."""
    taken = trial.order[: trial.size[TAKEN]]
    key = np.stack([C.key[taken], C.subkey[taken]], axis=1)
    return PlayedTasks(key, C.duration[taken], trial.start[taken], trial.end[taken], C.moved[taken])


class TakenTasks(NamedTuple):
    """The tasks of a simulation in the order in which they were taken. Each waits for those at the places
    ``waits[waits_ptr[k]:waits_ptr[k + 1]]`` and holds the resources ``held[held_ptr[k]:held_ptr[k + 1]]``."""

    slot: Ints
    start_ns: Longs
    end_ns: Longs
    waits_ptr: Longs
    waits: Longs
    held_ptr: Longs
    held: Longs


def held_resources(C: State, slots: Ints, static: Ints) -> tuple[Longs, Longs]:
    """``TakenTasks.held_ptr`` and ``held``. ``static``: as in ``Groups``."""
    first, count = C.resource[slots], C.resource_n[slots]
    begins = np.concatenate(([0], np.cumsum(count, dtype=np.int64)))
    at = np.arange(begins[-1]) + np.repeat(np.where(first < 0, -1 - first, first) - begins[:-1], count)
    own = np.repeat(first < 0, count)
    held = np.empty(begins[-1], np.int64)
    held[own], held[~own] = C.arena[at[own]], static[at[~own]]
    return begins, held


def each_task(C: State, T: Trial, static: Ints) -> Iterator[PlayedTask]:
    """The tasks of a simulation, one by one, with the resources that they hold. ``static``: as in ``Groups``."""
    for slot in T.order[: T.size[TAKEN]].tolist():
        first, count = int(C.resource[slot]), int(C.resource_n[slot])
        pool, at = (static, first) if first >= 0 else (C.arena, -1 - first)
        resources = tuple(pool[at : at + count].tolist())
        key, duration, moved = (int(C.key[slot]), int(C.subkey[slot])), int(C.duration[slot]), int(C.moved[slot])
        yield PlayedTask(key, duration, resources, int(T.start[slot]), int(T.end[slot]), moved)
