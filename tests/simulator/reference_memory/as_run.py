"""A simulated iteration once more, in the order in which ranks run it. Predicted memory is that of this order.

The first simulation takes tile by tile, as soon as what a tile needs is there. From it comes the order that ranks follow, but they keep it
(``running``): each device runs its tiles forward in one fixed order, and backward segment by segment. A segment begins when all
gradients from elsewhere are there that its tiles need, and then nothing comes between its tiles. So products of two segments overlap less
than tiles do that take turns, and what is gathered for a segment is there for a shorter time.

What waits only so that it does not come too early waits in ranks for the passes before the first one that needs it: gathers of values, and
what is offloaded or made again. Where a simulated wait is for a later pass than that, it is left out here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from soap.plan.plan import AGAIN
from soap.simulator.reference import execution_order, play
from soap.simulator.tasks import Schedule, Task, TaskGraph, TaskKind
from tests.simulator.reference_memory.running import RunOrder, run_order


@dataclass(frozen=True)
class AsRun:
    """``waits``: by task, those that it waits for in ranks. ``schedule``: when they run. ``order``: of the passes."""

    waits: Sequence[Sequence[int]]
    schedule: Schedule
    order: RunOrder


def as_run(tasks: TaskGraph, schedule: Schedule) -> AsRun:
    """``schedule``: of these tasks, as they are simulated. With micro-batches the passes of a device have one order anyway."""
    order = run_order(tasks.plan, execution_order(tasks, schedule))
    passes = _Passes(tasks, order) if tasks.plan.order is None else None
    if passes is None or passes.are_kept_by(schedule):
        return AsRun([task.predecessors for task in tasks.tasks], schedule, order)
    waits = passes.waits()
    return AsRun(waits, play(tasks.tasks, tasks.topology, waits), order)


class _Need(NamedTuple):
    """The turn of the first pass that waits for something. ``within``: it may come while that turn's passes run, as copies do."""

    turn: int
    within: bool


class _Passes:
    """The passes of all tiles in the order in which ranks run them.

    ``_turn``: task of a pass -> its place in the order, which all tiles of a segment share. ``_chains``: by device, its passes.
    ``_begins``: first pass of a segment -> all of them.
    """

    def __init__(self, tasks: TaskGraph, order: RunOrder) -> None:
        self._tasks, self._order = tasks.tasks, order
        self._turn: dict[int, int] = {}
        self._turns = 0
        self._chains: list[list[int]] = [[] for _ in range(order.plan.device_count)]
        self._begins: dict[int, tuple[int, ...]] = {}
        of: dict[TaskKind, dict[int, int]] = {kind: {} for kind in (TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD)}
        for place, task in enumerate(self._tasks):
            if task.tile is not None and task.kind in of:
                of[task.kind][task.tile] = place
        for kind, tiles in self._in_order(of[TaskKind.BACKWARD].keys()):
            self._run(kind, tuple(of[kind][tile] for tile in tiles if tile in of[kind]))

    def _run(self, kind: TaskKind, passes: Sequence[int]) -> None:
        """Add passes that run together, and before them second runs that have no place in the order: of the loss's epilogue."""
        own = tuple(place for place in passes if place not in self._turn)
        for place in own:
            for other in sorted(self._tasks[place].predecessors, key=lambda other: self._tasks[other].id):
                again = self._tasks[other]
                if again.kind is TaskKind.RECOMPUTE and again.tile is not None and other not in own and other not in self._turn:
                    self._run(TaskKind.RECOMPUTE, (other,))
        if not own:
            return
        tile, turn = self._tasks[own[0]].tile, self._turns
        assert tile is not None
        self._turns += 1
        self._turn.update(dict.fromkeys(own, turn))
        self._chains[self._order.plan.tiles[tile].device].extend(own)
        if kind is TaskKind.BACKWARD and len(own) > 1:
            self._begins[own[0]] = own

    def _in_order(self, simulated: Set[int]) -> Iterator[tuple[TaskKind, Sequence[int]]]:
        """All passes: of single tiles forward, and of the tiles of a segment. ``simulated``: tiles that have a simulated backward pass; in
        ranks those of the loss's epilogue may have none."""
        order = self._order
        yield from ((TaskKind.FORWARD, (tile,)) for tile in order.order.forward)
        yield from ((TaskKind.BACKWARD, (tile,)) for tile in sorted(simulated - order.activity.tiles, reverse=True))
        turns: list[tuple[int, bool, int, int]] = [(turn, False, order.segments[own].start, own) for turn, own in order.second_turns]
        turns += [(turn, True, 0, own) for own, turn in enumerate(order.turns.backward)]
        for _, back, _, own in sorted(turns):
            tiles = [tile for tile in order.segments[own].tiles if tile in order.activity.tiles]
            yield (TaskKind.BACKWARD, tiles[::-1]) if back else (TaskKind.RECOMPUTE, tiles)

    def are_kept_by(self, schedule: Schedule) -> bool:
        """Whether the passes have this order in a schedule, so that ranks wait for nothing else."""
        start, end = schedule.start_ns, schedule.end_ns
        in_turn = all(end[one] <= start[other] for chain in self._chains for one, other in pairwise(chain))
        return in_turn and all(end[other] <= start[first] for first in self._begins for other in self._entered_after(first))

    def waits(self) -> Sequence[Sequence[int]]:
        """By task, what it waits for: passes for the one before on their device, and segments for all that their tiles need."""
        found, needed = list[Sequence[int]](), self._needed()
        after = {other: {one} for chain in self._chains for one, other in pairwise(chain)}
        for first in self._begins:
            after.setdefault(first, set()).update(self._entered_after(first))
        for place, task in enumerate(self._tasks):
            own: Collection[int] = task.predecessors if place not in after else {*task.predecessors, *after[place]}
            if (need := needed.get(place)) is not None:
                own = [other for other in own if self._holds(task, need, other)]
                if task.name.endswith(AGAIN):  # it comes right before the first pass that reads it
                    own += self._before(need.turn)
            found.append(tuple(own))
        return found

    def _before(self, turn: int) -> list[int]:
        """The pass before those of a turn on their device; none if they are the first."""
        chain = next(chain for chain in self._chains if any(self._turn[place] == turn for place in chain))
        before = [place for place in chain if self._turn[place] < turn]
        return before[-1:]

    def _entered_after(self, first: int) -> Iterator[int]:
        """What a segment waits for before its first pass: all from elsewhere that its tiles need, but for what comes back from hosts, which
        comes when a tile needs it."""
        own = self._begins[first]
        for place in own:
            for other in self._tasks[place].predecessors:
                if other not in own and self._tasks[other].kind is not TaskKind.COPY:
                    yield other

    def _needed(self) -> dict[int, _Need]:
        """What may be late -> its need. All that waits for a task comes behind it in the list."""
        found: dict[int, _Need] = {}
        for place in range(len(self._tasks) - 1, -1, -1):
            turn, need = self._turn.get(place), found.get(place)
            for other in self._tasks[place].predecessors if turn is not None or need is not None else ():
                if _may_be_late(self._tasks[other]):
                    own = need if turn is None else _Need(turn, self._tasks[other].kind is TaskKind.COPY)
                    assert own is not None
                    found[other] = min(own, found.get(other, own))
        return found

    def _holds(self, task: Task, need: _Need, other: int) -> bool:
        """Whether a task with this need waits for ``other`` in ranks, too. Second runs come at their turn, whatever has arrived by then."""
        turn = self._turn.get(other)
        if turn is None:
            return need.within or task.kind is not TaskKind.RECOMPUTE
        return turn <= need.turn if need.within else turn < need.turn


def _may_be_late(task: Task) -> bool:
    """Whether a task is a gather, a copy, a need (``second_runs``), or what is gathered or summed again, if a pass waits for it."""
    return task.tile is None and (task.kind in (TaskKind.SYNC, TaskKind.COPY, TaskKind.RECOMPUTE) or task.name.endswith(AGAIN))
