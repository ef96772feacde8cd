"""The steady state of virtual workers: more and more waves are played until they repeat, or their rate settles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from soap.cluster.topology import Topology
from soap.elastic.simulation.delays import NO_DELAYS, Delays
from soap.elastic.simulation.steady import SETTLED, Period, period_of, rate_of
from soap.mixed.partitioning import WorkerPlan
from soap.mixed.servers import Placement
from soap.mixed.training import Training

FIRST_MINIBATCHES, MOST_MINIBATCHES = 48, 1024
LEADS = 4
"""What is played is this many times what a worker may be ahead of another: before it is, nobody waits."""
MOST_TASKS = 400_000
"""Minibatches are not doubled beyond so many tasks, which take seconds."""


@dataclass(frozen=True)
class MixedSteady:
    """``samples_per_second``: of all workers; exact if there is a ``period``. ``minibatches``: of each worker that were played;
    ``settled``: whether the rate had settled by then, or repeats. ``idle``: by device, the share of time in which it computes nothing.
    ``waiting_ns``: by worker, for how long a minibatch waits on average until the bound lets it begin; ``pulling_ns``: and then for its
    values and its first device. ``staleness``: how many earlier minibatches of others a start's values may lack -> how often
    (``Clocks.missing``). ``pushes``, ``pulls``: of a worker, for each of its waves. ``parameter_bytes``, ``activation_bytes``: from host
    to host, for each minibatch of a worker."""

    samples_per_second: float
    period: Period | None
    minibatches: int
    settled: bool
    idle: Mapping[int, float]
    waiting_ns: tuple[float, ...]
    pulling_ns: tuple[float, ...]
    staleness: Mapping[int, int]
    pushes: float
    pulls: float
    parameter_bytes: float
    activation_bytes: float

    @property
    def mean_staleness(self) -> float:
        """Minibatches of others that a start lacks on average."""
        return sum(number * count for number, count in self.staleness.items()) / max(1, sum(self.staleness.values()))


def simulate(
    topology: Topology,
    plans: Sequence[WorkerPlan],
    placement: Placement,
    batch: int,
    bound: int | None,
    *,
    delays: Delays = NO_DELAYS,
    most_minibatches: int = MOST_MINIBATCHES,
    most_tasks: int = MOST_TASKS,
) -> MixedSteady:
    """The steady state of these workers, with minibatches of ``batch`` samples. ``bound``: D, in waves; None for none. ``delays``: of each
    stage by itself."""
    wave = plans[0].in_flight
    reach = 0 if bound is None else LEADS * (bound + 2) * wave
    minibatches = _whole(min(max(FIRST_MINIBATCHES, reach), most_minibatches), wave)
    before: float | None = None
    while True:
        played = _Played(Training(topology, plans, placement, bound, minibatches, delays), batch)
        rate = played.samples_per_second
        done = played.period is not None or (before is not None and abs(rate / before - 1) < SETTLED)
        if done or minibatches >= most_minibatches or 2 * played.tasks > most_tasks:
            return played.steady(settled=done and minibatches >= reach)
        minibatches, before = _whole(min(2 * minibatches, most_minibatches), wave), rate


def _whole(minibatches: int, wave: int) -> int:
    """Of whole waves, three at least."""
    return wave * max(3, -(-minibatches // wave))


class _Played:
    """What comes after ``end_ns``, when a worker begins its last minibatch and its pipeline runs empty, says nothing of the steady
    state."""

    def __init__(self, training: Training, batch: int) -> None:
        self._training, self._batch = training, batch
        self._trace = training.run()
        schedule = training.loop.schedule()
        self._start_ns, self._end_ns = schedule.start_ns, schedule.end_ns
        self.tasks = len(self._start_ns)
        self._done = [np.sort(self._end_ns[own]) for own in self._trace.done]
        self.end_ns = max(1, min(own[-1].dealt_ns for own in self._trace.starts))
        self._counted = [own[own <= self.end_ns] for own in self._done]
        self.period = period_of(self._counted)
        self._begin_ns = self._window()

    @property
    def samples_per_second(self) -> float:
        """Of all workers, each by the minibatches that it has finished behind the warm-up."""
        if self.period is not None:
            return float(Fraction(self.period.leases * self._batch * len(self._counted) * 10**9, self.period.duration_ns))
        return 1e9 * self._batch * rate_of(self._done, self._begin_ns, self.end_ns)

    def _window(self) -> int:
        """From when on it counts: the latter half, of whole periods if there are any."""
        if self.period is None:
            return self.end_ns // 2
        return self.end_ns - max(1, self.end_ns // 2 // self.period.duration_ns) * self.period.duration_ns

    def steady(self, *, settled: bool) -> MixedSteady:
        """All figures."""
        trace, training = self._trace, self._training
        counted = [[start for start in own if self._begin_ns <= start.dealt_ns <= self.end_ns] for own in trace.starts]
        waiting = tuple(_mean([start.dealt_ns - start.able_ns for start in own]) for own in counted)
        pulling = tuple(_mean([int(self._start_ns[start.computed]) - start.dealt_ns for start in own]) for own in counted)
        minibatches = training.minibatches * len(trace.starts)
        return MixedSteady(
            self.samples_per_second,
            self.period,
            training.minibatches,
            settled,
            self._idle(),
            waiting,
            pulling,
            dict(sorted(trace.missing.items())),
            sum(trace.pushes) * training.wave / minibatches,
            sum(trace.pulls) * training.wave / minibatches,
            trace.parameter_bytes / minibatches,
            trace.activation_bytes / minibatches,
        )

    def _idle(self) -> Mapping[int, float]:
        topology = self._training.topology
        busy = np.zeros(topology.device_count, np.int64)
        for position, task in enumerate(self._training.tasks.tasks):
            for device in task.resources:
                if device < topology.device_count:
                    start, end = int(self._start_ns[position]), int(self._end_ns[position])
                    busy[device] += max(0, min(end, self.end_ns) - max(start, self._begin_ns))
        return {device: max(0.0, 1 - int(own) / (self.end_ns - self._begin_ns)) for device, own in enumerate(busy)}


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0
