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
from collections.abc import Sequence

import numpy as np

from soap.cluster.topology import Topology
from soap.plan.running.execution_order import ExecutionOrder
from soap.simulator.tasks import Schedule, Task, TaskGraph, TaskKind


def simulate(tasks: TaskGraph) -> Schedule:
    """Start and end of every task."""
    return play(tasks.tasks, tasks.topology)


def play(todo: Sequence[Task], topology: Topology) -> Schedule:
    """The same of tasks that are no iteration's, predecessors first. Resources beyond those of ``Task`` may have any numbers."""
    successors: list[list[int]] = [[] for _ in todo]
    for position, task in enumerate(todo):
        for predecessor in task.predecessors:
            successors[predecessor].append(position)
    waiting = [len(task.predecessors) for task in todo]
    ready, start, end = [0] * len(todo), [0] * len(todo), [0] * len(todo)
    free: dict[int, int] = {}
    launched: dict[int, int] = {}
    clock = topology.device_clock()
    ports = {topology.device_count + port.link: port.device for port in topology.ports}
    queue = [(0, task.id, position) for position, task in enumerate(todo) if not task.predecessors]
    heapq.heapify(queue)
    while queue:
        _, _, position = heapq.heappop(queue)
        task = todo[position]
        start[position] = max([ready[position], *(free.get(resource, 0) for resource in task.resources)])
        if task.launch_ns:
            (device,) = task.resources
            launched[device] = launched.get(device, 0) + task.launch_ns
            start[position] = max(start[position], launched[device] - min(task.launch_ns, task.duration_ns))
        end[position] = start[position] + task.duration_ns
        if task.tile is not None:
            (device,) = task.resources
            end[position] = clock.end_ns(device, start[position], task.duration_ns)
        free.update(dict.fromkeys(task.resources, end[position] - task.latency_ns))
        for own in {ports.get(resource) for resource in task.resources}:
            if own is not None:
                free[own] = max(free.get(own, 0), start[position]) + task.cpu_overhead_ns
                clock.communicated(own, message=task.latency_ns > 0)
        for successor in successors[position]:
            ready[successor] = max(ready[successor], end[position])
            waiting[successor] -= 1
            if waiting[successor] == 0:
                heapq.heappush(queue, (ready[successor], todo[successor].id, successor))
    return Schedule(np.array(start, np.int64), np.array(end, np.int64))


def execution_order(tasks: TaskGraph, schedule: Schedule) -> ExecutionOrder:
    """All tiles by the simulated start of their forward passes, and of their backward passes: the order that the runtime follows.

    Both are topological orders: a task starts no earlier than its predecessors, and if starts are equal, ids follow the graph's order.
    """
    found: dict[TaskKind, list[tuple[int, tuple[int, ...], int]]] = {TaskKind.FORWARD: [], TaskKind.BACKWARD: []}
    for position, task in enumerate(tasks.tasks):  # second runs come where the program puts them: before what needs them
        if task.tile is not None and task.kind in found:
            found[task.kind].append((int(schedule.start_ns[position]), task.id, task.tile))
    return ExecutionOrder(*(tuple(tile for _, _, tile in sorted(own)) for own in found.values()))
