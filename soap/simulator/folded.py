"""The outcome of a folded simulation: what two copies tell, extended to all copies. Equal, to the byte, to ``simulate.Simulation``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from soap.cluster.topology import Topology
from soap.plan.copies import LEFT
from soap.simulator.analysis.timeline import collectives_of, critical_path_ns, sum_groups, task_links
from soap.simulator.communication.algorithms import Algorithm
from soap.simulator.communication.allreduce import allreduce_bytes, link_shares, parted_link_bytes
from soap.simulator.folding import Folding
from soap.simulator.memory.curves import MemoryCurve
from soap.simulator.memory.sizes import overflow_bytes
from soap.simulator.memory.sweep import expected_peaks, memory_over_time, peaks_by_kind
from soap.simulator.tasks import Schedule, Task, TaskGraph, TaskKind
from soap.simulator.throughput import Throughput, throughput

Longs = NDArray[np.int64]
COMMON, EACH = LEFT, LEFT + 1
"""In place of a copy's number: a task that all copies take part in, together or each by itself."""


@dataclass(frozen=True)
class FoldedSimulation:
    """One training iteration. ``tasks`` and ``schedule`` are those of two copies on the small topology."""

    folding: Folding
    tasks: TaskGraph
    schedule: Schedule
    optimizer_states: int

    @property
    def topology(self) -> Topology:
        """The whole cluster."""
        return self.folding.whole

    @property
    def makespan_ns(self) -> int:
        """Time of one iteration."""
        return self.schedule.makespan_ns

    @property
    def memory_over_time(self) -> tuple[MemoryCurve, ...]:
        """How much memory each device of the two copies holds over time."""
        return self._curves[:-1]

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """The peak memory to expect on each device of the cluster, with an allowance (``sweep.ALLOWANCE``)."""
        return tuple(self.folding.for_all(self._expected))

    @cached_property
    def peak_by_kind(self) -> tuple[dict[str, int], ...]:
        """Bytes by kind that each device's expected peak is made of: values, gradients, states, … (``sweep.peaks_by_kind``)."""
        return tuple(self.folding.for_all(peaks_by_kind(self._curves, self._expected)))

    @property
    def host_memory(self) -> tuple[int, ...]:
        """Bytes that each host holds for parameter servers: none, since plans with servers are not folded."""
        return (0,) * len(self.topology.hosts)

    @cached_property
    def overflow_bytes(self) -> int:
        """Bytes of memory that the devices lack, added up; 0 if everything fits."""
        return overflow_bytes(self.peak_bytes, self.topology)

    @property
    def fits(self) -> bool:
        """Whether every device has enough memory."""
        return self.overflow_bytes == 0

    @cached_property
    def throughput(self) -> Throughput:
        """Samples and tokens per second, utilisation and cost."""
        return throughput(self.folding.graph, self.topology, self.makespan_ns)

    @cached_property
    def bytes_moved(self) -> int:
        """Bytes that devices send each other."""
        return sum(size * times for size, times in zip(self.task_bytes, self._times, strict=True))

    @property
    def task_bytes(self) -> Iterator[int]:
        """For each task, bytes that it moves in one of the copies for which it stands, or in all that take part."""
        for task, copy in zip(self.tasks.tasks, self._copy, strict=True):
            yield task.bytes * self.folding.count // LEFT if copy == EACH else task.bytes

    @property
    def messages(self) -> int:
        """Communications in an iteration, of all copies."""
        return sum(times for task, times in zip(self.tasks.tasks, self._times, strict=True) if task.bytes > 0)

    @property
    def between_hosts(self) -> NDArray[np.bool_]:
        """By link of the small topology, see ``Folding``; for ``DrawnTasks``."""
        return self.folding.between_hosts

    @property
    def task_count(self) -> int:
        """Tasks of all copies."""
        return sum(self._times)

    @property
    def critical_path_ns(self) -> dict[TaskKind, int]:
        """Nanoseconds of the critical path by kind of task."""
        return critical_path_ns(self.tasks, self.schedule)

    @cached_property
    def busy_ns(self) -> dict[str, int]:
        """Nanoseconds for which each device and link of the cluster is held, by name."""
        small = self.folding.topology
        held = np.zeros(small.device_count + len(small.links) + 1, np.int64)
        for task in self.tasks.tasks:
            held[list(task.resources)] += task.held_ns
        devices = self.folding.for_all([*held[: small.device_count].tolist(), 0])
        links = held[small.device_count :][self._stand_in].tolist()
        names = [device.name for device in self.topology.devices] + [link.name for link in self.topology.links]
        return dict(zip(names, devices + links, strict=True))

    @cached_property
    def link_bytes(self) -> dict[str, int]:
        """Bytes that cross each link of the cluster, by name."""
        communication, groups, collectives = self.folding.communication, self._groups, collectives_of(self.tasks.plan)
        local = np.zeros(len(self.folding.topology.links) + 1, np.int64)
        carried = np.zeros(len(self.topology.links), np.int64)
        shares: dict[tuple[tuple[int, ...], Algorithm], tuple[Longs, Longs, int]] = {}
        for task, copy in zip(self.tasks.tasks, self._copy, strict=True):
            parted = collectives.get(task.name)
            if parted is not None:
                chosen = [(local, self.folding.topology, group) for group in parted.groups]
                if copy == COMMON:
                    chosen = [(carried, self.topology, communication.common[groups[task.name]].devices)]
                for counted, cluster, group in chosen if task.bytes else ():
                    for link, size in parted_link_bytes(cluster, group, parted.size_bytes).items():
                        counted[link] += size
            elif task.bytes and copy != COMMON:
                for link, size in task_links(communication, task, groups):
                    local[link] += size
            elif task.bytes:
                devices = communication.common[groups[task.name]].devices
                reduced_bytes = task.bytes // allreduce_bytes(1, len(devices))
                key = (devices, communication.allreduce_option(reduced_bytes, groups[task.name]).algorithm)
                if key not in shares:
                    found, parts = link_shares(self.topology, key[1], devices)
                    shares[key] = np.array(list(found), np.int64), np.array(list(found.values()), np.int64), parts
                links, shown, parts = shares[key]
                carried[links] += -(-shown * reduced_bytes // parts)
        inside = self.folding.local.ravel()
        carried[inside] += local[self._stand_in[inside]]
        return dict(zip([link.name for link in self.topology.links], carried.tolist(), strict=True))

    @cached_property
    def _expected(self) -> tuple[int, ...]:
        """The expected peaks of the small topology's devices and of an idle one."""
        return expected_peaks(curve.peak_bytes for curve in self._curves)

    @cached_property
    def _curves(self) -> tuple[MemoryCurve, ...]:
        return memory_over_time(self._with_an_idle_device, self.schedule, self.optimizer_states)

    @cached_property
    def _stand_in(self) -> Longs:
        """Link of the cluster -> the link of the small topology that represents it; one past the last if it is never held."""
        local, found = self.folding.local, self.folding.alike.copy()
        found[local[LEFT:]] = found[local[1]]
        return np.where(found < 0, len(self.folding.topology.links), found)

    @cached_property
    def _copy(self) -> list[int]:
        """For each task, its copy: 0, 1, ``COMMON`` or ``EACH``."""
        copies, small = self.folding.copies, self.folding.topology
        own = set(copies.images[0].tolist())
        first = {i for i, device in enumerate(copies.devices) if device in own}
        first.update((small.device_count + self.folding.alike[self.folding.local[0]]).tolist())
        found = []
        for task in self.tasks.tasks:
            common = task.kind in (TaskKind.REDUCE, TaskKind.SYNC) and self._groups.get(task.name) in self.folding.communication.common
            own = {resource in first for resource in task.resources or (self._resource(task),)}
            found.append(COMMON if common else EACH if len(own) > 1 else 0 if True in own else 1)
        return found

    def _resource(self, task: Task) -> int:
        """The device whose tile needs something, for a need, which holds nothing itself (``second_runs``)."""
        plan = self.tasks.plan
        operator = len(plan.graph.operators) - 1 - task.id[1]
        return plan.tiles[plan.first_tile[operator] + task.id[3]].device

    @cached_property
    def _times(self) -> list[int]:
        """For each task, how many copies of the cluster it stands for."""
        return [self.folding.count - 1 if copy == 1 else 1 for copy in self._copy]

    @cached_property
    def _groups(self) -> Mapping[str, tuple[int, ...]]:
        """Name of each sum, and of each collective of equal parts -> its devices."""
        plan = self.tasks.plan
        return {**sum_groups(plan), **{name: own.groups[0] for name, own in collectives_of(plan).items()}}

    @cached_property
    def _with_an_idle_device(self) -> TaskGraph:
        """The tasks of two copies, with one more device, which represents all idle devices."""
        return replace(self.tasks, plan=self.folding.with_an_idle_device(self.tasks.plan))
