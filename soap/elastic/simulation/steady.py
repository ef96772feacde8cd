"""A training in its steady state: more and more leases are unrolled and played until they repeat, or their rate settles.

A training's leases as timed tasks, so many for each lane, for the event loop that plays iterations (``simulator.reference``).

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

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import inf, log1p, sqrt
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from soap.cluster.topology import Topology
from soap.elastic.clocks import Clocks, waves_needed
from soap.elastic.faults import ElasticError
from soap.elastic.layout import Place
from soap.elastic.simulation.design import Design, Traffic
from soap.elastic.simulation.work import Work
from soap.simulator.chunks import NO_CHUNKS
from soap.simulator.communication.prices import Communication
from soap.simulator.communication.servers import first_cores
from soap.simulator.reference import play
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


LEAST_LEASES, FIRST_LEASES, MOST_LEASES = 4, 16, 256
FIRST_DELAYED = 64
"""Leases of each lane that are played first where there are random delays."""
MOST_TASKS = 400_000
"""Leases are not doubled beyond so many tasks, which take seconds."""
SETTLED = 0.002
"""Relative change of the rate when twice as many leases are played, below which it counts as settled."""
SETTLED_ERROR = 0.01
"""The same with random delays: the rate's relative standard error. Two rates of which one begins as the other may agree by chance."""
PARTS, LEASES_OF_PART = 8, 3
"""Parts of the window whose rates tell the error, and leases of each lane that a part has at least."""


class Period(NamedTuple):
    """``leases`` of each lane are done every ``duration_ns``, again and again."""

    leases: int
    duration_ns: int


@dataclass(frozen=True)
class Steady:
    """``samples_per_second``: of all lanes; exact if there is a ``period``. ``error``: the rate's relative standard error by random delays;
    0 without, infinite if too few leases were played to tell. ``leases``: of each lane that were played; ``settled``: whether the rate had
    settled by then, or repeats. ``idle``: by device, the share of time in which it computes nothing. ``waiting_ns``: by
    lane, for how long a lease waits on average for other lanes, because the bound demands it. ``staleness``: ``Clocks.missing`` of the
    leases begun. ``link_bytes``: by link, of one lease of each lane. ``link_busy``: by link, the share of time in which it is held.
    """

    design: Design
    samples_per_second: float
    period: Period | None
    leases: int
    settled: bool
    idle: Mapping[int, float]
    waiting_ns: tuple[float, ...]
    staleness: Mapping[int, int]
    link_bytes: tuple[int, ...]
    link_busy: tuple[float, ...]
    error: float = 0.0

    @property
    def idle_by_role(self) -> Mapping[str, float]:
        """The mean over the devices of each kind."""
        found: dict[str, list[float]] = {}
        for device, role in self.design.roles.items():
            found.setdefault(role, []).append(self.idle[device])
        return {role: sum(own) / len(own) for role, own in found.items()}

    @property
    def stateful(self) -> int:
        """How many devices hold state."""
        return len(self.design.stateful)


def simulate(
    topology: Topology,
    traffic: Traffic,
    work: Work,
    *,
    delays: Delays = NO_DELAYS,
    most_leases: int = MOST_LEASES,
    most_tasks: int = MOST_TASKS,
    settled: float = SETTLED,
) -> Steady:
    """The steady state of a design's training. Plays 16, 32, … leases of each lane, at most ``most_leases`` and, but for the first four,
    ``most_tasks`` tasks, until what happens repeats or the rate changes by less than ``settled``; with ``delays`` 64, 128, …, until the
    rate's error is below ``SETTLED_ERROR``."""
    within = most_tasks // len(unroll(topology, traffic, work, 1, delays).tasks)
    random = delays.spread > 0
    leases = min(max(LEAST_LEASES, min(FIRST_DELAYED if random else FIRST_LEASES, within)), most_leases)
    before: float | None = None
    while True:
        played = _Played(topology, traffic, unroll(topology, traffic, work, leases, delays))
        rate = played.window.samples_per_second
        error = played.error if random else 0.0
        alike = before is not None and abs(rate / before - 1) < settled
        done = played.window.period is not None or (error < SETTLED_ERROR if random else alike)
        if done or leases >= most_leases or 2 * played.tasks > most_tasks:
            return played.steady(leases, error, settled=done)
        leases, before = min(2 * leases, most_leases), rate


class Window:
    """The time that tells of the steady state: from ``begin_ns``, behind the warm-up, to ``end_ns``. ``finished_ns``: by lane, when
    its leases, of ``batch`` samples each, were finished, in order. ``period``: None if they do not repeat."""

    def __init__(self, finished_ns: Sequence[NDArray[np.int64]], end_ns: int, batch: int) -> None:
        self.finished_ns, self.end_ns, self._batch = finished_ns, end_ns, batch
        self.period = period_of([own[own <= end_ns] for own in finished_ns])
        whole = 1 if self.period is None else self.period.duration_ns  # the latter half, of whole periods if there are any
        self.begin_ns = end_ns // 2 if self.period is None else end_ns - max(1, end_ns // 2 // whole) * whole

    @property
    def samples_per_second(self) -> float:
        """Of all lanes; exact if leases repeat."""
        if self.period is not None:
            return float(Fraction(self.period.leases * self._batch * len(self.finished_ns) * 10**9, self.period.duration_ns))
        return 1e9 * self._batch * rate_of(self.finished_ns, self.begin_ns, self.end_ns)


class _Played:
    """Unrolled leases with their times. What comes after a lane has no more leases says nothing of the steady state."""

    def __init__(self, topology: Topology, traffic: Traffic, unrolled: Unrolled) -> None:
        self._topology, self._design, self._unrolled = topology, traffic.design, unrolled
        schedule = play(unrolled.tasks, topology)
        self.tasks = len(unrolled.tasks)
        self._start_ns, self._end_ns = schedule.start_ns, schedule.end_ns
        finished = [np.sort(self._end_ns[list(own)]) for own in unrolled.ends]
        self.window = Window(finished, int(min(own[-1] for own in finished)), self._design.batch)
        self._begin_ns, self._last_ns = self.window.begin_ns, self.window.end_ns

    @property
    def error(self) -> float:
        """The rate's relative standard error, from those of parts of the window, which are long enough to be nearly independent."""
        borders, finished = np.linspace(self._begin_ns, self._last_ns, PARTS + 1), self.window.finished_ns
        rates = np.array([rate_of(finished, begin, end) for begin, end in pairwise(borders)])
        if rates.mean() * (borders[1] - borders[0]) < LEASES_OF_PART * len(finished):
            return inf
        return float(rates.std(ddof=1) / sqrt(PARTS) / rates.mean())

    def steady(self, leases: int, error: float, *, settled: bool) -> Steady:
        """All figures."""
        length = self._last_ns - self._begin_ns
        devices, links = self._topology.device_count, len(self._topology.links)
        busy, sizes = np.zeros(devices + links, np.int64), np.zeros(links, np.int64)
        ports = {devices + port.link: port.device for port in self._topology.ports}
        for position, task in enumerate(self._unrolled.tasks):
            held = min(int(self._end_ns[position]) - task.latency_ns, self._last_ns) - max(int(self._start_ns[position]), self._begin_ns)
            for resource in task.resources:
                if resource < devices + links:
                    busy[resource] += max(0, held)
                if devices <= resource < devices + links:
                    sizes[resource - devices] += task.bytes
            for own in {ports.get(resource) for resource in task.resources} if held > 0 else ():
                if own is not None:
                    busy[own] += task.cpu_overhead_ns
        idle = {device: max(0.0, 1 - int(busy[device]) / length) for device in self._design.roles}
        waiting = tuple(self._waiting_ns(lane) for lane in range(len(self._design.lanes)))
        moved, held_share = tuple((sizes // leases).tolist()), tuple((busy[devices:] / length).tolist())
        rate, period = self.window.samples_per_second, self.window.period
        return Steady(self._design, rate, period, leases, settled, idle, waiting, self._staleness(), moved, held_share, error)

    def _waiting_ns(self, lane: int) -> float:
        """Mean time between the end of what a lane itself waits for and a lease's start."""
        own = [
            (int(self._start_ns[start]), 0 if before < 0 else int(self._end_ns[before]))
            for start, before in zip(self._unrolled.starts[lane], self._unrolled.own[lane], strict=True)
        ]
        counted = [start - before for start, before in own if self._begin_ns <= start <= self._last_ns]
        return sum(counted) / len(counted) if counted else 0.0

    def _staleness(self) -> Counter[int]:
        """By the clocks themselves, which refuse a lease that may not begin."""
        starts, ends = self._unrolled.starts, self._unrolled.ends
        events = [(int(self._end_ns[task]), 0, lane) for lane, own in enumerate(ends) for task in own]
        events += [(int(self._start_ns[task]), 1, lane) for lane, own in enumerate(starts) for task in own]
        clocks = Clocks(range(len(starts)), self._design.consistency.bound, self._design.in_flight)
        before: Counter[int] | None = None
        for time_ns, begins, lane in sorted(events):
            if time_ns > self._last_ns:
                break
            if time_ns >= self._begin_ns and before is None:
                before = clocks.missing.copy()
            (clocks.started if begins else clocks.finished)(lane)
        return clocks.missing - (before or Counter())


def rate_of(finished_ns: Sequence[NDArray[np.int64]], begin_ns: float, end_ns: float) -> float:
    """Leases per nanosecond of all lanes between two times, by when each lane's were finished, in order. Of a lease that is begun before a
    border and finished behind it the share counts that its time has on this side. Between a first and a last finished lease, short ones
    are more often than they are in all: a long one rather lies across a border, and would be left out."""
    done = [np.interp((begin_ns, end_ns), [0, *own], range(len(own) + 1)) for own in finished_ns]
    return float(sum(end - begin for begin, end in done)) / max(1.0, end_ns - begin_ns)


def period_of(finished_ns: Sequence[NDArray[np.int64]]) -> Period | None:
    """The shortest one that all lanes have kept to over their last leases: a quarter of them, and at least two periods."""
    count = min(map(len, finished_ns))
    for leases in range(1, count // 4 + 1):
        last = max(count // 4, 2 * leases)
        steps = np.concatenate([(own[leases:] - own[:-leases])[-last:] for own in finished_ns])
        if (steps == steps[0]).all():
            return Period(leases, int(steps[0]))
    return None


def rate_bound(topology: Topology, traffic: Traffic, work: Work, *, alike: bool) -> float:
    """No more samples per second than this, without random delays and without playing anything. ``alike``: all lanes do as many leases.

    A lane does its leases one after the other, each no quicker than its longest chain of tasks, and than its phases: what is read comes
    before the rest, what is pushed behind it, and no device or link serves a phase quicker than what the lease's own tasks hold it for.
    Where all lanes go on alike, none is quicker than the resource that their leases together hold longest.
    """
    design = traffic.design
    unrolled = unroll(topology, traffic, work, 1, shortest_chunk_ns=NO_CHUNKS)
    every, chain_ns = Counter[int](), list[int]()
    phases = [[Counter[int](), Counter[int]()] for _ in design.lanes]
    computed_ns = [2 * work.control_ns + work.front_ns(lane) + work.rest_ns(lane) for lane in design.lanes]
    for task in unrolled.tasks:
        phase, lane = task.id[0], task.id[3]
        chain_ns.append(task.duration_ns + max((chain_ns[before] for before in task.predecessors), default=0))
        held = dict.fromkeys(task.resources, task.held_ns)
        every.update(held)
        if phase not in (FRONT, REST):
            phases[lane][phase >= PUSH].update(held)
    alone = 0.0
    for lane, (end,) in enumerate(unrolled.ends):
        read, pushed = (max(own.values(), default=0) for own in phases[lane])
        alone += 1e9 * design.batch * design.in_flight / max(chain_ns[end], computed_ns[lane] + read + pushed)
    return min(alone, 1e9 * design.batch * len(design.lanes) / max(every.values()) if alike else inf)
