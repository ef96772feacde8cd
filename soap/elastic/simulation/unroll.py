"""A training's leases as timed tasks, so many for each lane, for the event loop that plays iterations (``simulator.reference``).

A lease is dealt; its front reads the batch, and asks the owner of each partition of each table, and at once for the pieces of the dense
variables; when all is there the rest computes, and pushes to all owners; when all have counted it, the lease is done. That is what
``Worker.work`` does, question by question. Who may begin when is ``Clocks``' rule, which says which leases must be done before: so it is
known before anything is timed. Messages hold links, computations hold devices (owners': a CPU device, or a core of their host) and, where
they use a partition's values, its lock.

Where the leases of a step are one update (``sync``), an owner only keeps what is pushed, and makes the update when the next step's first
question has come (``Shard.bring_to``). Which question that is must be known before anything is timed, too: it is taken to be that of the
lane which reads its batch in the shortest time. The first lease's questions find a step's update to be made as all others do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import log1p, sqrt
from typing import TypeVar

import numpy as np

from soap.cluster.topology import Topology
from soap.elastic.clocks import waves_needed
from soap.elastic.faults import ElasticError
from soap.elastic.layout import Place
from soap.elastic.simulation.design import Design, Traffic
from soap.elastic.simulation.work import Work
from soap.simulator.communication.prices import Communication
from soap.simulator.communication.servers import first_cores
from soap.simulator.task_list import TaskList
from soap.simulator.tasks import Task, TaskKind


@dataclass(frozen=True)
class Delays:
    """A lane's computations for a lease take a random factor of their time, with mean 1 and standard deviation ``spread``, log-normal,
    drawn for each lease by itself from ``seed``: the same however many leases are drawn."""

    spread: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.spread <= 10 or self.seed < 0:
            raise ElasticError(f"delays of spread {self.spread:g} with seed {self.seed}; expected 0 to 10, and a seed from 0 on")

    def factors(self, lanes: int, leases: int) -> list[list[float]]:
        """[lane][lease]."""
        if not self.spread:
            return [[1.0] * leases for _ in range(lanes)]
        sigma = sqrt(log1p(self.spread**2))
        return [
            np.exp(sigma * np.random.default_rng([self.seed, lane]).standard_normal(leases) - sigma**2 / 2).tolist()
            for lane in range(lanes)
        ]


NO_DELAYS = Delays()


DEAL, FRONT, BATCH, ASK, UPDATE, LOOK_UP, SUMS, PULL, COPY, VALUES, REST, PUSH, GRADIENT, COUNT, COUNTED, DONE = range(16)
"""Phases of a lease, the first part of a task's id: of tasks that are ready at once, those of earlier phases come first."""
SHORTEST_CHUNK_NS = 100_000
"""Messages are cut into chunks of this length or more, up to eight, and hold each link of their way by itself: connections share links
packet by packet, and a switch keeps packets. If a message held all its links at once, in the order of readiness, a server's link would
stand idle while a worker still sends to another server: with two servers that are asked by six workers half of the time."""


_Asked = TypeVar("_Asked", bound=Hashable)


@dataclass(frozen=True)
class Unrolled:
    """``tasks``: predecessors first. ``starts``, ``ends``: [lane][lease]: the task at whose start a lease is dealt, and the one at whose
    end the dealer knows that it is done. ``own``: [lane][lease]: the lane's own task after which it might have been dealt but for the
    bound; -1 at the beginning."""

    tasks: tuple[Task, ...]
    starts: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]
    own: tuple[tuple[int, ...], ...]


def required(design: Design, lease: int) -> range:
    """Which leases of each lane must be done before a lane's lease of this number may begin: a wave of them (``Clocks.may_start``)."""
    wave = design.in_flight
    waves = waves_needed(lease, wave, design.consistency.bound)
    return range((waves - 1) * wave, waves * wave) if waves > 0 else range(0)


def unroll(
    topology: Topology,
    traffic: Traffic,
    work: Work,
    leases: int,
    delays: Delays = NO_DELAYS,
    shortest_chunk_ns: int = SHORTEST_CHUNK_NS,
) -> Unrolled:
    """The tasks of so many leases of each lane. ``shortest_chunk_ns``: of messages; ``NO_CHUNKS``: they are whole."""
    unrolling = _Unrolling(topology, traffic, work, leases, delays, shortest_chunk_ns)
    for lease in range(leases):
        unrolling.begin()
        for lane in unrolling.order(lease):
            unrolling.add(lane, lease)
    return unrolling.result()


class _Unrolling:
    """The state of one unrolling."""

    def __init__(self, topology: Topology, traffic: Traffic, work: Work, leases: int, delays: Delays, shortest_chunk_ns: int) -> None:
        self._shortest_chunk_ns = shortest_chunk_ns
        self._topology, self._design, self._traffic, self._work = topology, traffic.design, traffic, work
        self._list = TaskList(Communication(topology))
        self._factors = delays.factors(len(self._design.lanes), leases)
        self._starts: list[list[int]] = [[] for _ in self._design.lanes]
        self._ends: list[list[int]] = [[] for _ in self._design.lanes]
        self._own: list[list[int]] = [[] for _ in self._design.lanes]
        self._numbers = {place: number for number, place in enumerate(self._design.layout.places)}
        self._first_core = first_cores(topology)
        self._first_lock = topology.device_count + len(topology.links) + sum(host.cpu_cores for host in topology.hosts)
        self._answers: dict[tuple[str, Hashable], int] = {}
        self._kept: dict[int, list[int]] = {}
        self._updates: dict[int, int] = {}

    def result(self) -> Unrolled:
        """What was unrolled so far."""
        found = (tuple(map(tuple, own)) for own in (self._starts, self._ends, self._own))
        return Unrolled(tuple(self._list.tasks), *found)

    def begin(self) -> None:
        """The next lease of each lane comes. What lanes have pushed since the last one waits for its first question."""
        self._updates.clear()

    def order(self, lease: int) -> Sequence[int]:
        """The lanes, the one first that reads the batch of this lease in the shortest time."""
        return sorted(range(len(self._design.lanes)), key=lambda lane: (self._front_ns(lane, lease), lane))

    def add(self, lane: int, lease: int) -> None:
        """The tasks of one lease."""
        own, add, message = self._design.lanes[lane], self._adder(lane, lease), self._messenger(lane, lease)
        factor, work = self._factors[lane][lease], self._work
        before = self._ends[lane][lease - self._design.in_flight] if lease >= self._design.in_flight else None
        dealt = add(DEAL, 0, (), work.control_ns, [*([] if before is None else [before]), *self._needed(lease)])
        front = add(FRONT, 0, (own.front,), self._front_ns(lane, lease), [dealt])
        batch = [message(BATCH, 0, own.front, own.rest, self._traffic.needs.input_bytes, [front])] if own.front != own.rest else [front]
        tables = [place for places in self._design.layout.tables.values() for place in places]
        pulled = [self._pull(place, lane, batch, add, message) for place in self._design.layout.dense]
        batch += [self._sums(place, lane, front, add, message) for place in tables]
        rest = add(REST, 0, (own.rest,), round(factor * self._known(work.rest_ns, own)), [*batch, *pulled])
        counted = [self._push(place, lane, rest, add, message) for place in (*tables, *self._design.layout.dense)]
        self._starts[lane].append(dealt)
        self._own[lane].append(-1 if before is None else before)
        self._ends[lane].append(add(DONE, 0, (), work.control_ns, counted))

    def _sums(self, place: Place, lane: int, front: int, add: _Add, message: _Message) -> int:
        own, owner, number = self._design.lanes[lane], self._design.device(place), self._number(place)
        asked = message(ASK, number, own.front, owner, self._known(self._traffic.asking, place), [front])
        after = [asked, *self._updated(place, lane, asked, add)]
        found = add(LOOK_UP, number, self._owner(place, lane, locked=True), self._known(self._work.look_up_ns, place), after)
        return message(SUMS, number, owner, own.rest, self._known(self._traffic.sums, place), [found])

    def _pull(self, place: Place, lane: int, after: list[int], add: _Add, message: _Message) -> int:
        rest, owner, number = self._design.lanes[lane].rest, self._design.device(place), self._number(place)
        asked = message(PULL, number, rest, owner, self._traffic.pulling(), after)
        ready = [asked, *self._updated(place, lane, asked, add)]
        copied = add(COPY, number, self._owner(place, lane, locked=True), self._known(self._work.pull_ns, place), ready)
        return message(VALUES, number, owner, rest, self._known(self._traffic.values, place), [copied])

    def _updated(self, place: Place, lane: int, asked: int, add: _Add) -> list[int]:
        """The update with the step before, which a step's first question of a partition begins; none where each push is one."""
        if not self._design.averaged:
            return []
        number = self._number(place)
        if number not in self._updates:
            after = [asked, *self._kept.pop(number, ())]
            duration_ns = self._known(self._work.update_ns, place)
            self._updates[number] = add(UPDATE, number, self._owner(place, lane, locked=True), duration_ns, after)
        return [self._updates[number]]

    def _push(self, place: Place, lane: int, rest: int, add: _Add, message: _Message) -> int:
        device, owner, number = self._design.lanes[lane].rest, self._design.device(place), self._number(place)
        last = message(PUSH, number, device, owner, self._known(self._traffic.push, place), [rest])
        if place.partition.parameter in self._design.layout.tables:
            last = add(GRADIENT, number, self._owner(place, lane, locked=False), self._known(self._work.gradient_ns, place), [last])
        last = add(COUNT, number, self._owner(place, lane, locked=True), self._known(self._work.count_ns, place), [last])
        if self._design.averaged:
            self._kept.setdefault(number, []).append(last)
        return message(COUNTED, number, owner, device, self._traffic.counted(), [last])

    def _front_ns(self, lane: int, lease: int) -> int:
        return round(self._factors[lane][lease] * self._known(self._work.front_ns, self._design.lanes[lane]))

    def _known(self, ask: Callable[[_Asked], int], of: _Asked) -> int:
        """An answer, which is asked for once: it is the same for all leases."""
        key = ask.__name__, of
        if key not in self._answers:
            self._answers[key] = ask(of)
        return self._answers[key]

    def _needed(self, lease: int) -> list[int]:
        return [self._ends[lane][number] for number in required(self._design, lease) for lane in range(len(self._ends))]

    def _number(self, place: Place) -> int:
        return self._numbers[place]

    def _owner(self, place: Place, lane: int, *, locked: bool) -> tuple[int, ...]:
        """What an owner's work holds. Connections take the cores of a host in turn."""
        device, number = self._topology.devices[self._design.device(place)], self._number(place)
        lock = (self._first_lock + number,) if locked else ()
        if device.type.kind == "cpu":
            return (device.index, *lock)
        cores = self._topology.hosts[device.host].cpu_cores
        return (self._first_core[device.host] + (lane + number) % cores, *lock)

    def _adder(self, lane: int, lease: int) -> _Add:
        def add(phase: int, number: int, resources: tuple[int, ...], duration_ns: int, after: Iterable[int]) -> int:
            place = (phase, lease, 0, lane, number, 0)
            return self._list.add(place, NAMES[phase], KINDS.get(phase, TaskKind.FORWARD), resources, duration_ns, after)

        return add

    def _messenger(self, lane: int, lease: int) -> _Message:
        def message(phase: int, number: int, source: int, target: int, size: int, after: Iterable[int]) -> int:
            place = (phase, lease, 0, lane, number, 0)
            sent = self._list.streamed(place, NAMES[phase], TaskKind.TRANSFER, source, target, size, after, self._shortest_chunk_ns)
            return sent[0] if len(sent) == 1 else self._list.add((*place[:5], 1), NAMES[phase], TaskKind.TRANSFER, (), 0, sent)

        return message


_Add = Callable[[int, int, tuple[int, ...], int, Iterable[int]], int]
_Message = Callable[[int, int, int, int, int, Iterable[int]], int]
NAMES = (
    "deal", "read batch", "send batch", "ask", "update", "look up", "sums", "pull", "copy", "values", "rest", "push", "gradient", "count",
    "counted", "done",
)  # fmt: skip
"""By phase."""
KINDS = {REST: TaskKind.BACKWARD, GRADIENT: TaskKind.BACKWARD, COPY: TaskKind.COPY, COUNT: TaskKind.UPDATE, UPDATE: TaskKind.UPDATE}
