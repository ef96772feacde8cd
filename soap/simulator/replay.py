"""Plays tasks that there are, again and again with other times, by the compiled event loop. The counterpart of ``reference.simulate``.

An engine lowers strategies itself. What it cannot lower (two of many equal copies whose readers own parts, ``folding``) is lowered by
``lowering`` and played here. Each task is a slot whose successors stand in a row of their own. Passes of tiles are slots that are launched
and take as long as a device's clock says; all others are communications, which hold what they hold.
"""

from __future__ import annotations

import numpy as np

from soap.simulator.communication.offloading import names_behind_links
from soap.simulator.communication.prices import Communication
from soap.simulator.compiled.events import NO_BOUND, simulate_all
from soap.simulator.compiled.graph_arrays import cluster_tables, graph_tables
from soap.simulator.compiled.groups import DeviceGroups
from soap.simulator.compiled.handles import handle
from soap.simulator.compiled.state import NEVER, OTHER, PULLS, SLOTS, WEIGHTS_TILE, State, make_state
from soap.simulator.compiled.trial import Trial, make_trial
from soap.simulator.tasks import TaskGraph, Times


class Replay:
    """Tasks in compiled form."""

    def __init__(self, tasks: TaskGraph) -> None:
        topology, todo = tasks.topology, tasks.tasks
        communication, graph = Communication(topology), tasks.plan.graph
        cluster = cluster_tables(communication)
        self._first = topology.device_count  # slots before that are updates of devices, of which there are none
        self._state = self._filled(tasks)
        self._trial = make_trial(self._first + len(todo), _resources(tasks), self._first)
        self._handles = (
            handle(graph_tables(graph, topology)), handle(self._state), handle(DeviceGroups(communication, cluster).arrays()),
            handle(self._trial),
        )  # fmt: skip

    def makespan_ns(self, times: Times) -> int:
        """The time of an iteration with these times."""
        own = self._state
        for into, given in zip((own.duration, own.launch, own.latency, own.overhead), times, strict=True):
            into[self._first : self._first + len(given)] = given
        graph, state, groups, trial = self._handles
        return int(simulate_all(graph, state, groups, trial, trial, 0, NO_BOUND))

    @property
    def trial(self) -> Trial:
        """What was played last; task k is slot ``device_count`` + k."""
        return self._trial

    def _filled(self, tasks: TaskGraph) -> State:
        todo, first = tasks.tasks, self._first
        successors: list[list[int]] = [[] for _ in todo]
        for position, task in enumerate(todo):
            for predecessor in task.predecessors:
                successors[predecessor].append(first + position)
        rows = np.cumsum([0, *map(len, successors)]) + len(todo) + 1  # where each row begins: these first, then the rows
        held = [resource for task in todo for resource in task.resources]
        arena = np.array([*rows.tolist(), *(slot for row in successors for slot in row), *held], np.int32)
        places = np.cumsum([0, *(len(task.resources) for task in todo)])[:-1] + len(arena) - len(held)
        own = make_state(len(tasks.plan.graph.operators), 0, 0, first, first + len(todo), len(arena))
        own.arena[: len(arena)] = arena
        own.used[SLOTS], own.used[PULLS], own.pull_slot[0] = first + len(todo), len(todo), first
        own.waits[:first] = NEVER
        slots = slice(first, first + len(todo))
        ordered = sorted(range(len(todo)), key=lambda position: (todo[position].id, position))
        own.key[slots][ordered] = np.arange(len(todo))
        own.waits[slots] = [len(task.predecessors) for task in todo]
        own.kind[slots] = [OTHER if task.tile is None else WEIGHTS_TILE for task in todo]
        devices = [-1 if task.tile is None else task.resources[0] for task in todo]
        own.resource[slots] = np.where(np.array(devices, np.int64) < 0, -1 - places, devices)
        own.resource_n[slots] = [len(task.resources) for task in todo]
        own.index[slots] = np.arange(len(todo))  # the row of its successors; ``sync_row`` of operator 0, whose all slots are, is 0
        own.alive[slots] = 1
        return own


def _resources(tasks: TaskGraph) -> int:
    topology = tasks.topology
    return topology.device_count + len(topology.links) + len(names_behind_links(topology))
