"""Whether a table can be executed: every action once, in an order in which no stage waits for ever, and no barrier passed too soon.

A ``ScheduleError`` is one line; its ``grid``, which tracebacks and commands show below, is the table with the cell marked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from soap.errors import ScheduleError
from soap.schedules.dependencies import Barrier, Dependencies, Place, dependencies
from soap.schedules.named import SCHEDULES
from soap.schedules.table import KINDS, SHARES, WORK, Action, Kind, Table, lacking, marked, shown

OFFERED = next(schedule.name for schedule in SCHEDULES if schedule.meets_barriers)
"""What to use where a barrier is in the way."""
WAYS = ", or ".join(
    " and ".join(kinds)
    for count in range(1, len(KINDS) + 1)
    for kinds in combinations(KINDS, count)
    if sorted(share for kind in kinds for share in WORK[kind].shares) == sorted(SHARES)
)
"""The actions that do all there is to do of a chunk for a micro-batch, once: ``F and B, or F and I and W``."""
MOST_WAITS = 6
"""Of a circle of actions that wait for each other, a message names so many waits."""


def check(table: Table, barriers: Sequence[Barrier] = ()) -> Dependencies:
    """What its actions wait for. ScheduleError in one line, with the grid as a note, if the table cannot be executed."""
    _require_once(table)
    _require_complete(table)
    _require_own_order(table)
    for barrier in barriers:
        if not 0 <= barrier.chunk < table.chunk_count:
            chunks = f"chunk {barrier.chunk} of {table.chunk_count}"
            raise ScheduleError(f"operator {shown(barrier.operator)} is said to be in {chunks}; expected a chunk of the table")
    known = _without_circle(table, ())  # by itself first: what is wrong is not to be blamed on a barrier
    return _without_circle(table, barriers) if barriers else known


def _cells(table: Table) -> Iterator[tuple[Place, Action]]:
    for stage, actions in enumerate(table.stages):
        for position, action in enumerate(actions):
            yield Place(stage, position), action


def _refuse(table: Table, place: Place, message: str) -> ScheduleError:
    error = ScheduleError(message)
    error.add_note(marked(table, *place))
    return error


def _name(place: Place) -> str:
    return f"stage {place.stage}, position {place.position}"


def _require_once(table: Table) -> None:
    """No action twice, each chunk on one stage, and nothing of a chunk for a micro-batch done by two actions."""
    seen: dict[Action, Place] = {}
    stage_of: dict[int, int] = {}
    done: dict[tuple[int, int, str], Kind] = {}
    for place, action in _cells(table):
        if action in seen:
            raise _refuse(table, place, f"{action} is done twice, at {_name(seen[action])} and at {_name(place)}; expected once")
        seen[action] = place
        home = stage_of.setdefault(action.chunk, place.stage)
        if home != place.stage:
            raise _refuse(table, place, f"{action} is at {_name(place)}, but chunk {action.chunk} is on stage {home}; expected one stage")
        for share in WORK[action.kind].shares:
            other = done.setdefault((action.chunk, action.microbatch, share), action.kind)
            if other != action.kind:
                both = f"chunk {action.chunk} has both {other} and {action.kind} of micro-batch {action.microbatch}"
                raise _refuse(table, place, f"{both}; expected {WAYS} ({_name(place)})")


def _require_complete(table: Table) -> None:
    """All chunks have a forward and a backward pass of all micro-batches."""
    present = {action for _, action in _cells(table)}
    placement, microbatches = table.placement, table.microbatch_count
    for chunk, stage in enumerate(placement):
        for microbatch in range(microbatches):
            kinds = [kind for kind in KINDS if Action(kind, chunk, microbatch) in present]
            lacks = sorted(lacking(share for kind in kinds for share in WORK[kind].shares), key=KINDS.index)
            if lacks:
                error = ScheduleError(_missing(f"{chunk}{lacks[0]}{microbatch}", stage, len(placement), microbatches))
                error.add_note(marked(table, max(stage, 0), len(table.stages[max(stage, 0)])))  # the end of the stage's row
                raise error


def _missing(action: str, stage: int, chunks: int, microbatches: int) -> str:
    where = f"on stage {stage}" if stage >= 0 else "on any stage"
    return f"{action} is missing {where}; expected {WAYS}, of {chunks} chunks and {microbatches} micro-batches, each once"


def _require_own_order(table: Table) -> None:
    """On its stage, each action of a micro-batch comes after the one that it waits for."""
    seen: set[Action] = set()
    for place, action in _cells(table):
        if (behind := WORK[action.kind].behind) is not None:
            needed = Action(behind, action.chunk, action.microbatch)
            if needed not in seen:
                raise _refuse(table, place, f"{_name(place)} has {action} before {needed}; expected it behind {needed}")
        seen.add(action)


def _without_circle(table: Table, barriers: Sequence[Barrier]) -> Dependencies:
    known = dependencies(table, barriers)
    done = set(known.order)
    if len(done) < len(known.needs):
        circle = _find_circle(known, done)
        gate = next((i for i, node in enumerate(circle) if node >= len(known.actions)), None)
        raise _waits(table, known, circle) if gate is None else _passes(table, known, circle[gate - 1 :] + circle[: gate - 1])
    return known


def _stands_behind(known: Dependencies, node: int, other: int) -> bool:
    """Whether a node waits for another one because this is the action before it on its stage."""
    return other == node - 1 and node < len(known.places) and known.places[node].position > 0


def _find_circle(known: Dependencies, done: set[int]) -> list[int]:
    """Nodes each of which waits for the next, and the last for the first, which is no action that only stands behind the second."""
    node = next(node for node in range(len(known.needs)) if node not in done)
    path: dict[int, int] = {}
    while node not in path:
        path[node] = len(path)
        node = next(other for other in known.needs[node] if other not in done)
    circle = list(path)[path[node] :]
    first = next(i for i, one in enumerate(circle) if not _stands_behind(known, one, circle[(i + 1) % len(circle)]))
    return circle[first:] + circle[:first]


def _waits(table: Table, known: Dependencies, circle: Sequence[int]) -> ScheduleError:
    """The error for stages that wait for each other."""
    pairs = zip(circle, [*circle[1:], circle[0]], strict=True)
    waits = [(node, other) for node, other in pairs if not _stands_behind(known, node, other)]
    steps = []
    for (_, other), (following, _) in zip(waits, [*waits[1:], waits[0]], strict=True):
        behind = f", which stands behind {known.actions[following]}" if following != other else ""
        steps.append(f"waits for {known.actions[other]}{behind}")
    told = ", which ".join(steps[:MOST_WAITS]) + (", and so on in a circle" if len(steps) > MOST_WAITS else "")
    message = f"stages wait for each other for ever: {_cell(known, circle[0])} {told}; change the order of one of them"
    return _refuse(table, known.places[circle[0]], message)


def _passes(table: Table, known: Dependencies, circle: Sequence[int]) -> ScheduleError:
    """The error for a barrier that is passed too soon. ``circle``: who passes it, the barrier, who has not reached it then, and so on."""
    passing, gate, late = circle[0], circle[1], circle[2 % len(circle)]
    barrier = known.gates[gate - len(known.actions)]
    message = (
        f"operator {shown(barrier.operator)} couples the samples of a step, so no micro-batch may leave chunk {barrier.chunk} before "
        f"all have reached it; but {_cell(known, passing)} comes before {_cell(known, late)} can: use schedule {OFFERED!r}"
    )
    return _refuse(table, known.places[passing], message)


def _cell(known: Dependencies, node: int) -> str:
    return f"{known.actions[node]} ({_name(known.places[node])})"
