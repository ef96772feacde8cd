"""Slack: how much later each task could end without the iteration taking longer.

The simulation is gone through backward: the latest possible end of a task follows from the tasks that wait for it, and from the next ones
on its devices and links. If the order of service stays the same, every time is a sum, minimum or maximum of earlier times (``reference``).
So if a time rises, no later time falls, and each task's latest time is the one that keeps all later tasks within theirs.
"""

from __future__ import annotations

import heapq
from collections import defaultdict

from soap.simulator.tasks import Schedule, TaskGraph

UNBOUNDED = 2**62
"""Latest time, in nanoseconds, where nothing waits."""


def slack_ns(tasks: TaskGraph, schedule: Schedule) -> list[int]:
    """Slack of each task, in nanoseconds, at least 0: if a task ends that much later and holds its devices and links until then, the
    iteration takes no longer.

    This assumes that every device and link serves in the same order, and that tiles take as long as before (the cold penalty is not
    computed anew). The next task on a device or link waits; a communication that starts later keeps the devices of its ports busy later.
    The slack is exact: one nanosecond more makes the iteration a nanosecond longer.
    """
    return _Backward(tasks, schedule).slack_ns()


def service_order(tasks: TaskGraph, schedule: Schedule) -> list[int]:
    """Positions of the tasks in the order in which ``reference.simulate`` takes them: by the time at which they are ready, then by id."""
    ends = schedule.end_ns.tolist()
    successors: list[list[int]] = [[] for _ in tasks.tasks]
    for position, task in enumerate(tasks.tasks):
        for predecessor in task.predecessors:
            successors[predecessor].append(position)
    waiting = [len(task.predecessors) for task in tasks.tasks]
    queue = [(0, task.id, position) for position, task in enumerate(tasks.tasks) if not task.predecessors]
    heapq.heapify(queue)
    order = []
    while queue:
        _, _, position = heapq.heappop(queue)
        order.append(position)
        for successor in successors[position]:
            waiting[successor] -= 1
            if waiting[successor] == 0:
                ready_ns = max(ends[predecessor] for predecessor in tasks.tasks[successor].predecessors)
                heapq.heappush(queue, (ready_ns, tasks.tasks[successor].id, successor))
    return order


class _Backward:
    """Finds latest times, from the last task to the first. ``_free_by``: resource -> the latest time by which the task that is taken next
    must set it free."""

    def __init__(self, tasks: TaskGraph, schedule: Schedule) -> None:
        self._tasks, links_from = tasks.tasks, tasks.topology.device_count
        self._ports = {links_from + port.link: port.device for port in tasks.topology.ports if port.device is not None}
        self._starts, self._ends = schedule.start_ns.tolist(), schedule.end_ns.tolist()
        self._order = service_order(tasks, schedule)
        self._end_by = [schedule.makespan_ns] * len(self._tasks)
        self._free_by: defaultdict[int, int] = defaultdict(lambda: UNBOUNDED)

    def slack_ns(self) -> list[int]:
        """Slack of each task, in nanoseconds."""
        for position in reversed(self._order):
            self._take(position)
        return [latest - end for latest, end in zip(self._end_by, self._ends, strict=True)]

    def _take(self, position: int) -> None:
        task = self._tasks[position]
        start_by = UNBOUNDED
        for device in {self._ports[resource] for resource in task.resources if resource in self._ports}:
            self._free_by[device] -= task.cpu_overhead_ns  # it is busy from the task's start on
            start_by = min(start_by, self._free_by[device])
        left_by = min(self._end_by[position] - task.latency_ns, *(self._free_by[resource] for resource in task.resources), UNBOUNDED)
        self._end_by[position] = left_by + task.latency_ns
        held_ns = self._ends[position] - self._starts[position] - task.latency_ns
        start_by = min(start_by, left_by - held_ns)
        self._free_by.update(dict.fromkeys(task.resources, start_by))
        for predecessor in task.predecessors:
            self._end_by[predecessor] = min(self._end_by[predecessor], start_by)
