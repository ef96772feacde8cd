"""One simulation from start to end: strategy → plan → timed tasks → schedule, with memory. What the search and the commands call."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.model.other_batch import with_samples
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.plan.plan import Plan
from soap.plan.syncs.clipping import refusal
from soap.simulator.analysis.rich_display import simulation_html
from soap.simulator.analysis.timeline import busy_time_ns, bytes_moved, critical_path_ns, link_bytes
from soap.simulator.communication.prices import Communication
from soap.simulator.communication.synchronizing import of_every_iteration
from soap.simulator.costs import CostModel
from soap.simulator.draws import links_between_hosts
from soap.simulator.folded import FoldedSimulation
from soap.simulator.folding import CopiesBuilders, Folding, fold
from soap.simulator.lowering import PlanBuilder, lower
from soap.simulator.memory.curves import MemoryCurve
from soap.simulator.memory.hosts import host_use, lacking_on_hosts
from soap.simulator.memory.plan_arrays import plan_arrays
from soap.simulator.memory.sizes import overflow_bytes
from soap.simulator.memory.sweep import expected_peaks, memory_over_time, peaks_by_kind, swept
from soap.simulator.reference import simulate
from soap.simulator.tasks import Schedule, TaskGraph, TaskKind
from soap.simulator.throughput import Throughput, throughput
from soap.strategy.config import Strategy
from soap.strategy.named import DATA_PARALLEL, named

if TYPE_CHECKING:
    from soap.simulator.engine import Engine
    from soap.simulator.shared import Shared

Value = TypeVar("Value")

CACHED_STRATEGIES = 4096
"""How many answers of ``Simulator.cost`` are kept; each is two numbers and a key."""

KEPT_FOLDED = 8
"""How many foldings and folded outcomes a ``Simulator`` keeps."""

REFUSED_BYTES = 2**60
"""Lacking, as searches are told, for a plan by which the training cannot clip: more than any cluster lacks, so it is never taken."""

MOST_PLANNED_TILES = 2**16
"""Of two copies with more tiles no list of tasks is made."""

MANY_TILES = 2**14
"""A strategy with this many tiles or more is folded if possible: simulating all of it would take seconds."""

MOST_KEPT_TASKS = 2**18
"""Folded outcomes of more tasks are not kept: each takes gigabytes."""


@dataclass(frozen=True)
class Simulation:
    """The outcome of one training iteration. Cached properties are computed when they are first asked for."""

    plan: Plan
    tasks: TaskGraph
    schedule: Schedule
    optimizer_states: int

    def _repr_html_(self) -> str:
        """HTML for notebooks."""
        return simulation_html(self)

    @property
    def topology(self) -> Topology:
        """The cluster."""
        return self.tasks.topology

    @property
    def makespan_ns(self) -> int:
        """Time of one iteration."""
        return self.schedule.makespan_ns

    def step_ns(self, micro_batches: int = 1) -> int:
        """Nanoseconds of a step of ``micro_batches`` iterations, only the last of which synchronizes gradients and updates parameters."""
        if micro_batches == 1:
            return self.makespan_ns
        skipped, always = (TaskKind.SYNC, TaskKind.COMPRESS, TaskKind.UPDATE), of_every_iteration(self.plan)
        kept = tuple(
            replace(task, duration_ns=0) if task.kind in skipped and task.name not in always else task for task in self.tasks.tasks
        )
        return (micro_batches - 1) * simulate(replace(self.tasks, tasks=kept)).makespan_ns + self.makespan_ns

    @cached_property
    def memory_over_time(self) -> tuple[MemoryCurve, ...]:
        """How much memory each device holds over time."""
        return memory_over_time(self.tasks, self.schedule, self.optimizer_states)

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """The peak memory to expect on each device, with an allowance (``sweep.ALLOWANCE``)."""
        return expected_peaks(curve.peak_bytes for curve in self.memory_over_time)

    @cached_property
    def peak_by_kind(self) -> tuple[dict[str, int], ...]:
        """Bytes by kind that each device's expected peak is made of: values, gradients, states, … (``sweep.peaks_by_kind``)."""
        return peaks_by_kind(self.memory_over_time, self.peak_bytes)

    @cached_property
    def overflow_bytes(self) -> int:
        """Bytes of memory that devices and hosts lack, added up; 0 if everything fits."""
        return overflow_bytes(self.peak_bytes, self.topology) + lacking_on_hosts(self.host_memory, self.topology)

    @cached_property
    def host_memory(self) -> tuple[int, ...]:
        """Bytes that each host holds at most for accelerators' parameter servers (``hosts.host_use``)."""
        return host_use(self.plan, self.topology, self.optimizer_states)

    @property
    def fits(self) -> bool:
        """Whether every device has enough memory."""
        return self.overflow_bytes == 0

    @cached_property
    def throughput(self) -> Throughput:
        """Samples and tokens per second, utilisation and cost."""
        return throughput(self.plan.graph, self.topology, self.makespan_ns)

    @cached_property
    def bytes_moved(self) -> int:
        """Bytes that devices send each other."""
        return bytes_moved(self.tasks)

    @property
    def messages(self) -> int:
        """Communications in an iteration."""
        return sum(task.bytes > 0 for task in self.tasks.tasks)

    @property
    def between_hosts(self) -> NDArray[np.bool_]:
        """``draws.links_between_hosts``, for ``DrawnTasks``."""
        return links_between_hosts(self.topology)

    @property
    def critical_path_ns(self) -> dict[TaskKind, int]:
        """Nanoseconds of the critical path by kind of task."""
        return critical_path_ns(self.tasks, self.schedule)

    @cached_property
    def busy_ns(self) -> dict[str, int]:
        """Nanoseconds for which each device, link and used CPU core is held, by name."""
        return busy_time_ns(self.tasks)

    @cached_property
    def link_bytes(self) -> dict[str, int]:
        """Bytes that cross each link, by name."""
        return link_bytes(self.tasks)


class Recent(Generic[Value]):
    """The values of at most ``most`` keys: those that were asked for last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def recall(self, key: Hashable) -> Value | None:
        """The value of a key; None if it is not kept."""
        found = self._values.get(key)
        if found is not None:
            self._values.move_to_end(key)
        return found

    def keep(self, key: Hashable, value: Value) -> None:
        """Keep the value of a new key, and forget that of the key which was not asked for longest."""
        self._values[key] = value
        if len(self._values) > self._most:
            self._values.popitem(last=False)


class Simulator:
    """Simulates strategies of one graph on one cluster, keeping what consecutive strategies have in common.

    ``costs``: durations. ``optimizer_states``: tensors of a parameter's size that the optimizer keeps for it (Adam 2). ``training``: what
    training adds to a plan.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        topology: Topology,
        costs: CostModel,
        optimizer_states: int = 2,
        training: PlannedTraining = PLAIN,
    ) -> None:
        self.graph = graph
        self.topology = topology
        self.costs = costs
        self.communication = Communication(topology)
        self.optimizer_states, self.training = optimizer_states, training
        self._parameters = {parameter.name: None for parameter in graph.parameters}
        self._builder = PlanBuilder(graph, topology, training)
        self._answers: Recent[tuple[int, int]] = Recent(CACHED_STRATEGIES)
        self._folded: Recent[FoldedSimulation] = Recent(KEPT_FOLDED)
        self._foldings: Recent[Folding | str] = Recent(KEPT_FOLDED)
        self._copies_builders = CopiesBuilders(graph, topology, training)
        self._of_samples: Recent[Simulator | str] = Recent(KEPT_FOLDED)

    @cached_property
    def shared(self) -> Shared:
        """Everything that its engines share."""
        from soap.simulator.shared import Shared  # compiled code

        return Shared(self.graph, self.topology, self.costs, self.training, self.communication)

    def know_groups(self, strategy: Strategy) -> None:
        """Tell engines that are made from now on which devices a strategy has sum: they begin anew for each set that they ask for."""
        sums = self._builder.sums(replace(strategy, microbatches=1))  # who sums together does not depend on micro-batches
        self.communication.groups = tuple(dict.fromkeys([*(cell[1] for _, cell in sums.regions), *sums.groups]))

    @cached_property
    def data_parallel(self) -> Strategy:
        """Data parallelism over all devices, with which plans are compared."""
        return named(DATA_PARALLEL, self.graph, self.topology)

    def of_samples(self, samples: int) -> Simulator | str:
        """The simulator of the same model with so many samples, or why there is none, in one line. Keeps the last ones."""
        found = self._of_samples.recall(samples)
        if found is None:
            graph = with_samples(self.graph, samples)
            own = self.topology, self.costs, self.optimizer_states, self.training
            found = graph if isinstance(graph, str) else Simulator(graph, *own)
            self._of_samples.keep(samples, found)
        return found

    @property
    def costs_hash(self) -> str:
        """``costs_hash`` of its cost model and its links."""
        return costs_hash(self.costs, self.communication)

    def run(self, strategy: Strategy) -> Simulation:
        """The full outcome. StrategyError if the strategy does not fit the graph or the cluster."""
        return self._played(self._builder.build(strategy))

    def _played(self, plan: Plan) -> Simulation:
        tasks = lower(plan, self.topology, self.costs, self.communication)
        return Simulation(plan, tasks, simulate(tasks), self.optimizer_states)

    def predict(self, strategy: Strategy) -> Simulation | FoldedSimulation:
        """The full outcome, folded if the strategy has at least ``MANY_TILES`` tiles and can be folded, or nearly so: then times and memory
        may be above those of all devices, by little."""
        folded = self.run_folded(strategy, nearly=True) if is_large(strategy) else ""
        return self.run(strategy) if isinstance(folded, str) else folded

    def outcome(self, strategy: Strategy) -> Simulation | FoldedSimulation | None:
        """``predict``; None if the strategy is large and cannot be folded: to play all of it takes minutes."""
        folded = self.run_folded(strategy, nearly=True) if is_large(strategy) else self.run(strategy)
        return None if isinstance(folded, str) else folded

    def run_folded(self, strategy: Strategy, *, nearly: bool = False) -> FoldedSimulation | str:
        """The full outcome from two of many equal copies, or the reason why it cannot be folded, in one line. Keeps the last answers.
        ``nearly``: see ``folding``."""
        folding, key = self.folding(strategy, nearly=nearly), self.key(strategy)
        if isinstance(folding, str):
            return folding
        found = self._folded.recall(key)
        if found is None:
            tasks = lower(folding.plan, folding.topology, self.costs, folding.communication)
            found = FoldedSimulation(folding, tasks, simulate(tasks), self.optimizer_states)
            if len(tasks.tasks) <= MOST_KEPT_TASKS:
                self._folded.keep(key, found)
        return found

    def folding(self, strategy: Strategy, *, nearly: bool = False) -> Folding | str:
        """A strategy as two of many equal copies, or the reason why it cannot be folded, in one line. Keeps the last answers.
        ``nearly``: copy 1 may own some rows more than others; then times and memory may be above those of all devices, by little."""
        key = self.key(strategy)
        found = self._foldings.recall(key)
        if found is None:
            strategy.validate(self.graph, self.topology.device_count)
            found = fold(self.graph, self.topology, strategy, self.training, builders=self._copies_builders)
            self._foldings.keep(key, found)
        return found if nearly or isinstance(found, str) or found.exact else "readers own unequal parts of parameters"

    def cost(self, strategy: Strategy) -> tuple[int, int]:
        """(makespan in ns, bytes of memory that are lacking): what a search compares. Recent strategies are not simulated again. Of a plan
        by which the training cannot clip, ``REFUSED_BYTES`` are lacking."""
        key = self.key(strategy)
        answer = self._answers.recall(key)
        if answer is None:
            answer = self._simulate(strategy)
            self._answers.keep(key, answer)
        return answer

    def makespan_ns(self, strategy: Strategy) -> int:
        """The first half of ``cost``."""
        return self.cost(strategy)[0]

    def overflow_bytes(self, strategy: Strategy) -> int:
        """The second half of ``cost``."""
        return self.cost(strategy)[1]

    def peak_share(self, strategy: Strategy) -> float:
        """The expected peak by the limit, of the device that is filled most; infinite if hosts lack memory, or the training cannot clip."""
        outcome = self.predict(strategy)
        refused = isinstance(outcome, Simulation) and _is_refused(outcome.plan)
        if refused or lacking_on_hosts(outcome.host_memory, self.topology):
            return inf
        return self.share(outcome.peak_bytes)

    def overflow_of_played(self, strategy: Strategy, engine: Engine, folding: Folding | None = None) -> int:
        """The second half of ``cost``, of a strategy that an engine holds or proposes; with ``folding`` as two of its copies."""
        peaks, lacking = self.played_in(strategy, engine, folding)
        return overflow_bytes(peaks, self.topology) + lacking

    def share_of_played(self, strategy: Strategy, engine: Engine, folding: Folding | None = None) -> float:
        """``peak_share`` of a strategy that an engine holds or proposes; with ``folding`` as two copies."""
        peaks, lacking = self.played_in(strategy, engine, folding)
        return inf if lacking else self.share(peaks)

    def played_in(self, strategy: Strategy, engine: Engine, folding: Folding | None) -> tuple[Sequence[int], int]:
        """(the peak to expect on each device, bytes that hosts lack), as an engine has played it; of a plan by which the training cannot
        clip (zeros, ``REFUSED_BYTES``)."""
        if folding is not None:
            plan = folding.with_an_idle_device(folding.plan)
            return folding.for_all(self._expected(plan, engine, folding.topology)), 0
        plan = self._builder.build(strategy)
        if _is_refused(plan):
            return (0,) * self.topology.device_count, REFUSED_BYTES
        on_hosts = lacking_on_hosts(host_use(plan, self.topology, self.optimizer_states), self.topology)
        return self._expected(plan, engine, self.topology), on_hosts

    def share(self, peaks: Sequence[int]) -> float:
        """The largest share of its memory that a device fills."""
        return max(peak / limit for peak, limit in zip(peaks, self.topology.memory_limits, strict=True))

    def _expected(self, plan: Plan, engine: Engine, topology: Topology) -> Sequence[int]:
        """The peak to expect on each device of a plan, as an engine has played it on this topology."""
        from soap.simulator.memory.engine_played import engine_played  # compiled code

        arrays = plan_arrays(plan)
        ledger = swept(plan, arrays, engine_played(engine, plan, arrays), topology, self.optimizer_states)
        return expected_peaks(ledger.peaks().tolist())

    def is_refused(self, strategy: Strategy) -> bool:
        """Whether the training clips, and cannot by this strategy."""
        compressed = any(sync.compression is not None for sync in strategy.parameters.values())
        return self.training.clips and compressed and _is_refused(self._builder.build(strategy))

    def _simulate(self, strategy: Strategy) -> tuple[int, int]:
        outcome = self.predict(strategy)
        refused = isinstance(outcome, Simulation) and _is_refused(outcome.plan)
        return outcome.makespan_ns, REFUSED_BYTES if refused else outcome.overflow_bytes

    def key(self, strategy: Strategy) -> Hashable:
        """Equal for strategies that mean the same but are written differently (order of mappings, defaults left out).

        An illegal strategy never has the key of a legal one, so it never gets a kept answer: building it raises the error.
        """
        configs = tuple(strategy.operators.get(op.name) for op in self.graph.operators)
        syncs = tuple(strategy.sync(name) for name in self._parameters)
        unknown = tuple(sorted(strategy.parameters.keys() - self._parameters.keys()))
        values = (getattr(strategy, name) for name in REST)
        rest = (tuple(sorted(own.items())) if isinstance(own, Mapping) else own for own in values)
        return configs, len(strategy.operators), syncs, unknown, *rest


REST = tuple(field.name for field in fields(Strategy) if field.name not in ("operators", "parameters"))
"""Fields of a strategy that are in ``Simulator.key`` as they are. Operators and parameters are, too, in the graph's order."""


def _is_refused(plan: Plan) -> bool:
    return plan.training.clips and refusal(plan) != ""


def costs_hash(costs: CostModel, communication: Communication) -> str:
    """16 hex digits over the cost model and the links. They change whenever the duration of a task could change."""
    return hashlib.sha256((costs.hash + communication.hash).encode()).hexdigest()[:16]


def tile_count(strategy: Strategy) -> int:
    """Tiles of all operators, of all replicas and micro-batches; some more if there are operators that are not cut."""
    return strategy.microbatches * sum(len(config.devices) for config in strategy.operators.values())


def is_large(strategy: Strategy) -> bool:
    """Whether the strategy has so many tiles that it is worth folding."""
    return tile_count(strategy) >= MANY_TILES
