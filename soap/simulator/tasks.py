"""Timed tasks: what the simulator plays. Made by ``lowering.lower`` from a plan and a cost model.

An id is (phase, position, stage, tile, operand, piece). ``position`` is that of an operator, parameter or device. A chunk of a
communication has its number as a seventh part. The reference compares these tuples as they are. Compiled code packs them into two whole
numbers; a part that is too large for its bits would make the id of another task, so both refuse it. There is room for a micro-batch
between phase and position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from soap.cluster.topology import Topology
from soap.errors import ModelError
from soap.plan.collectives import Flow
from soap.plan.plan import Part, Plan

PHASES, MICRO_BATCHES, POSITIONS, STAGES, TILES = 1 << 4, 1 << 14, 1 << 20, 1 << 3, 1 << 22
"""Limits of the parts in the first number, highest part first: 63 bits together. All limits are powers of two."""
OPERANDS, PIECES, CHUNKS = 1 << 20, 1 << 24, 1 << 8
"""Limits of the parts in the second number: 52 bits together."""

LIMITS = {"phase": PHASES, "position": POSITIONS, "stage": STAGES, "tile": TILES, "operand": OPERANDS, "piece": PIECES, "chunk": CHUNKS}
"""Each part of an id must be below its limit; in the order of the parts."""

UNNUMBERED = "a task's id does not fit into its numbers"
"""Message of the ValueError that compiled code raises for such an id."""


def check_id(parts: Sequence[int]) -> None:
    """ModelError if a part of a task's id is negative or not below its limit. An id may have fewer parts; the others are 0."""
    for (name, limit), value in zip(LIMITS.items(), parts, strict=False):
        if not 0 <= value < limit:
            raise ModelError(f"task with {name} {value}; {_EXPECTED}")


def unnumbered() -> ModelError:
    """The error for a task that compiled code cannot number."""
    return ModelError(f"a task has a number that is too large; {_EXPECTED}")


_EXPECTED = (
    f"expected fewer than {POSITIONS} operators and parameters, {TILES} tiles of each, {OPERANDS} operands or results, and {PIECES} pieces "
    "of each that are on devices of their own: make the model or the number of tiles smaller"
)


Longs = NDArray[np.int64]


class TaskKind(StrEnum):
    """What a task does. WEIGHTS: the weight gradients of a tile whose backward pass is in two; the input gradients are BACKWARD then."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    WEIGHTS = "weights"
    TRANSFER = "transfer"
    EXCHANGE = "exchange"
    REDUCE = "reduce"
    SYNC = "sync"
    COMPRESS = "compress"
    COPY = "copy"
    UPDATE = "update"


GRADIENTS = frozenset({TaskKind.BACKWARD, TaskKind.WEIGHTS})
"""Passes that make gradients."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task. ``id`` (phase, operator, tile, …) stays the same when other parts of the strategy change; it breaks ties. Chunks of one
    communication have one name (``chunks``).

    ``resources``: what it holds while it runs. Device d is resource d, link l is resource ``device_count + l``, and the hosts' CPU cores
    follow, host by host (``servers.first_cores``). ``predecessors``: positions in ``TaskGraph.tasks``. ``bytes``: what crosses links (0 for
    computation). ``tile``: position in ``Plan.tiles`` for a tile's passes (forward, recomputed, backward, weights), else None. ``flows``:
    who sends how much to whom in an exchange or reduce-scatter; they add up to ``bytes``. ``launch_ns``: for a pass of a tile on a GPU, the
    time its processor takes to launch it. ``latency_ns``: for a message, the time from when its last byte has left, and its links are free,
    to its arrival. ``cpu_overhead_ns``: for how long it keeps each device busy that has a port at one of its links (LogP's o).
    """

    id: tuple[int, ...]
    name: str
    kind: TaskKind
    resources: tuple[int, ...]
    duration_ns: int
    predecessors: tuple[int, ...]
    bytes: int = 0
    tile: int | None = None
    flows: tuple[Flow, ...] = ()
    launch_ns: int = 0
    latency_ns: int = 0
    cpu_overhead_ns: int = 0

    @property
    def chunk(self) -> int | None:
        """The number of this chunk in its communication, from 0 on; None if the task is a whole communication."""
        return self.id[len(LIMITS) - 1] if len(self.id) == len(LIMITS) else None

    @property
    def held_ns(self) -> int:
        """For how many nanoseconds it holds its resources, from its start; at least 1."""
        return self.duration_ns - self.latency_ns


Places = Mapping[int, int]
"""Position in a list of the plan -> position of a task."""


@dataclass(frozen=True)
class TaskPlaces:
    """Which task is for what, beside passes, which know their tiles. By a carrier's first part, ``brought``: its task, ``returned``: that
    of the gradients, ``gathered``: that of its second time.
    By reduction, ``summed``, ``summed_back``, ``summed_again``. ``rows``: of marks (``plan.marks``), by name those of tiles."""

    brought: Mapping[Part, int] = field(default_factory=dict)
    returned: Mapping[Part, int] = field(default_factory=dict)
    gathered: Mapping[Part, int] = field(default_factory=dict)
    summed: Places = field(default_factory=dict)
    summed_back: Places = field(default_factory=dict)
    summed_again: Places = field(default_factory=dict)
    rows: Mapping[str, Places] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskGraph:
    """Tasks in an order in which predecessors come first."""

    plan: Plan
    topology: Topology
    tasks: tuple[Task, ...]
    places: TaskPlaces = TaskPlaces()


class Times(NamedTuple):
    """What may change of tasks, in ns, by their positions: ``Task.duration_ns``, ``launch_ns``, ``latency_ns``, ``cpu_overhead_ns``."""

    duration: Longs
    launch: Longs
    latency: Longs
    overhead: Longs


def times_of(tasks: TaskGraph) -> Times:
    """The times that tasks have."""
    rows = [(task.duration_ns, task.launch_ns, task.latency_ns, task.cpu_overhead_ns) for task in tasks.tasks]
    return Times(*np.array(rows, np.int64).reshape(-1, len(Times._fields)).T.copy())


@dataclass(frozen=True)
class Schedule:
    """Start and end of every task in nanoseconds (int64 arrays parallel to ``TaskGraph.tasks``)."""

    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]

    @property
    def makespan_ns(self) -> int:
        """The time of one training iteration."""
        return int(self.end_ns.max(initial=0))
