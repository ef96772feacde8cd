"""Plans of servers and workers: the search for them, and how they train in their steady state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from soap.api.models import Cluster, Model, topology_of
from soap.api.predictions import asked, simulator_for
from soap.api.strategies import save_strategy
from soap.cluster.memory_budget import with_memory_budget
from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.mixed.partitioning import POLICIES, Allocation, policies
from soap.model.batch import samples_of
from soap.model.graph import OperatorGraph
from soap.search.options import OPTIMIZER_STATES
from soap.simulator.costs import CostSource
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy
from soap.strategy.consistency import ASYNC, Consistency, parse
from soap.strategy.grids import device_order

if TYPE_CHECKING:
    from soap.elastic.layout import ElasticPlan
    from soap.elastic.simulation.design import Design
    from soap.elastic.simulation.steady import Steady
    from soap.mixed.partitioning import WorkerPlan
    from soap.mixed.steady import Finder, MixedSteady
    from soap.tracing.execute import TracedModel


MOST_SIMULATED = 200
"""Plans that a search simulates, by default."""


@dataclass(frozen=True)
class ServersOutcome:
    """``strategy``: the plan with the most samples per second, and ``report`` how it trains. ``designs``: by name, how Twitter's two
    designs and the naive one train on the same machines. ``simulated``: plans that were; ``possible``: plans that there are, at most.
    ``complete``: whether nothing ended the search before it was done: budget, time, or Ctrl-C. ``proven``: whether no other plan can be
    quicker; else it is one that no single change makes quicker, or what was found until the end."""

    simulator: Simulator
    strategy: Strategy
    plan: ElasticPlan
    report: Steady
    designs: Mapping[str, Steady]
    simulated: int
    possible: int
    complete: bool
    proven: bool

    @property
    def record(self) -> dict[str, Any]:
        """What a strategy file records of the search, as plain values."""
        counts = {"evaluations": self.simulated, "possible": self.possible, "complete": self.complete, "proven": self.proven}
        rates = {name: own.samples_per_second for name, own in self.designs.items()}
        return {"samples_per_second": self.report.samples_per_second, "designs": rates, "search": counts}

    def save(self, path: str) -> None:
        """Write the strategy with its record. SoapError if that fails."""
        save_strategy(path, self.strategy, self.simulator.graph, self.simulator.topology, self.record)


def find_servers(
    model: Model,
    cluster: Cluster,
    consistency: str = ASYNC,
    *,
    budget: int = MOST_SIMULATED,
    seconds: float | None = None,
    optimizer_states: int = OPTIMIZER_STATES,
    costs: CostSource = "auto",
    memory_budget: str | None = None,
    progress: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> ServersOutcome:
    """Search how many of a cluster's machines are servers and how many workers, in how many partitions, and along which axis each table,
    for the most samples per second. ``consistency``: ``sync``, ``bounded:D`` or ``async``. Workers share the model's batch.

    ``budget``: plans to simulate at most; ``seconds``: time for it. ``progress``: show a bar on stderr if that is a terminal. ``stopped``:
    asked now and then; once it returns True, the best so far is the outcome. SoapError in one line if model or cluster cannot be used: a
    model without tables, one machine alone, tables for which no servers have room."""
    from soap.elastic.planned import strategy_of
    from soap.elastic.searching import Search

    bounds = parse(consistency)
    topology = with_memory_budget(topology_of(cluster), memory_budget)
    simulator = simulator_for(model, topology, optimizer_states=optimizer_states, costs=costs)
    graph, deadline = simulator.graph, inf if seconds is None else time.monotonic() + seconds
    best, count = 0.0, 0
    with tqdm(unit="plan", disable=None if progress else True, leave=False) as bar:

        def seen(rate: float) -> None:
            nonlocal best, count
            best, count = max(best, rate), count + 1
            bar.set_postfix_str(f"{best:,.0f} samples/s", refresh=False)
            bar.update()

        def ended() -> bool:
            return count >= budget or time.monotonic() > deadline or stopped()

        machines = graph, simulator.topology, simulator.costs
        found = Search(*machines, None, bounds, optimizer_states=optimizer_states, stopped=ended, simulated=seen).find()
    strategy = strategy_of(found.plan, graph)
    try:
        designs = {} if stopped() else _designs(simulator, bounds)
    except KeyboardInterrupt:  # what was found stays
        designs = {}
    counts = found.simulated, found.possible, not found.interrupted, found.proven
    return ServersOutcome(simulator, strategy, found.plan, found.report, designs, *counts)


def simulate_servers(
    model: Model,
    cluster: Cluster,
    strategy: Strategy | str,
    *,
    optimizer_states: int = OPTIMIZER_STATES,
    costs: CostSource = "auto",
    memory_budget: str | None = None,
) -> Steady:
    """How a strategy of servers and workers trains in its steady state. ``strategy``: may be a name, such as ``bipartite:2+async``.
    SoapError in one line if it is not of that form (``soap.elastic.planned``)."""
    simulator, strategy = asked(model, cluster, strategy, optimizer_states=optimizer_states, costs=costs, memory_budget=memory_budget)
    return steady(simulator, strategy)


def steady(simulator: Simulator, strategy: Strategy) -> Steady:
    """The same of a simulator that is there."""
    from soap.elastic.planned import plan_of
    from soap.elastic.simulation.design import design_of

    return _steady(simulator, design_of(plan_of(strategy, simulator.graph), simulator.graph))


def _designs(simulator: Simulator, consistency: Consistency) -> dict[str, Steady]:
    from soap.elastic.simulation.design import three_designs

    machines = device_order(simulator.topology)
    return {name: _steady(simulator, own) for name, own in three_designs(simulator.graph, machines, consistency).items()}


def _steady(simulator: Simulator, design: Design) -> Steady:
    from soap.elastic.simulation.design import Traffic, needs_of_graph
    from soap.elastic.simulation.steady import simulate
    from soap.elastic.simulation.work import EstimatedWork

    graph, topology = simulator.graph, simulator.topology
    traffic = Traffic(design, needs_of_graph(graph, [*design.layout.tables], design.batch))
    return simulate(topology, traffic, EstimatedWork(graph, topology, simulator.costs, traffic))


ANY = "any"
"""Instead of a policy: the best of all policies and of the most promising other divisions."""
WORKER_POLICIES = tuple(POLICIES)


@dataclass(frozen=True)
class WorkersOutcome:
    """``strategy``: the workers with the most samples per second, and ``steady`` how they train. ``most_in_flight``: with how many
    minibatches in flight each fits. ``rates``: by allocation that was simulated, samples per second."""

    simulator: Simulator
    strategy: Strategy
    allocation: str
    plans: tuple[WorkerPlan, ...]
    steady: MixedSteady
    most_in_flight: tuple[int, ...] = ()
    rates: Mapping[str, float] | None = None

    @property
    def record(self) -> dict[str, Any]:
        """What a strategy file records of the search, as plain values."""
        rates = dict(self.rates or {})
        return {"samples_per_second": self.steady.samples_per_second, "allocation": self.allocation, "allocations": rates}

    def save(self, path: str) -> None:
        """Write the strategy with its record. SoapError if that fails."""
        save_strategy(path, self.strategy, self.simulator.graph, self.simulator.topology, self.record)


def find_workers(
    model: TracedModel,
    cluster: Cluster,
    consistency: str,
    policy: str = ANY,
    *,
    costs: CostSource = "auto",
    memory_budget: str | None = None,
) -> WorkersOutcome:
    """Search which devices make a virtual worker, its stages, and how many minibatches it has in flight, for the most samples per second
    within a bound on staleness. The workers share the model's batch: each has a minibatch of its part. ``policy``: NP, ED, ED-local or HD
    (``soap.mixed.steady``), or ``any``. SoapError in one line if nothing fits, or the samples do not divide."""
    from soap.mixed.planned import strategy_of
    from soap.mixed.steady import fitting

    bound = parse(consistency)
    if not bound.stale:
        raise StrategyError(f"consistency {consistency} with virtual workers; expected bounded:D, strictest with D = 0, or async")
    topology = with_memory_budget(topology_of(cluster), memory_budget)
    tries = ((finder, own) for finder, choices in _finders(model, topology, bound.bound, policy, costs) for own in choices)
    if not (found := fitting(tries)):
        raise StrategyError(_indivisible(model.graph, topology))
    best = max(found, key=lambda own: own.steady.samples_per_second)
    hosts = {topology.devices[stage.device].host for plan in best.plans for stage in plan.stages}
    servers = 1 if best.allocation.local else len(hosts)
    strategy = strategy_of(best.plans, model.graph, servers, str(bound), topology.device_count)
    rates = {own.allocation.name: own.steady.samples_per_second for own in found}
    simulator = simulator_for(model.graph, topology, costs=costs)
    return WorkersOutcome(simulator, strategy, best.allocation.name, best.plans, best.steady, best.most_in_flight, rates)


def simulate_workers(
    model: TracedModel, cluster: Cluster, strategy: Strategy, *, costs: CostSource = "auto", memory_budget: str | None = None
) -> WorkersOutcome:
    """How a strategy of virtual workers trains in its steady state. SoapError in one line if it has none, or they cannot run."""
    from soap.mixed.partitioning import Partitioner
    from soap.mixed.planned import minibatch_of, stages_of, wave_plan
    from soap.mixed.steady import simulate

    topology = with_memory_budget(topology_of(cluster), memory_budget)
    cut, workers = stages_of(strategy, model.graph), strategy.workers
    assert workers is not None
    minibatch = minibatch_graph(model, len(cut))
    bound = parse(strategy.consistency).bound
    partitioner = Partitioner(minibatch, topology, simulator_for(minibatch, topology, costs=costs).costs, bound)
    plans = tuple(partitioner.given(own, workers.in_flight) for own in cut)
    placement = wave_plan(strategy, model.graph, topology).placement(model.graph, topology)
    steady = simulate(topology, plans, placement, minibatch_of(strategy, model.graph), bound)
    return WorkersOutcome(simulator_for(model.graph, topology, costs=costs), strategy, "as given", plans, steady)


def minibatch_graph(model: TracedModel, workers: int) -> OperatorGraph:
    """The graph of one worker's minibatch, an equal part of the model's samples. StrategyError if they do not divide."""
    from soap.mixed.planned import minibatch_dims

    graph, dims = model.graph, minibatch_dims(model.graph)
    if workers == 1:
        return graph
    shapes = []
    for name in model.input_names:
        shape = [*graph.tensors[name].shape]
        if name in dims:
            if shape[dims[name]] % workers:
                raise StrategyError(f"{shape[dims[name]]} samples for {workers} workers; expected a number that divides them")
            shape[dims[name]] //= workers
        shapes.append(shape)
    return model.resized(shapes).graph


def _finders(
    model: TracedModel, topology: Topology, bound: int | None, policy: str, costs: CostSource
) -> Iterator[tuple[Finder, Sequence[Allocation]]]:
    """By number of workers, as their minibatches differ: what looks for them, and the allocations to simulate."""
    from soap.mixed.steady import Finder

    if policy != ANY and policy not in POLICIES:
        raise StrategyError(f"policy {policy[:40]!r}; expected {', '.join(POLICIES)}, or {ANY}")
    known = policies(topology) if policy == ANY else [POLICIES[policy](topology)]
    samples = samples_of(model.graph) or 0
    counts = range(1, topology.device_count + 1) if policy == ANY else [len(known[0].workers)]
    for count in counts:
        if policy == ANY and (topology.device_count % count or samples % count):
            continue
        minibatch = minibatch_graph(model, count)
        finder = Finder(minibatch, topology, simulator_for(minibatch, topology, costs=costs).costs, bound)
        own = [allocation for allocation in known if len(allocation.workers) == count]
        own += [allocation for allocation in finder.promising() if len(allocation.workers) == count] if policy == ANY else []
        yield finder, own


def _indivisible(graph: OperatorGraph, topology: Topology) -> str:
    return f"{samples_of(graph)} samples on {topology.device_count} devices; expected a number of workers that divides both"
