"""The reference simulation: event-driven, in plain Python, obviously right. The oracle for faster engines; nobody optimizes it.

A task is ready when its last predecessor ends. Tasks are taken in the order of (ready time, id). A task starts when all its resources are
free, and holds them to its end. A message holds its links only until its last byte has left; its latency comes after that. So every device
and every link serves in the order of readiness, and the stable id decides ties.

A communication over links with ports costs CPU overhead: it keeps the ports' devices busy for ``Task.cpu_overhead_ns``, from its start, or
from when the device is free if that is later. What the device computes later is delayed; the communication itself is not. A device has one
time from which on it is free, so if a communication waits for its links, what the device takes after it waits too.

A sum of gradients over links with ports, and a long one between GPUs, is a chain of chunks (``chunks``): what becomes ready meanwhile has
its turn between them.

The device's clock says how long a tile takes (``Topology.device_clock``): after a wait, tiles may be slower for a while (cold penalty),
by whether the last communication at the device's ports was a message, which alone has a latency.

A GPU's kernels are launched by its host's processor, in the same order and without waiting for the GPU. A pass of a tile begins no earlier
than its first kernel is launched, and ends no earlier than its last one is. If launching takes longer than computing, launching decides.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from soap.cluster.topology import Topology
from soap.plan.running.order import ExecutionOrder
from soap.simulator.tasks import Schedule, Task, TaskGraph, TaskKind


def simulate(tasks: TaskGraph) -> Schedule:
    """Start and end of every task."""
    return play(tasks.tasks, tasks.topology)


def play(todo: Sequence[Task], topology: Topology, waits: Sequence[Sequence[int]] | None = None) -> Schedule:
    """The same of tasks that are no iteration's. Resources beyond those of ``Task`` may have any numbers. ``waits``: by task, in
    the place of its predecessors."""
    loop = Loop(topology)
    loop.add(todo, waits)
    loop.run()
    return loop.schedule()


class Loop:
    """The event loop, to which tasks may be added while it runs: in what is called when a watched task is ready (``watch``), as what comes
    next may depend on who was first. ``now_ns``: when the last task that was taken became ready; nothing begins before that."""

    def __init__(self, topology: Topology) -> None:
        self.now_ns = 0
        self._todo: list[Task] = []
        self._successors: list[list[int]] = []
        self._waiting: list[int] = []
        self._ready: list[int] = []
        self._start: list[int] = []
        self._end: list[int] = []
        self._queue: list[tuple[int, tuple[int, ...], int]] = []
        self._watched: dict[int, Callable[[], None]] = {}
        self._free: dict[int, int] = {}
        self._launched: dict[int, int] = {}
        self._clock = topology.device_clock()
        self._ports = {topology.device_count + port.link: port.device for port in topology.ports}

    def schedule(self) -> Schedule:
        """Start and end of every task, in the order in which they were added."""
        return Schedule(np.array(self._start, np.int64), np.array(self._end, np.int64))

    def watch(self, position: int, call: Callable[[], None]) -> None:
        """Call this once when a task that was not taken yet has been."""
        self._watched[position] = call

    def launch_from(self, devices: Iterable[int], moment_ns: int) -> None:
        """Launch no further kernels of these devices before this moment, as at the start of a step that waits for the one before."""
        for device in devices:
            self._launched[device] = max(self._launched.get(device, 0), moment_ns)

    def add(self, tasks: Sequence[Task], waits: Sequence[Sequence[int]] | None = None) -> None:
        """More tasks, whose predecessors are positions among all that were added, these included. ``waits``: as in ``play``."""
        first = len(self._todo)
        for task in tasks:
            self._todo.append(task)
            self._successors.append([])
            self._waiting.append(0)
            self._ready.append(self.now_ns)
            self._start.append(0)
            self._end.append(-1)
        for position, task in enumerate(tasks, first):
            for predecessor in task.predecessors if waits is None else waits[position - first]:
                if self._end[predecessor] < 0:
                    self._successors[predecessor].append(position)
                    self._waiting[position] += 1
                else:
                    self._ready[position] = max(self._ready[position], self._end[predecessor])
            if self._waiting[position] == 0:
                heapq.heappush(self._queue, (self._ready[position], task.id, position))

    def stop(self) -> None:
        """Take no further task; what was not taken has no times."""
        self._queue.clear()

    def run(self) -> None:
        """Play all that there is, and what is added meanwhile."""
        while self._queue:
            self.now_ns, _, position = heapq.heappop(self._queue)
            end = self._take(position)
            for successor in self._successors[position]:
                self._ready[successor] = max(self._ready[successor], end)
                self._waiting[successor] -= 1
                if self._waiting[successor] == 0:
                    heapq.heappush(self._queue, (self._ready[successor], self._todo[successor].id, successor))
            if self._watched and position in self._watched:
                self._watched.pop(position)()

    def _take(self, position: int) -> int:
        """A task starts as soon as its resources are free. Returns its end."""
        task, free = self._todo[position], self._free
        start = max([self._ready[position], *(free.get(resource, 0) for resource in task.resources)])
        if task.launch_ns:
            (device,) = task.resources
            self._launched[device] = self._launched.get(device, 0) + task.launch_ns
            start = max(start, self._launched[device] - min(task.launch_ns, task.duration_ns))
        end = start + task.duration_ns
        if task.tile is not None:
            (device,) = task.resources
            end = self._clock.end_ns(device, start, task.duration_ns)
        self._start[position], self._end[position] = start, end
        free.update(dict.fromkeys(task.resources, end - task.latency_ns))
        for own in {self._ports.get(resource) for resource in task.resources}:
            if own is not None:
                free[own] = max(free.get(own, 0), start) + task.cpu_overhead_ns
                self._clock.communicated(own, message=task.latency_ns > 0)
        return end


def execution_order(tasks: TaskGraph, schedule: Schedule) -> ExecutionOrder:
    """All tiles by the simulated start of their forward passes, and of their backward passes: the order that the runtime follows.

    Both are topological orders: a task starts no earlier than its predecessors, and if starts are equal, ids follow the graph's order.
    """
    found: dict[TaskKind, list[tuple[int, tuple[int, ...], int]]] = {TaskKind.FORWARD: [], TaskKind.BACKWARD: []}
    for position, task in enumerate(tasks.tasks):  # second runs come where the program puts them: before what needs them
        if task.tile is not None and task.kind in found:
            found[task.kind].append((int(schedule.start_ns[position]), task.id, task.tile))
    return ExecutionOrder(*(tuple(tile for _, _, tile in sorted(own)) for own in found.values()))
