"""The list of timed tasks that lowering makes: which resources a task holds, and for how long, whatever it is for."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace

from soap.plan.collectives import Flow, busiest_messages, flow_links
from soap.plan.delivery import Round
from soap.plan.syncs.even_parts import Collective
from soap.simulator.chunks import chunk_count, parts, shortest_chunk_ns
from soap.simulator.communication.prices import Communication
from soap.simulator.costs import nanoseconds
from soap.simulator.tasks import Task, TaskKind, check_id

FORWARD, BACKWARD, SYNC, UPDATE = range(4)
"""Phases, the first part of a task's id."""
COUNT = 6
"""Stage of a sum of counted labels among forward tasks."""
WEIGHTS = 5
"""Stage of a tile's weight gradients among backward tasks, behind all others."""
GATHER = 6
"""Stage of what is gathered again among backward tasks."""
SUM = 7
"""Stage of what is summed again among backward tasks."""


class TaskList:
    """Tasks in the order in which they are added. The methods return a task's position in ``tasks``."""

    def __init__(self, communication: Communication) -> None:
        self.topology = communication.topology
        self.communication = communication
        self.tasks: list[Task] = []
        self._shortest_chunk_ns = shortest_chunk_ns(self.topology)
        self._exchange_links: dict[frozenset[tuple[int, int]], tuple[int, ...]] = {}

    def add(
        self,
        place: tuple[int, ...],
        name: str,
        kind: TaskKind,
        resources: tuple[int, ...],
        duration_ns: int,
        after: Iterable[int],
        size: int = 0,
        tile: int | None = None,
        flows: tuple[Flow, ...] = (),
        launch_ns: int = 0,
        latency_ns: int = 0,
        cpu_overhead_ns: int = 0,
    ) -> int:
        """Add a task. ``place``: its id. ``after``: its predecessors. ModelError if a part of its id is too large."""
        check_id(place)
        predecessors = tuple(sorted(set(after)))
        times = (launch_ns, latency_ns, cpu_overhead_ns)
        self.tasks.append(Task(place, name, kind, resources, duration_ns, predecessors, size, tile, flows, *times))
        return len(self.tasks) - 1

    def wait_also(self, task: int, after: Iterable[int]) -> None:
        """Let a task wait for more tasks, which may come after it in the list."""
        own = self.tasks[task]
        self.tasks[task] = replace(own, predecessors=tuple(sorted({*own.predecessors, *after})))

    def in_order(self) -> tuple[tuple[Task, ...], Sequence[int]]:
        """All tasks, predecessors first, apart from that in the order in which they were added; and by position in ``tasks`` where in that
        order each is."""
        if all(not task.predecessors or task.predecessors[-1] < place for place, task in enumerate(self.tasks)):
            return tuple(self.tasks), range(len(self.tasks))
        order = _topological([task.predecessors for task in self.tasks])
        places = [0] * len(order)
        for place, task in enumerate(order):
            places[task] = place
        tasks = (replace(self.tasks[i], predecessors=tuple(sorted(places[p] for p in self.tasks[i].predecessors))) for i in order)
        return tuple(tasks), places

    def _communication(
        self,
        place: tuple[int, ...],
        name: str,
        kind: TaskKind,
        resources: tuple[int, ...],
        duration_ns: int,
        after: Iterable[int],
        size: int,
        flows: tuple[Flow, ...],
        cpu_overhead_ns: int,
        chunked: bool,
    ) -> int:
        """Add a communication without latency, if it is ``chunked`` in chunks where it is cut (``chunks``). The chunks have one name and
        run one after the other. The last one carries all bytes and flows; its position is returned."""
        count = chunk_count(duration_ns, self._shortest_chunk_ns) if chunked else 1
        if count == 1:
            return self.add(place, name, kind, resources, duration_ns, after, size, flows=flows, cpu_overhead_ns=cpu_overhead_ns)
        times = zip(parts(duration_ns, count), parts(cpu_overhead_ns, count), strict=True)
        for chunk, (part_ns, busy_ns) in enumerate(times):
            told, all_flows = (size, flows) if chunk == count - 1 else (0, ())
            own = (*place, chunk)
            after = (self.add(own, name, kind, resources, part_ns, after, told, flows=all_flows, cpu_overhead_ns=busy_ns),)
        return len(self.tasks) - 1

    def message(
        self,
        place: tuple[int, ...],
        name: str,
        kind: TaskKind,
        source: int,
        target: int,
        size: int,
        after: Iterable[int],
        *,
        overlapped_ns: int = 0,
    ) -> int:
        """Add a message of ``size`` bytes from one device to another. ``overlapped_ns``: as for ``exchange``."""
        resources = self._link_resources(self.topology.route(source, target))
        duration_ns = max(1, self.communication.transfer_ns(size, source, target) - overlapped_ns)
        latency_ns = self.communication.latency_ns(duration_ns, source, target)
        cpu_overhead_ns = self.communication.message_share(source, target).busy_ns(duration_ns - latency_ns)
        return self.add(place, name, kind, resources, duration_ns, after, size, latency_ns=latency_ns, cpu_overhead_ns=cpu_overhead_ns)

    def streamed(
        self,
        place: tuple[int, ...],
        name: str,
        kind: TaskKind,
        source: int,
        target: int,
        size: int,
        after: Iterable[int],
        shortest_chunk_ns: int,
    ) -> tuple[int, ...]:
        """Add a message that holds each link of its route by itself, as packets do that a switch keeps until the next link is free: in
        chunks (``chunks``) of at least so long. A chunk may hold the next link as soon as the one before it has passed this one. If all
        links are free it takes as long as ``message``. Returns the tasks at whose ends it has arrived. The third part of ``place`` must
        be 0."""
        route, first, after = self.topology.route(source, target), len(self.tasks), tuple(after)
        duration_ns = self.communication.transfer_ns(size, source, target)
        latency_ns = self.communication.latency_ns(duration_ns, source, target)
        cpu_overhead_ns = self.communication.message_share(source, target).busy_ns(duration_ns - latency_ns)
        count = chunk_count(duration_ns - latency_ns, shortest_chunk_ns)
        for at, link in enumerate(route):
            held_ns = min(duration_ns - latency_ns, nanoseconds(size / self.topology.effective_bandwidths[link]))
            times = zip(parts(held_ns, count), parts(cpu_overhead_ns, count), strict=True)
            for chunk, (part_ns, busy_ns) in enumerate(times):
                own = (*place[:2], at, *place[3:], chunk)
                earlier = [first + before * count + chunk - 1 for before in range(max(0, at - 1), at + 1)] if chunk else after
                told = size if chunk == count - 1 else 0
                self.add(own, name, kind, self._link_resources((link,)), part_ns, earlier, told, cpu_overhead_ns=busy_ns)
        ends = tuple(first + at * count + count - 1 for at in range(len(route))) or after
        return (self.add(place, name, kind, (), latency_ns, ends),) if latency_ns or not route else ends

    def exchange(
        self,
        place: tuple[int, ...],
        name: str,
        kind: TaskKind,
        rounds: Sequence[Round],
        after: Iterable[int],
        *,
        overlapped_ns: int = 0,
        chunked: bool = False,
    ) -> int:
        """Add a collective of rounds that run one after the other. ``overlapped_ns``: of its time, what passes while tiles run that make or
        read its parts; the task is the rest. ``chunked``: cut it into chunks (``chunks``)."""
        duration_ns = self._rounds_ns(rounds)
        messages = max((busiest_messages(own) for own, _ in rounds), default=0)
        share = self.topology.cpu_overhead.of_exchange(messages + 1)
        left_ns = max(1, duration_ns - overlapped_ns)
        return self._collective(place, name, kind, rounds, left_ns, share.busy_ns(duration_ns), after, chunked=chunked)

    def meeting(self, place: tuple[int, ...], name: str, kind: TaskKind, rounds: Sequence[Round], after: Iterable[int]) -> int:
        """Add a collective whose end the devices wait for: it holds them as well as links."""
        return self._collective(place, name, kind, rounds, self._rounds_ns(rounds), 0, after, _ends(rounds))

    def tree(self, place: tuple[int, ...], name: str, kind: TaskKind, rounds: Sequence[Round], after: Iterable[int]) -> int:
        """Add a broadcast along a tree, or its transpose, a sum at one device."""
        devices = len(_ends(rounds))
        duration_ns = self._rounds_ns(rounds, self.topology.latency_factor.of_tree(devices, len(rounds)))
        share = self.topology.cpu_overhead.of_all_reduce(devices)
        return self._collective(place, name, kind, rounds, duration_ns, share.busy_ns(duration_ns), after)

    def _rounds_ns(self, rounds: Sequence[Round], latency_factor: float | None = None) -> int:
        return sum(self.communication.exchange_ns(own, reduced, latency_factor) for own, reduced in rounds)

    def _collective(
        self,
        place: tuple[int, ...],
        name: str,
        kind: TaskKind,
        rounds: Sequence[Round],
        duration_ns: int,
        cpu_overhead_ns: int,
        after: Iterable[int],
        devices: tuple[int, ...] = (),
        chunked: bool = False,
    ) -> int:
        flows = tuple(flow for own, _ in rounds for flow in own)
        pairs = frozenset((source, target) for source, target, _ in flows)
        if pairs not in self._exchange_links:
            self._exchange_links[pairs] = self._link_resources(flow_links(self.topology, flows))
        size = sum(size for *_, size in flows)
        resources = (*devices, *self._exchange_links[pairs])
        return self._communication(place, name, kind, resources, duration_ns, after, size, flows, cpu_overhead_ns, chunked)

    def all_reduce(
        self,
        place: tuple[int, ...],
        name: str,
        kind: TaskKind,
        size: int,
        devices: tuple[int, ...],
        after: Iterable[int],
        *,
        chunked: bool = False,
    ) -> int:
        """Add an all-reduce of ``size`` bytes over these devices. ``chunked``: cut it into chunks (``chunks``)."""
        duration, links = self.communication.allreduce(size, devices)
        cpu_overhead_ns = self.topology.cpu_overhead.of_all_reduce(len(set(devices))).busy_ns(duration)
        moved = self.communication.allreduce_bytes(size, devices)
        resources = self._link_resources(links)
        return self._communication(place, name, kind, resources, duration, after, moved, (), cpu_overhead_ns, chunked)

    def parted(
        self,
        place: tuple[int, ...],
        name: str,
        kind: TaskKind,
        collective: Collective,
        after: Iterable[int],
        *,
        chunked: bool = False,
    ) -> int:
        """Add an all-gather or a reduce-scatter of equal parts. ``chunked``: cut it into chunks (``chunks``)."""
        duration, links = self.communication.collective(collective)
        cpu_overhead_ns = self.topology.cpu_overhead.of_all_reduce(len(collective.groups[0])).busy_ns(duration)
        moved, resources = collective.moved_bytes, self._link_resources(links)
        return self._communication(place, name, kind, resources, duration, after, moved, (), cpu_overhead_ns, chunked)

    def _link_resources(self, links: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.topology.device_count + link for link in links)


def _topological(predecessors: Sequence[Sequence[int]]) -> list[int]:
    """Numbers of tasks, predecessors first, always the lowest that is possible."""
    successors: list[list[int]] = [[] for _ in predecessors]
    for task, own in enumerate(predecessors):
        for predecessor in own:
            successors[predecessor].append(task)
    waiting = [len(own) for own in predecessors]
    possible, order = [task for task, count in enumerate(waiting) if not count], list[int]()
    heapq.heapify(possible)
    while possible:
        order.append(heapq.heappop(possible))
        for task in successors[order[-1]]:
            waiting[task] -= 1
            if not waiting[task]:
                heapq.heappush(possible, task)
    assert len(order) == len(predecessors), "tasks wait for each other"
    return order


def _ends(rounds: Sequence[Round]) -> tuple[int, ...]:
    """The devices that send or receive, ascending."""
    return tuple(sorted({device for own, _ in rounds for source, target, _ in own for device in (source, target)}))
