"""A training in its steady state: more and more leases are unrolled and played until they repeat, or their rate settles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import inf, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from soap.cluster.topology import Topology
from soap.elastic.clocks import Clocks
from soap.elastic.simulation.design import Design, Traffic
from soap.elastic.simulation.unroll import FRONT, NO_DELAYS, PUSH, REST, Delays, Unrolled, unroll
from soap.elastic.simulation.work import Work
from soap.simulator.chunks import NO_CHUNKS
from soap.simulator.reference import play

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
