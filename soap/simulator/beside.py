"""Several jobs on one cluster, each training step by step on devices of its own: what sharing hosts and links does to them.

All jobs' tasks are played by one event loop on the whole cluster. A job's step begins when its last one is over; how far the jobs are apart
follows from that, but for how far they are at the start, which decides if their steps are of one length. So several starts are played, in
which the jobs begin parts of a step after each other, and a job's step is the mean over them. Counted are steps that begin when every job
has ended one, and end while all go on, until each job has ``LEAST_STEPS`` of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.simulator.communication.offloading import ON_HOST, offload_resource, offload_updater, offloading_device
from soap.simulator.communication.servers import first_cores
from soap.simulator.reference import Loop
from soap.simulator.tasks import Task, TaskGraph, TaskKind

LEAST_STEPS = 4
"""Counted steps of each job, for each start."""
STARTS = 4
MOST_TASKS = 1_000_000
"""Of all jobs together, for each start: a gigabyte, and a minute."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job beside the others. ``step_ns``: a step's mean over all starts; ``least_ns``, ``most_ns``: the means of the starts that are
    best and worst for it. ``alone_ns``: the same without the others. ``steps``: that were counted."""

    step_ns: float
    least_ns: float
    most_ns: float
    alone_ns: float
    steps: int

    @property
    def slowdown(self) -> float:
        """How many times as long a step takes beside the others."""
        return self.step_ns / self.alone_ns


def beside(jobs: Sequence[TaskGraph], whole: Topology) -> tuple[Job, ...]:
    """All jobs on the cluster ``whole``, of which each job's cluster is a part (``cluster.fewer.part_of``), without a device in common.
    StrategyError in one line if these are not, or steps are so different in length that too many would have to be played."""
    check_apart(jobs, whole)
    alone = [_play([_placed(job, whole, _updating([job]))], whole, [0])[0][0] for job in jobs]
    sharing = _updating(jobs)
    placed = [_placed(job, whole, sharing) for job in jobs]
    _check_few(placed, alone)
    runs = [
        _play(placed, whole, [round(start * number % STARTS / STARTS * own) for number, own in enumerate(alone)])
        for start in range(STARTS if len(jobs) > 1 else 1)
    ]
    found = []
    for number, own in enumerate(alone):
        means = [run[number][0] for run in runs]
        found.append(Job(sum(means) / len(means), min(means), max(means), own, sum(run[number][1] for run in runs)))
    return tuple(found)


def check_apart(jobs: Sequence[TaskGraph], whole: Topology) -> None:
    """StrategyError unless each job has devices of ``whole`` to itself."""
    owners: dict[str, int] = {}
    links = {link.name for link in whole.links}
    for number, job in enumerate(jobs, 1):
        own = [device.name for device in job.topology.devices]
        if not {*own} <= {device.name for device in whole.devices} or not {link.name for link in job.topology.links} <= links:
            raise StrategyError(f"job {number} is for cluster {job.topology.name!r}; expected cluster {whole.name!r} or a part of it")
        for name in own:
            if name in owners:
                raise StrategyError(
                    f"device {name!r} is in job {owners[name]} and in job {number}; expected devices of its own for each job (hosts and "
                    "their links may be shared): name each job's devices"
                )
            owners[name] = number


def _check_few(placed: Sequence[Sequence[Task]], alone_ns: Sequence[float]) -> None:
    """StrategyError if too much would be played, as far as that is known from each job alone."""
    longest = (LEAST_STEPS + 2) * max(alone_ns)
    count = sum(len(tasks) * int(longest / max(1.0, own) + 1) for tasks, own in zip(placed, alone_ns, strict=True))
    if count > MOST_TASKS:
        steps = ", ".join(f"{own / 1e6:.3f} ms" for own in alone_ns)
        raise StrategyError(
            f"steps of {steps} beside each other are {count} tasks; expected at most {MOST_TASKS}: jobs on fewer devices, or with steps of "
            "more equal length"
        )


def _updating(jobs: Sequence[TaskGraph]) -> Counter[str]:
    """By host, among how many devices its cores are shared, as these or others of their job offload updates to it."""
    found = Counter[str]()
    for job in jobs:
        part = job.topology
        places = [offloading_device(part, own) for task in job.tasks for own in task.resources]
        busy = {part.devices[place[0]].host for place in places if place is not None and place[1] == ON_HOST}
        found.update(part.hosts[device.host].name for device in part.devices if device.host in busy)
    return found


def _placed(job: TaskGraph, whole: Topology, updating: Mapping[str, int]) -> list[Task]:
    """A job's tasks with the resources of the whole cluster. ``updating``: ``_updating`` of all jobs; what devices of several
    jobs offload, a host's cores update more slowly than what those of this one do."""
    part = job.topology
    devices = {device.name: device.index for device in whole.devices}
    links = {link.name: whole.device_count + link.index for link in whole.links}
    numbers = [devices[device.name] for device in part.devices] + [links[link.name] for link in part.links]
    further = first_cores(whole)[0] - len(numbers)  # hosts and their cores are the same ones
    slower: dict[int, float] = {}

    def moved(resource: int) -> int:
        place = offloading_device(part, resource)
        if place is not None:
            return offload_resource(whole, numbers[place[0]], place[1])
        return numbers[resource] if resource < len(numbers) else resource + further

    def duration_ns(task: Task) -> int:
        place = offloading_device(part, task.resources[0]) if task.resources else None
        if place is None or place[1] != ON_HOST:
            return task.duration_ns
        device = place[0]
        if device not in slower:
            among = updating[part.hosts[part.devices[device].host].name]
            own, shared = offload_updater(part, device), offload_updater(part, device, among)
            slower[device] = own.memory_bandwidth_bytes_per_second / shared.memory_bandwidth_bytes_per_second
        return ceil(task.duration_ns * slower[device])

    return [replace(task, resources=tuple(map(moved, task.resources)), duration_ns=duration_ns(task)) for task in job.tasks]


class _Run:
    """One job in the loop, step after step."""

    def __init__(self, number: int, tasks: Sequence[Task]) -> None:
        self.number, self.tasks = number, tasks
        self.ends_ns: list[int] = []
        self.begin_ns = 0
        followed = {place for task in tasks for place in task.predecessors}
        self._last = [place for place in range(len(tasks)) if place not in followed]
        self._devices = sorted({own for task in tasks if task.launch_ns for own in task.resources})

    def step(self, loop: Loop, first: int, start_ns: int) -> int:
        """Add a step that begins at ``start_ns``; ``first``: how many tasks were added before. Returns the place of the task that ends
        it."""
        loop.launch_from(self._devices, start_ns)
        count, step = len(self.tasks), len(self.ends_ns)
        waiting = Task((step, -1, self.number), "a step begins", TaskKind.UPDATE, (), max(0, start_ns - loop.now_ns), ())
        todo = [waiting]
        for task in self.tasks:
            before = tuple([first + 1 + place for place in task.predecessors]) or (first,)
            todo.append(replace(task, id=(step, *task.id, self.number), predecessors=before))
        ends = tuple([first + 1 + place for place in self._last]) or (first,)
        todo.append(Task((step, 2**60, self.number), "a step is over", TaskKind.UPDATE, (), 0, ends))
        loop.add(todo)
        return first + count + 1

    def counted(self, from_ns: int) -> list[int]:
        """When the steps that began at or after a moment ended, behind when the first of them began."""
        borders = [self.begin_ns, *self.ends_ns]
        return [moment for moment in borders if moment >= from_ns]


def _play(jobs: Sequence[Sequence[Task]], whole: Topology, starts_ns: Sequence[int]) -> list[tuple[float, int]]:
    """For each job the mean step in ns, and how many steps were counted."""
    loop, runs, added = Loop(whole), [_Run(number, tasks) for number, tasks in enumerate(jobs)], 0

    def warm_ns() -> int:
        return max(run.ends_ns[0] for run in runs)

    def go_on(run: _Run, start_ns: int) -> None:
        nonlocal added
        end = run.step(loop, added, start_ns)
        added = end + 1
        loop.watch(end, lambda: ended(run))

    def ended(run: _Run) -> None:
        run.ends_ns.append(loop.now_ns)
        known = all(other.ends_ns for other in runs)
        if not known or any(len(other.counted(warm_ns())) <= LEAST_STEPS for other in runs):
            go_on(run, loop.now_ns)
        else:
            loop.stop()

    for run, start_ns in zip(runs, starts_ns, strict=True):
        run.begin_ns = start_ns
        go_on(run, start_ns)
    loop.run()
    found = []
    for run in runs:
        borders = run.counted(warm_ns())
        found.append(((borders[-1] - borders[0]) / (len(borders) - 1), len(borders) - 1))
    return found
