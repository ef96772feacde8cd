"""The steady state of virtual workers: more and more waves are played until they repeat, or their rate settles.

Waves are played by the simulator's rules. A pull gets what servers have when the minibatch is dealt, without a bound whenever they have
more than before; each stage waits for its own part alone. Links serve first come, first served, in chunks; servers add and copy on their
host's cores. A way from a device to the server of its own host takes the links between its device and the one of the host that stands for
the server, none if that is the same.

The best virtual workers of a cluster: which devices make a worker, its stages, and how many minibatches are in flight.

All workers have the same number in flight, at most what the least of them has memory for (Maxm), chosen by throughput. Divisions of the
devices are put into an order by what the slowest stages allow; the first few are simulated, and so are HetPipe's policies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from soap.cluster.topology import Topology
from soap.elastic.clocks import Clocks
from soap.elastic.faults import ElasticError
from soap.elastic.simulation.steady import NO_DELAYS, SETTLED, SHORTEST_CHUNK_NS, Delays, Period, Window
from soap.mixed.partitioning import (
    MOST_CONSIDERED,
    Allocation,
    Partitioner,
    Placement,
    WorkerPlan,
    allocations,
    copy_ns,
    count_ns,
    kept_minibatches,
    placed,
    policies,
    require_room,
)
from soap.model.batch import samples_of
from soap.model.graph import OperatorGraph
from soap.simulator.communication.prices import Communication
from soap.simulator.communication.servers import first_cores
from soap.simulator.costs import CostModel
from soap.simulator.reference import Loop
from soap.simulator.task_list import TaskList
from soap.simulator.tasks import TaskKind

DONE, COUNTED, DEAL, BACKWARD, FORWARD, GRADIENTS, ACTIVATIONS, PUSH, COUNT, COPY, VALUES = range(11)
"""Phases, the first part of a task's id: of tasks that are ready at once, those of earlier phases come first."""
NAMES = ("done", "counted", "deal", "backward", "forward", "gradients", "activations", "push", "count", "copy", "values")
KINDS = {FORWARD: TaskKind.FORWARD, BACKWARD: TaskKind.BACKWARD, COUNT: TaskKind.UPDATE, COPY: TaskKind.COPY}
OF_PARAMETERS = frozenset({PUSH, VALUES})
"""Phases whose messages carry parameters; those of others carry activations and their gradients."""


@dataclass(frozen=True)
class Start:
    """A minibatch of a worker. ``able_ns``: when it might have begun but for other workers; ``dealt_ns``: when it did. ``version``: how
    many waves of all workers are in its values. ``computed``: the task of its first forward pass, which may wait for pulled values."""

    minibatch: int
    able_ns: int
    dealt_ns: int
    version: int
    computed: int


@dataclass
class Trace:
    """What happened. By worker: ``starts``; the tasks at whose ends minibatches were ``done``; how many ``pulls`` and ``pushes`` there
    were. ``missing``: as ``Clocks``, of all minibatches. ``parameter_bytes``, ``activation_bytes``: of messages from host to host."""

    starts: list[list[Start]]
    done: list[list[int]]
    pulls: list[int]
    pushes: list[int]
    missing: Counter[int] = field(default_factory=Counter)
    parameter_bytes: int = 0
    activation_bytes: int = 0


@dataclass
class _Worker:
    plan: WorkerPlan
    dealt: int = 0
    version: int = 0
    finished_ns: list[int] = field(default_factory=list)
    forward: list[list[int]] = field(default_factory=list)
    backward: list[list[int]] = field(default_factory=list)


class Training:
    """``minibatches``: of each worker, who all have as many in flight. A last wave that is incomplete is pushed, too."""

    def __init__(
        self, topology: Topology, plans: Sequence[WorkerPlan], placement: Placement, bound: int | None, minibatches: int, delays: Delays
    ) -> None:
        flights = {plan.in_flight for plan in plans}
        if len(flights) != 1 or minibatches < 1:
            raise ElasticError(
                f"workers with {', '.join(map(str, sorted(flights)))} minibatches in flight, {minibatches} in all; expected one number "
                "in flight for all workers, and 1 minibatch at least"
            )
        self.topology, self.placement = topology, placement
        self.wave, self.minibatches = flights.pop(), minibatches
        self.tasks = TaskList(Communication(topology))
        self.loop = Loop(topology)
        self._workers = [_Worker(plan) for plan in plans]
        self._clocks = Clocks(range(len(plans)), bound, self.wave)
        lanes = [len(plan.stages) for plan in plans]
        drawn = iter(delays.factors(sum(lanes), minibatches))
        self._factors = [[next(drawn) for _ in range(count)] for count in lanes]
        self._kept = [kept_minibatches(count, self.wave) for count in lanes]
        self._cores, self._turn = first_cores(topology), [0] * len(topology.hosts)
        self._played = 0
        none: list[list[int]] = [[] for _ in plans]
        self.trace = Trace([[] for _ in plans], none, [0] * len(plans), [0] * len(plans))

    def run(self) -> Trace:
        """Play all minibatches."""
        self._deal_all()
        self.loop.run()
        self.trace.missing = self._clocks.missing
        return self.trace

    def _deal_all(self) -> None:
        """Whoever may begin does."""
        for number, worker in enumerate(self._workers):
            while worker.dealt < self.minibatches and self._clocks.may_start(number):
                self._deal(number, worker)
        self.loop.add(self.tasks.tasks[self._played :])
        self._played = len(self.tasks.tasks)

    def _deal(self, number: int, worker: _Worker) -> None:
        minibatch, stages = worker.dealt, worker.plan.stages
        pulled: list[list[int]] = [[] for _ in stages]
        if worker.version < (self._clocks.slowest if self._clocks.bound is None else self._clocks.needed(number)):  # as ``run.training``
            worker.version = self._clocks.slowest
            pulled = [self._pull(number, stage, minibatch) for stage in range(len(stages))]
            self.trace.pulls[number] += 1
        self._clocks.started(number, worker.version)
        able_ns = worker.finished_ns[minibatch - self.wave] if minibatch >= self.wave else 0
        worker.dealt += 1
        self._forward(number, worker, minibatch, pulled)
        computed = worker.forward[-1][0]
        self.trace.starts[number].append(Start(minibatch, able_ns, self.loop.now_ns, worker.version, computed))
        self._backward(number, worker, minibatch)
        done = self._add(DONE, number, minibatch, 0, (), 0, [worker.backward[-1][0]])
        self.trace.done[number].append(done)
        self.loop.watch(done, lambda: self._done(number))
        if worker.dealt % self.wave == 0 or worker.dealt == self.minibatches:
            self._push(number, worker, minibatch)

    def _forward(self, number: int, worker: _Worker, minibatch: int, pulled: Sequence[Sequence[int]]) -> None:
        """Each stage behind the one before, with its values, and when it has finished enough others."""
        ends: list[int] = []
        arrived: list[int] = []
        for stage, own in enumerate(worker.plan.stages):
            kept = minibatch - self._kept[number][stage]
            after = [*arrived, *pulled[stage], *([worker.backward[kept][stage]] if kept >= 0 else [])]
            lasts_ns = self._lasts(number, stage, minibatch, own.forward_ns)
            ends.append(self._add(FORWARD, number, minibatch, stage, (own.device,), lasts_ns, after))
            if stage + 1 < len(worker.plan.stages):
                target = worker.plan.stages[stage + 1].device
                arrived = [self._message(ACTIVATIONS, number, minibatch, stage, own.device, target, own.sent_bytes[0], [ends[-1]])]
        worker.forward.append(ends)

    def _backward(self, number: int, worker: _Worker, minibatch: int) -> None:
        stages = worker.plan.stages
        ends = [0] * len(stages)
        arrived: list[int] = []
        for stage in reversed(range(len(stages))):
            own = stages[stage]
            after = [*arrived, worker.forward[minibatch][stage]]
            lasts_ns = self._lasts(number, stage, minibatch, own.backward_ns)
            ends[stage] = self._add(BACKWARD, number, minibatch, stage, (own.device,), lasts_ns, after)
            if stage:
                target, size = stages[stage - 1].device, stages[stage - 1].sent_bytes[1]
                arrived = [self._message(GRADIENTS, number, minibatch, stage, own.device, target, size, [ends[stage]])]
        worker.backward.append(ends)

    def _pull(self, number: int, stage: int, minibatch: int) -> list[int]:
        """One message from each server that has part of a stage's parameters."""
        device, found = self._workers[number].plan.stages[stage].device, []
        for host, size in self.placement.shares[number][stage].items():
            server, place = self._server(host, number), stage * len(self.topology.hosts) + host
            copied = self._add(COPY, number, minibatch, place, (self._core(server),), copy_ns(self.topology, server, size), ())
            found.append(self._message(VALUES, number, minibatch, place, server, device, size, [copied]))
        return found

    def _push(self, number: int, worker: _Worker, minibatch: int) -> None:
        """Each stage sends its sum of a wave when its last backward pass has ended. When servers have all, others may go on."""
        counted = []
        for stage, shares in enumerate(self.placement.shares[number]):
            device, last = worker.plan.stages[stage].device, worker.backward[minibatch][stage]
            for host, size in shares.items():
                server, place = self._server(host, number), stage * len(self.topology.hosts) + host
                sent = self._message(PUSH, number, minibatch, place, device, server, size, [last])
                lasts_ns = count_ns(self.topology, server, size)
                counted.append(self._add(COUNT, number, minibatch, place, (self._core(server),), lasts_ns, [sent]))
        own = self._add(COUNTED, number, minibatch, 0, (), 0, [*counted, worker.backward[minibatch][0]])
        self.loop.watch(own, lambda: self._counted(number, whole=(minibatch + 1) % self.wave == 0))

    def _done(self, number: int) -> None:
        self._clocks.finished(number, pushed=False)
        self._workers[number].finished_ns.append(self.loop.now_ns)
        self._deal_all()

    def _counted(self, number: int, *, whole: bool) -> None:
        self.trace.pushes[number] += 1
        if whole:
            self._clocks.pushed(number)
        if self.trace.pushes[number] * self.wave >= self.minibatches:
            self._clocks.left(number)
        self._deal_all()

    def _lasts(self, number: int, stage: int, minibatch: int, duration_ns: int) -> int:
        return max(1, round(self._factors[number][stage][minibatch] * duration_ns))

    def _server(self, host: int, number: int) -> int:
        """The device that stands for a host's server: workers take them in turn, as memory has ways to all of them."""
        own = [device.index for device in self.topology.devices if device.host == host]
        return own[number % len(own)]

    def _core(self, server: int) -> int:
        """What a server's work holds: one of the host's cores, which take it in turn. On a host whose devices are its cores, too: it is in
        threads of its own, which do not wait until a pass has ended."""
        device = self.topology.devices[server]
        self._turn[device.host] += 1
        return self._cores[device.host] + self._turn[device.host] % self.topology.hosts[device.host].cpu_cores

    def _add(
        self, phase: int, number: int, minibatch: int, place: int, resources: tuple[int, ...], duration_ns: int, after: Iterable[int]
    ) -> int:
        own = (phase, minibatch, 0, number, place, 0)
        return self.tasks.add(own, NAMES[phase], KINDS.get(phase, TaskKind.FORWARD), resources, duration_ns, after)

    def _message(
        self, phase: int, number: int, minibatch: int, place: int, source: int, target: int, size: int, after: Iterable[int]
    ) -> int:
        own = (phase, minibatch, 0, number, place, 0)
        if self.topology.devices[source].host != self.topology.devices[target].host:
            self.trace.parameter_bytes += size if phase in OF_PARAMETERS else 0
            self.trace.activation_bytes += 0 if phase in OF_PARAMETERS else size
        sent = self.tasks.streamed(own, NAMES[phase], TaskKind.TRANSFER, source, target, size, after, SHORTEST_CHUNK_NS)
        return sent[0] if len(sent) == 1 else self.tasks.add((*own[:5], 1), NAMES[phase], TaskKind.TRANSFER, (), 0, sent)


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
    """The steady state of these workers. ``batch``: samples of a minibatch. ``bound``: D, in waves, or None. ``delays``: of each stage."""
    wave = plans[0].in_flight
    reach = 0 if bound is None else LEADS * (bound + 2) * wave
    minibatches = _whole(min(max(FIRST_MINIBATCHES, reach), most_minibatches), wave)
    before: float | None = None
    while True:
        played = _Played(Training(topology, plans, placement, bound, minibatches, delays), batch)
        rate = played.window.samples_per_second
        done = played.window.period is not None or (before is not None and abs(rate / before - 1) < SETTLED)
        if done or minibatches >= most_minibatches or 2 * played.tasks > most_tasks:
            return played.steady(settled=done and minibatches >= reach)
        minibatches, before = _whole(min(2 * minibatches, most_minibatches), wave), rate


def _whole(minibatches: int, wave: int) -> int:
    """Of whole waves, three at least."""
    return wave * max(3, -(-minibatches // wave))


class _Played:
    """What comes after a worker begins its last minibatch, when its pipeline runs empty, says nothing of the steady state."""

    def __init__(self, training: Training, batch: int) -> None:
        self._training = training
        self._trace = training.run()
        schedule = training.loop.schedule()
        self._start_ns, self._end_ns = schedule.start_ns, schedule.end_ns
        self.tasks = len(self._start_ns)
        done = [np.sort(self._end_ns[own]) for own in self._trace.done]
        self.window = Window(done, max(1, min(own[-1].dealt_ns for own in self._trace.starts)), batch)

    def steady(self, *, settled: bool) -> MixedSteady:
        """All figures."""
        trace, training, window = self._trace, self._training, self.window
        counted = [[start for start in own if window.begin_ns <= start.dealt_ns <= window.end_ns] for own in trace.starts]
        waiting = tuple(_mean([start.dealt_ns - start.able_ns for start in own]) for own in counted)
        pulling = tuple(_mean([int(self._start_ns[start.computed]) - start.dealt_ns for start in own]) for own in counted)
        minibatches = training.minibatches * len(trace.starts)
        return MixedSteady(
            window.samples_per_second,
            window.period,
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
        topology, window = self._training.topology, self.window
        busy = np.zeros(topology.device_count, np.int64)
        for position, task in enumerate(self._training.tasks.tasks):
            for device in task.resources:
                if device < topology.device_count:
                    start, end = int(self._start_ns[position]), int(self._end_ns[position])
                    busy[device] += max(0, min(end, window.end_ns) - max(start, window.begin_ns))
        return {device: max(0.0, 1 - int(own) / (window.end_ns - window.begin_ns)) for device, own in enumerate(busy)}


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0


MOST_SIMULATED = 8
"""Divisions beside the policies."""
PATIENCE = 2
"""When so many more minibatches in flight, one by one, have not helped, no more are tried."""


@dataclass(frozen=True)
class Found:
    """``plans``: by worker. ``most_in_flight``: by worker, with how many minibatches in flight it fits (Maxm)."""

    allocation: Allocation
    plans: tuple[WorkerPlan, ...]
    most_in_flight: tuple[int, ...]
    steady: MixedSteady

    @property
    def in_flight(self) -> int:
        """Of each worker."""
        return self.plans[0].in_flight


def fitting(tries: Iterable[tuple[Finder, Allocation]]) -> list[Found]:
    """The allocations that fit, each with its best number of minibatches in flight. The first one's ElasticError if none does."""
    found, problems = list[Found](), list[ElasticError]()
    for finder, allocation in tries:
        try:
            found.append(finder.best_in_flight(allocation))
        except ElasticError as problem:
            problems.append(problem)
    if problems and not found:
        raise problems[0]
    return found


class Finder:
    """Looks for the best workers for one model on one cluster. ``graph``: of one minibatch. ``bound``: D, in waves; None for none."""

    def __init__(self, graph: OperatorGraph, topology: Topology, costs: CostModel, bound: int | None, delays: Delays = NO_DELAYS) -> None:
        if bound is not None and bound < 0:
            raise ElasticError(f"a bound of {bound} waves; expected 0 or more, or none")
        self._partitioner, self._topology = Partitioner(graph, topology, costs, bound), topology
        self._batch, self._bound, self._delays = samples_of(graph) or 1, bound, delays

    def best_in_flight(self, allocation: Allocation) -> Found:
        """The best number of minibatches in flight for these workers, the least of equal ones. More are tried as long as that helps.
        ElasticError if one of the workers fits nowhere, or a host lacks memory for servers."""
        for devices in allocation.workers:
            self._partitioner.require_fits(devices)
        most = self._most(allocation)
        best, worse = self._with(allocation, 1, most), 0
        for in_flight in range(2, min(most) + 1):
            found = self._with(allocation, in_flight, most)
            better = found.steady.samples_per_second > (1 + SETTLED) * best.steady.samples_per_second
            best, worse = (found, 0) if better else (best, worse + 1)
            if worse == PATIENCE:
                break
        return best

    def with_in_flight(self, allocation: Allocation, in_flight: int) -> Found:
        """These workers with so many minibatches in flight. ElasticError if that does not fit."""
        most = self._most(allocation)
        if not 1 <= in_flight <= min(most):
            raise ElasticError(f"{in_flight} minibatches in flight of allocation {allocation.name!r}; expected 1 to {min(most)}: memory")
        return self._with(allocation, in_flight, most)

    def _most(self, allocation: Allocation) -> tuple[int, ...]:
        return tuple(self._partitioner.most_in_flight(own, MOST_CONSIDERED) for own in allocation.workers)

    def _with(self, allocation: Allocation, in_flight: int, most: tuple[int, ...]) -> Found:
        plans = self._plans(allocation, in_flight)
        return Found(allocation, plans, most, self._simulated(allocation, plans))

    def best(self, more: Iterable[Allocation] = ()) -> Found:
        """The best of all: the policies that suit the cluster, the most promising divisions, and ``more``. ElasticError if nothing fits."""
        candidates = [*policies(self._topology), *more, *self.promising()]
        return max(fitting((self, own) for own in candidates), key=lambda own: own.steady.samples_per_second)

    def promising(self, most: int = MOST_SIMULATED) -> list[Allocation]:
        """Divisions into equal workers that fit, by ``allowed_rate``, the best first."""
        rated = [(-self.allowed_rate(own), number, own) for number, own in enumerate(allocations(self._topology))]
        return [own for rate, _, own in islice(sorted(rated, key=lambda one: one[:2]), most) if rate < 0]

    def allowed_rate(self, allocation: Allocation) -> float:
        """Minibatches per second of all workers if nothing but the slowest stage or message held them up; 0 if one does not fit."""
        slowest_ns = 0
        for devices in allocation.workers:
            own = [plan for plan in (self._partitioner.plan(devices, count) for count in (len(devices), 1)) if plan is not None]
            if not own:
                return 0.0
            slowest_ns = max(slowest_ns, own[0].slowest_ns)
        return 1e9 * len(allocation.workers) / slowest_ns

    def _plans(self, allocation: Allocation, in_flight: int) -> tuple[WorkerPlan, ...]:
        plans = [self._partitioner.plan(own, in_flight) for own in allocation.workers]
        assert all(plan is not None for plan in plans), "most_in_flight has said that they fit"
        return tuple(plan for plan in plans if plan is not None)

    def _simulated(self, allocation: Allocation, plans: Sequence[WorkerPlan]) -> MixedSteady:
        placement = placed(self._topology, allocation, plans)
        require_room(self._topology, plans, placement, self._bound)
        return simulate(self._topology, plans, placement, self._batch, self._bound, delays=self._delays)
