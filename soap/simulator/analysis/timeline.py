"""Views of a schedule: a table, a Chrome trace, the critical path, the slack of tasks, how busy each device and link is, the bytes on it.

Traces are JSON objects in Chrome's Trace Event Format, which Perfetto opens. A predicted and a measured trace have the same task names
and one thread per device, so that ``merge_traces`` shows them side by side.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from soap.plan.collectives import flow_links
from soap.plan.plan import Plan, reduce_name
from soap.plan.samples import count_name
from soap.plan.syncs.clipping import NORM_NAME, sums_norm
from soap.plan.syncs.even_parts import Collective
from soap.plan.syncs.seam import method_for
from soap.simulator.communication import allreduce
from soap.simulator.communication.offloading import names_behind_links
from soap.simulator.communication.prices import Communication
from soap.simulator.memory.curves import MemoryCurve
from soap.simulator.tasks import Schedule, Task, TaskGraph, TaskKind

Trace = dict[str, Any]
"""A Chrome trace as plain JSON values: ``traceEvents`` and ``displayTimeUnit``."""
MeasuredEvent = tuple[int, str, str, int, int]
"""(rank, task name, kind, start, end), in nanoseconds on one clock."""

COMPUTE_KINDS = frozenset(
    {TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD, TaskKind.WEIGHTS, TaskKind.COMPRESS, TaskKind.UPDATE}
)
NS_PER_US = 1000


def resource_names(tasks: TaskGraph) -> list[str]:
    """Names of all resources in the order of their numbers: devices, links, CPU cores, and what offloading uses."""
    topology = tasks.topology
    return [device.name for device in topology.devices] + [link.name for link in topology.links] + names_behind_links(topology)


def shown_resources(tasks: TaskGraph) -> dict[int, str]:
    """Number -> name of all devices and links, and of the CPU cores that are used."""
    always = tasks.topology.device_count + len(tasks.topology.links)
    used = {resource for task in tasks.tasks for resource in task.resources}
    return {number: name for number, name in enumerate(resource_names(tasks)) if number < always or number in used}


def chrome_trace(
    tasks: TaskGraph, schedule: Schedule, process_name: str = "simulated", memory: Sequence[MemoryCurve] = ()
) -> Trace:
    """The schedule as one process with a thread per device, link and busy CPU core; a task that holds several links shows on each.

    A tile's event names its operator's kind. A message's event ends when it sets its links free, and says how much later it arrives
    (``latency_ns``), because viewers draw only one of two overlapping events on a thread. Each chunk has an event of its own. ``memory``:
    the curve of each device, shown as a counter.
    """
    events = _process_events(process_name, shown_resources(tasks))
    details = task_details(tasks)
    for task, start in zip(tasks.tasks, schedule.start_ns.tolist(), strict=True):
        told = details.get(task.name, {}) | ({"latency_ns": task.latency_ns} if task.latency_ns else {})
        if task.chunk is not None:
            told = told | {"chunk": task.chunk}
        for resource in task.resources:
            events.append(_complete_event(task.name, task.kind.value, resource, start, start + task.held_ns, told))
    for device, curve in zip(tasks.topology.devices, memory, strict=False):
        for time_ns, held in zip(curve.times_ns.tolist(), curve.bytes_held.tolist(), strict=True):
            counter = {"name": f"memory of {device.name}", "ph": "C", "pid": 0, "ts": time_ns / NS_PER_US}
            events.append({**counter, "args": {"bytes": held}})
    return _trace(events)


def task_details(tasks: TaskGraph) -> dict[str, dict[str, Any]]:
    """Task name -> what a trace says about it beside its time: ``bytes`` if it moves something, ``operator`` (its kind) if it is a tile."""
    details: dict[str, dict[str, Any]] = {}
    for task in tasks.tasks:
        if task.bytes:
            details[task.name] = {"bytes": task.bytes}
        elif task.tile is not None:
            details[task.name] = {"operator": tasks.plan.operator(tasks.plan.tiles[task.tile]).kind}
    return details


def measured_trace(
    events: Iterable[MeasuredEvent],
    process_name: str = "measured",
    device_names: Sequence[str] | None = None,
    details: Mapping[str, Mapping[str, Any]] | None = None,
) -> Trace:
    """What ranks measured, as a trace like ``chrome_trace``'s. Times count from the first event.

    Every rank has one thread for computation, named after its device, and as many for communication as run at once. ``device_names``: by
    rank; "rank 0", "rank 1", … if not given. ``details``: task name -> what else to say about it.
    """
    ordered = sorted(events, key=lambda event: (event[3], event[0], event[4], event[1]))
    count = max((rank for rank, *_ in ordered), default=-1) + 1
    names = list(device_names or ()) + [f"rank {rank}" for rank in range(len(device_names or ()), count)]
    lanes = _Lanes(len(names))
    origin_ns = ordered[0][3] if ordered else 0
    shown = []
    for rank, name, kind, start, end in ordered:
        thread = rank if kind in COMPUTE_KINDS else lanes.thread(rank, start, end)
        shown.append(_complete_event(name, kind, thread, start - origin_ns, end - origin_ns, (details or {}).get(name)))
    communication = [f"{names[rank]} communication" for rank in lanes.ranks]
    return _trace(_process_events(process_name, dict(enumerate([*names, *communication]))) + shown)


def middle_iteration(iterations: Sequence[Sequence[MeasuredEvent]]) -> tuple[Sequence[MeasuredEvent], dict[str, int]]:
    """The iteration of median length (of at least one), and each task's median duration over all of them, in nanoseconds."""
    durations: dict[str, list[int]] = {}
    for events in iterations:
        for _, name, _, start, end in events:
            durations.setdefault(name, []).append(end - start)
    ordered = sorted(iterations, key=span_ns)
    return ordered[(len(ordered) - 1) // 2], {name: int(median(found)) for name, found in durations.items()}


def span_ns(events: Iterable[MeasuredEvent]) -> int:
    """From the start of the first event to the end of the last; 0 if there are none."""
    spans = [(start, end) for *_, start, end in events]
    return max((end for _, end in spans), default=0) - min((start for start, _ in spans), default=0)


def merge_traces(*traces: Trace) -> Trace:
    """One trace with all processes of all traces, in order and renumbered. The given traces stay unchanged."""
    merged: list[dict[str, Any]] = []
    count = 0
    for trace in traces:
        numbers = {pid: count + i for i, pid in enumerate(sorted({event["pid"] for event in trace["traceEvents"]}))}
        for event in trace["traceEvents"]:
            copy = {**event, "pid": numbers[event["pid"]]}
            if event["name"] == "process_sort_index":
                copy["args"] = {"sort_index": copy["pid"]}
            merged.append(copy)
        count += len(numbers)
    return _trace(merged)


def critical_path(tasks: TaskGraph, schedule: Schedule) -> list[int]:
    """Positions of the tasks that decide the makespan, first to last: each starts when the one before it ends or sets a resource free.

    A task waits for its predecessors, or for a device or link that another task holds. If several of them end at that time, a predecessor
    comes before the holder of a resource, then the lowest position. A task that waits for its device because of CPU overhead or launches
    follows its latest predecessor.
    """
    if not tasks.tasks:
        return []
    ends, starts = schedule.end_ns.tolist(), schedule.start_ns.tolist()
    holders = _holders_by_release(tasks, ends)
    position: int | None = ends.index(max(ends))
    path: list[int] = []
    while position is not None:
        path.append(position)
        position = _reason(tasks.tasks[position], starts[position], ends, holders)
    return path[::-1]


def critical_path_ns(tasks: TaskGraph, schedule: Schedule) -> dict[TaskKind, int]:
    """Nanoseconds of the critical path by kind of task; they add up to the makespan."""
    found: dict[TaskKind, int] = {}
    path = critical_path(tasks, schedule)
    for position, part_ns in zip(path, path_parts_ns(schedule, path), strict=True):
        kind = tasks.tasks[position].kind
        found[kind] = found.get(kind, 0) + part_ns
    return found


def path_parts_ns(schedule: Schedule, path: Sequence[int]) -> list[int]:
    """For each task of a critical path, the nanoseconds until the next one begins. They add up to the makespan: CPU overhead and launches
    between two tasks count with the first of them."""
    if not path:
        return []
    begins = [0, *schedule.start_ns[list(path[1:])].tolist()]
    return [following - begin for begin, following in zip(begins, [*begins[1:], schedule.makespan_ns], strict=True)]


def busy_time_ns(tasks: TaskGraph) -> dict[str, int]:
    """Nanoseconds for which each device, link and used CPU core is held during the iteration, by name."""
    names = shown_resources(tasks)
    busy = dict.fromkeys(names, 0)
    for task in tasks.tasks:
        for resource in task.resources:
            busy[resource] += task.held_ns
    return {name: busy[number] for number, name in names.items()}


def link_bytes(tasks: TaskGraph) -> dict[str, int]:
    """Bytes that cross each link during the iteration, by name. Bytes that travel over several links count on each."""
    carried = [0] * len(tasks.topology.links)
    groups, collectives, communication = sum_groups(tasks.plan), collectives_of(tasks.plan), Communication(tasks.topology)
    for task in tasks.tasks:
        if task.bytes and task.name in collectives:
            own = collectives[task.name]
            for devices in own.groups:
                for link, size in allreduce.parted_link_bytes(tasks.topology, devices, own.size_bytes).items():
                    carried[link] += size
        elif task.bytes:
            for link, size in task_links(communication, task, groups):
                carried[link] += size
    return {link.name: size for link, size in zip(tasks.topology.links, carried, strict=True)}


def bytes_moved(tasks: TaskGraph) -> int:
    """Bytes that devices send each other during the iteration, counted once, however many links they cross."""
    return sum(task.bytes for task in tasks.tasks)


class _Lanes:
    """Threads for communications of one rank that overlap, numbered from ``first``: on one thread a viewer draws only nested events."""

    def __init__(self, first: int) -> None:
        self.ranks: list[int] = []
        self._first = first
        self._free_ns: list[int] = []

    def thread(self, rank: int, start_ns: int, end_ns: int) -> int:
        """The rank's first free thread; a new one if none is free. Call it in the order of starts."""
        for lane, owner in enumerate(self.ranks):
            if owner == rank and self._free_ns[lane] <= start_ns:
                break
        else:
            lane = len(self.ranks)
            self.ranks.append(rank)
            self._free_ns.append(0)
        self._free_ns[lane] = end_ns
        return self._first + lane


def sum_groups(plan: Plan) -> Mapping[str, tuple[int, ...]]:
    """Name of each all-reduce -> its devices."""
    steps = (step for sync in plan.syncs for step in method_for(sync).steps(plan, sync))
    groups = {step.name: step.among for step in steps if step.summed_bytes}
    for reduction in plan.reductions:
        groups[count_name(plan.graph, reduction)] = reduction.devices
        for gradient in (False, True):
            groups[reduce_name(plan.graph.operators[reduction.operator], reduction, gradient=gradient)] = reduction.devices
    return groups | ({NORM_NAME: tuple(range(plan.device_count))} if sums_norm(plan) else {})


def collectives_of(plan: Plan) -> Mapping[str, Collective]:
    """Name of each collective of equal parts -> what it is."""
    steps = (step for sync in plan.syncs for step in method_for(sync).steps(plan, sync))
    return {step.name: step.collective for step in steps if step.collective is not None}


def task_links(communication: Communication, task: Task, groups: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """(link number, bytes) of a task that moves something. For an all-reduce (``groups``: see ``sum_groups``) the bytes are rounded up."""
    topology = communication.topology
    if task.flows:
        yield from flow_links(topology, task.flows).items()
        return
    if task.name not in groups:
        yield from ((resource - topology.device_count, task.bytes) for resource in task.resources)
        return
    devices = groups[task.name]
    reduced_bytes = task.bytes // allreduce.allreduce_bytes(1, len(devices))
    algorithm = communication.allreduce_option(reduced_bytes, devices).algorithm
    yield from allreduce.link_bytes(topology, algorithm, devices, reduced_bytes).items()


def _holders_by_release(tasks: TaskGraph, ends: Sequence[int]) -> dict[tuple[int, int], int]:
    """(resource, time) -> the task with the lowest position that sets the resource free at that time."""
    holders: dict[tuple[int, int], int] = {}
    for position, task in enumerate(tasks.tasks):
        for resource in task.resources:
            holders.setdefault((resource, ends[position] - task.latency_ns), position)
    return holders


def _reason(task: Task, start_ns: int, ends: Sequence[int], holders: Mapping[tuple[int, int], int]) -> int | None:
    """The task whose end let this one start, or whose device or link became free; None if it starts at the beginning."""
    if start_ns == 0:
        return None
    for predecessor in task.predecessors:
        if ends[predecessor] == start_ns:
            return predecessor
    found = [holders[resource, start_ns] for resource in task.resources if (resource, start_ns) in holders]
    if found or not task.predecessors:
        return min(found, default=None)
    return max(task.predecessors, key=lambda predecessor: (ends[predecessor], -predecessor))  # it waited for CPU overhead or a launch


def _process_events(process_name: str, threads: Mapping[int, str]) -> list[dict[str, Any]]:
    """Metadata of process 0: its name and the names of its threads, which are shown in the order of their numbers."""
    events = [_metadata("process_name", 0, {"name": process_name}), _metadata("process_sort_index", 0, {"sort_index": 0})]
    for thread, name in threads.items():
        events.append(_metadata("thread_name", thread, {"name": name}))
        events.append(_metadata("thread_sort_index", thread, {"sort_index": thread}))
    return events


def _metadata(name: str, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": 0, "tid": thread, "args": args}


def _complete_event(
    name: str, kind: str, thread: int, start_ns: int, end_ns: int, args: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    event = {"name": name, "cat": kind, "ph": "X", "pid": 0, "tid": thread}
    event |= {"ts": start_ns / NS_PER_US, "dur": (end_ns - start_ns) / NS_PER_US}
    return {**event, "args": dict(args)} if args else event


def _trace(events: list[dict[str, Any]]) -> Trace:
    return {"traceEvents": events, "displayTimeUnit": "ms"}


UNBOUNDED = 2**62
"""Latest time, in nanoseconds, where nothing waits."""


def slack_ns(tasks: TaskGraph, schedule: Schedule) -> list[int]:
    """Slack of each task, in nanoseconds, at least 0: if a task ends that much later and holds its devices and links until then, the
    iteration takes no longer.

    The simulation is gone through backward: the latest possible end of a task follows from the tasks that wait for it, and from the next
    ones on its devices and links. If the order of service stays the same, every time is a sum, minimum or maximum of earlier times
    (``reference``). So if a time rises, no later time falls, and each task's latest time is the one that keeps all later tasks within
    theirs.

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
