"""Strategies of virtual workers: the search for them, and how they train in their steady state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from soap.api.models import Cluster, topology_of
from soap.api.predictions import simulator_for
from soap.api.strategies import save_strategy
from soap.cluster.memory_budget import with_memory_budget
from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.mixed.allocations import POLICIES, Allocation, policies
from soap.model.batch import samples_of
from soap.model.graph import OperatorGraph
from soap.simulator.costs import CostSource
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy
from soap.strategy.consistency import parse

if TYPE_CHECKING:
    from soap.mixed.partitioning import WorkerPlan
    from soap.mixed.searching import Finder
    from soap.mixed.steady import MixedSteady
    from soap.tracing.execute import TracedModel

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
    (``soap.mixed.searching``), or ``any``. SoapError in one line if nothing fits, or the samples do not divide."""
    from soap.mixed.planned import strategy_of
    from soap.mixed.searching import fitting

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
    from soap.mixed.searching import Finder

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
