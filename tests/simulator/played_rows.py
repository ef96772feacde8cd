"""Tasks that were played, in the order of their ids, to compare two ways in which these arrays are made."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from soap.plan.offloading import kept_from_host_name, kept_to_host_name
from soap.plan.plan import exchange_name, message_name, need_name, reduce_name
from soap.simulator.memory.plan_arrays import MESSAGE, PlanArrays
from soap.simulator.memory.played import KINDS, NONE, Played
from soap.simulator.tasks import Schedule, TaskGraph, TaskKind, times_of

NAMED = (TaskKind.SYNC, TaskKind.COMPRESS, TaskKind.UPDATE)
BY_TASK = ("kind", "tile", "start", "end", "duration", "launch", "latency", "overhead")
OF_TASKS = ("forward", "backward", "weights", "again", "need", "away", "back", "brought", "returned", "summed", "summed_back")


def in_order(played: Played) -> dict[str, object]:
    """All fields by the tasks' places among all by id. What tasks wait for and hold are sets."""
    order, rank = np.argsort(played.rank), np.append(played.rank, NONE)
    assert np.array_equal(np.sort(played.rank), np.arange(len(order)))
    waits = [frozenset(played.rank[played.waits[a:b]].tolist()) for a, b in zip(played.waits_ptr, played.waits_ptr[1:], strict=False)]
    held = [frozenset(played.held[a:b].tolist()) for a, b in zip(played.held_ptr, played.held_ptr[1:], strict=False)]
    found: dict[str, object] = {name: getattr(played, name)[order].tolist() for name in BY_TASK}
    found |= {name: rank[getattr(played, name)].tolist() for name in OF_TASKS}
    named = {name: (int(rank[first]), int(rank[last])) for name, (first, last) in played.named.items()}
    return found | {"waits": [waits[i] for i in order], "held": [held[i] for i in order], "named": named}


def reference_played(tasks: TaskGraph, schedule: Schedule, arrays: PlanArrays) -> Played:
    """The tasks that ``lowering`` makes, with when they were played, found by their names."""
    plan, todo = tasks.plan, tasks.tasks
    named: dict[str, tuple[int, int]] = {}
    for place, task in enumerate(todo):
        named[task.name] = named.get(task.name, (place,))[0], place
    passes = {(task.kind, task.tile): place for place, task in enumerate(todo) if task.tile is not None}
    carriers = []
    for pattern, number in zip(arrays.carriers.pattern.tolist(), arrays.carriers.number.tolist(), strict=True):
        both = False, True
        if pattern == MESSAGE:
            carriers.append([message_name(plan, plan.messages[number], gradient=gradient) for gradient in both])
        else:
            carriers.append([exchange_name(plan, plan.exchanges[number], gradient=gradient) for gradient in both])
    tiles, operators = plan.tiles, plan.graph.operators
    sums = [[reduce_name(operators[own.operator], own, gradient=gradient) for gradient in (False, True)] for own in plan.reductions]

    def places(names: Iterable[str]) -> np.ndarray:
        return np.array([named[name][0] if name in named else NONE for name in names], np.int64)

    def of(kind: TaskKind) -> np.ndarray:
        return np.array([passes.get((kind, tile), NONE) for tile in range(len(tiles))], np.int64)

    times = times_of(tasks)
    order = sorted(range(len(todo)), key=lambda place: todo[place].id)
    return Played(
        kind=np.array([KINDS[task.kind] for task in todo], np.int64),
        tile=np.array([NONE if task.tile is None else task.tile for task in todo], np.int64),
        start=schedule.start_ns,
        end=schedule.end_ns,
        duration=times.duration,
        launch=times.launch,
        latency=times.latency,
        overhead=times.overhead,
        rank=np.argsort(np.array(order, np.int64)),
        waits_ptr=np.cumsum([0, *(len(task.predecessors) for task in todo)]),
        waits=np.array([other for task in todo for other in task.predecessors], np.int64),
        held_ptr=np.cumsum([0, *(len(task.resources) for task in todo)]),
        held=np.array([resource for task in todo for resource in task.resources], np.int64),
        forward=of(TaskKind.FORWARD),
        backward=of(TaskKind.BACKWARD),
        weights=of(TaskKind.WEIGHTS),
        again=of(TaskKind.RECOMPUTE),
        need=places(need_name(plan.operator(tile), tile) for tile in tiles),
        away=places(kept_to_host_name(plan.operator(tile), tile) for tile in tiles),
        back=places(kept_from_host_name(plan.operator(tile), tile) for tile in tiles),
        brought=places(names[0] for names in carriers),
        returned=places(names[1] for names in carriers),
        summed=places(names[0] for names in sums),
        summed_back=places(names[1] for names in sums),
        named={name: span for name, span in named.items() if todo[span[0]].kind in NAMED},
    )
