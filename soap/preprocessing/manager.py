"""How much at once: X units and Y chunks of each, chosen anew before every start of a task, from what the machine has left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from soap.preprocessing.resources import Sample
from soap.preprocessing.work import CONVERT, INDEX, MERGE, OPEN, UNITE, WRITE, Done

SERIAL, UNIT, CHUNK, ADAPTIVE = "serial", "unit", "chunk", "adaptive"
MODES = (SERIAL, UNIT, CHUNK, ADAPTIVE)
CHUNK_BYTES = 32 * 2**20
"""Of input: some tenths of a second of work, beside which a task's start costs nothing."""
LEAST_CHUNK_BYTES = 2**20
FIRST_FACTORS = {OPEN: 0.0, INDEX: 4.5, UNITE: 1.5, MERGE: 3.0, CONVERT: 1.0, WRITE: 4.0}
"""Bytes of memory that a task needs, beside ``TASK_BYTES``, per byte that it is about, until the step's first tasks have told. Of generated
data of Criteo's shape, tasks needed up to 2.9 (index), 0.8 (unite), 0.3 (convert) and 3.2 (write); merge has no figure, as dictionaries of
so little data need less than ``TASK_BYTES``. Shorter fields need more to index: about 24 bytes for a text, 12 for an id, 4 for a
number."""
TASK_BYTES = 16 * 2**20
"""What any task may need."""
WORKER_BYTES = 160 * 2**20
"""Of a process with the compiled parser, until one has told."""
RESERVE_SHARE, LEAST_RESERVE_BYTES = 0.05, 32 * 2**20
"""Of all memory, what is left alone; and the least of it."""
MARGIN = 1.15
"""On what was learned: the next chunk is not quite like the last."""


@dataclass(frozen=True, slots=True)
class Limits:
    """At most ``units`` at once, ``chunks`` of each, ``tasks`` in all. ``why``: what binds. ``pressed``: a task should be taken back."""

    units: int
    chunks: int
    tasks: int
    why: str
    pressed: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """What a node does now. ``waiting``: unit -> tasks that have not begun; ``running``: tasks under way; ``used_bytes``: memory of their
    processes; ``workers``: processes there are; ``size``: bytes that the largest waiting task is about."""

    waiting: Mapping[int, int]
    running: int
    used_bytes: int
    workers: int
    size: int


class Manager:
    """Decides for one node. ``modes``: step -> mode, adaptive where none is given. ``most``: tasks at once at most (None: by cores)."""

    def __init__(
        self, modes: Mapping[str, str] | None = None, most: int | None = None, told: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        self._modes = dict(modes or {})
        self._most = most
        self._told = told
        self._factors = dict(FIRST_FACTORS)
        self._learned: set[str] = set()
        self._worker_bytes = WORKER_BYTES
        self._ceiling: int | None = None
        self._last: Limits | None = None

    def mode(self, step: str) -> str:
        """How a step is parallelized. Steps between the two that the thesis names go with the first one."""
        return self._modes.get(step, self._modes.get(INDEX if step in (OPEN, UNITE, MERGE) else CONVERT, ADAPTIVE))

    def learn(self, done: Done) -> None:
        """Take what a task has needed into account."""
        step, size = done.task.step, done.task.size
        if done.peak_bytes and not done.kept and size:
            needed = max(0, done.peak_bytes - TASK_BYTES) / size * MARGIN
            self._factors[step] = max(self._factors[step], needed) if step in self._learned else needed
            self._learned.add(step)

    def lost(self, running: int) -> None:
        """A task was killed while so many ran: never so many again."""
        self._ceiling = max(1, running - 1)
        self._tell("lost", {"tasks_at_most": self._ceiling})

    def new_step(self) -> None:
        """A step begins: what was too much for the last one may not be for this one."""
        self._ceiling = self._last = None

    def task_bytes(self, step: str, size: int) -> int:
        """Memory that a task of a step needs."""
        return round(TASK_BYTES + self._factors[step] * size)

    def limits(self, step: str, state: State, sample: Sample) -> Limits:
        """What may run now."""
        found = self._limits(step, state, sample)
        last = self._last
        if last is None or (found.units, found.chunks, found.tasks, found.pressed) != (last.units, last.chunks, last.tasks, last.pressed):
            self._last = found
            self._tell(step, _document(found, state, sample))
        return found

    def _limits(self, step: str, state: State, sample: Sample) -> Limits:
        units, chunks = max(1, len(state.waiting)), max(1, max(state.waiting.values(), default=1))
        cores = max(1, int(sample.cores + 0.5))
        mode = self.mode(step)
        if mode == SERIAL:
            return Limits(1, 1, 1, "serial")
        if mode == UNIT:
            return Limits(units, 1, self._most or units, "one task for each unit")
        if mode == CHUNK:
            return Limits(1, self._most or cores, self._most or cores, "one unit at a time")
        idle = max(1, int(sample.cores - sample.others + 0.6))
        choices = [(self._most or cores, "cores" if self._most is None else "workers"), (idle, "other processes' load")]
        each = self.task_bytes(step, state.size)
        reserve = max(LEAST_RESERVE_BYTES, round(RESERVE_SHARE * sample.limit_bytes))
        if state.workers and state.used_bytes and not state.running:
            self._worker_bytes = max(2**24, state.used_bytes // state.workers)
        room = sample.available_bytes + state.used_bytes - reserve
        choices.append((max(1, room // (each + self._worker_bytes)), "memory"))
        if self._ceiling is not None:
            choices.append((self._ceiling, "memory, of which a task had too little"))
        tasks, why = min(choices, key=lambda choice: choice[0])
        at_once = max(1, min(tasks, chunks))
        pressed = state.running > 1 and sample.available_bytes < reserve // 2
        return Limits(-(-tasks // at_once), at_once, int(tasks), why, pressed)

    def chunk_bytes(self, sample: Sample) -> int:
        """Bytes of a chunk of which every core can have one in memory, in the step that needs most of it."""
        cores = self._most or max(1, int(sample.cores + 0.5))
        reserve = max(LEAST_RESERVE_BYTES, round(RESERVE_SHARE * sample.limit_bytes))
        room = (sample.available_bytes - reserve) / cores - WORKER_BYTES - TASK_BYTES
        return int(min(CHUNK_BYTES, max(LEAST_CHUNK_BYTES, room / max(FIRST_FACTORS[INDEX], 1))))

    def _tell(self, event: str, facts: dict[str, Any]) -> None:
        if self._told is not None:
            self._told({"at_s": round(time.time(), 3), "step": event, **facts})


def _document(found: Limits, state: State, sample: Sample) -> dict[str, Any]:
    return {
        "units": found.units, "chunks": found.chunks, "tasks": found.tasks, "because_of": found.why, "pressed": found.pressed,
        "running": state.running, "cores": round(sample.cores, 2), "others_busy_cores": round(sample.others, 2),
        "available_bytes": sample.available_bytes, "used_bytes": state.used_bytes, "limit_bytes": sample.limit_bytes,
        "disk_bytes": sample.disk_bytes,
    }  # fmt: skip
