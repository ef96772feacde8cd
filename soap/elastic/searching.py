"""The best plan of servers and workers for a list of machines: how many of each, in how many partitions, and along which axis each table.

Machines of one kind (device, and link to the others) are alike, so a plan says how many of each kind are servers; the others are workers,
or all are both (*fully connected*). If there are few plans, the best of all is found: plans are simulated in the order of a bound on their
rate, until no bound of those that are left is above the best rate. Otherwise a descent begins at the best plan whose tables are all cut
alike, and changes one table's axis, the partitions, or one machine's part at a time, as long as that is better.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod

from soap.cluster.topology import Topology
from soap.elastic.faults import ElasticError
from soap.elastic.plan import ElasticPlan
from soap.elastic.simulation.delays import NO_DELAYS, Delays
from soap.elastic.simulation.design import bipartite, design_of
from soap.elastic.simulation.steady import Steady, simulate
from soap.elastic.simulation.traffic import Traffic, needs_of_graph
from soap.elastic.simulation.unroll import unroll
from soap.elastic.simulation.work import EstimatedWork
from soap.model.graph import OperatorGraph
from soap.simulator.costs import CostModel
from soap.strategy.consistency import Consistency

MOST_PLANS = 400
"""Up to so many plans all of them are looked at."""
SEARCHED_LEASES, SEARCHED_TASKS = 64, 50_000
"""Limits of what a plan is played with while others are compared with it (``simulate``)."""
NOISE = 0.01
"""By how much a simulated rate that has not settled may be above its bound."""
FACTORS = (1, 2)
"""Partitions of a table for each server."""


@dataclass(frozen=True)
class Choice:
    """``servers``: of each kind of machine, how many; None: fully connected. ``partitions``: of each table. ``axes``: of each table."""

    servers: tuple[int, ...] | None
    partitions: int
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """``report``: how the plan trains in its steady state. ``simulated``: plans that were; ``possible``: plans that there are."""

    plan: ElasticPlan
    report: Steady
    simulated: int
    possible: int


def find(
    graph: OperatorGraph,
    topology: Topology,
    costs: CostModel,
    batch: int,
    consistency: Consistency,
    *,
    delays: Delays = NO_DELAYS,
    optimizer_states: int = 1,
    most_plans: int = MOST_PLANS,
) -> Found:
    """The plan with the most samples per second. ``batch``: of a lease. ``optimizer_states``: tensors of a parameter's size that servers
    keep beside it. ElasticError in one line if there is none: fewer than two machines, no table, or tables that fit on no servers."""
    search = Search(graph, topology, costs, batch, consistency, delays, optimizer_states)
    best = search.exhaustive() if search.count <= most_plans else search.descent()
    return Found(search.plan(best), search.steady(best, quickly=False), len(search.rates), search.count)


class Search:
    """What is known of the plans of one search. ``rates``: samples per second of those that were simulated."""

    def __init__(
        self,
        graph: OperatorGraph,
        topology: Topology,
        costs: CostModel,
        batch: int,
        consistency: Consistency,
        delays: Delays = NO_DELAYS,
        optimizer_states: int = 1,
    ) -> None:
        self._graph, self._topology, self._costs, self._batch = graph, topology, costs, batch
        self._consistency, self._delays, self._states = consistency, delays, optimizer_states
        self._tables = tuple(graph.sparse)
        self._kinds = kinds(topology)
        self.rates: dict[Choice, float] = {}
        if not self._tables or topology.device_count < 2:
            raise ElasticError(
                f"{len(self._tables)} tables and {topology.device_count} machines; expected a table that is looked up by rows, and at "
                "least 2 machines"
            )
        self._needs = needs_of_graph(graph, self._tables, batch)
        self.count = sum(1 for _ in self.choices())
        if not any(self._fits(choice) for choice in self.choices()):
            need = self._needed_bytes()
            raise ElasticError(
                f"tables, with {optimizer_states} states of the optimizer, have {need} bytes; no servers among {topology.device_count} "
                "machines hold them: add machines, or memory"
            )

    def choices(self) -> Iterator[Choice]:
        """All plans, in a fixed order: those with few servers first."""
        axes = list(product((0, 1), repeat=len(self._tables)))
        for servers in self._server_counts():
            for partitions in self._partitions(servers):
                yield from filter(self._is_legal, (Choice(servers, partitions, own) for own in axes))

    def exhaustive(self) -> Choice:
        """The best of all; of equal ones the first."""
        left = [(-self._bound(choice), number, choice) for number, choice in enumerate(self.choices()) if self._fits(choice)]
        best: tuple[float, int, Choice] | None = None
        for bound, number, choice in sorted(left, key=lambda one: one[:2]):
            if best is not None and -bound * (1 + NOISE) < -best[0]:
                break
            own = (-self.rate(choice), number, choice)
            best = own if best is None else min(best, own, key=lambda one: one[:2])
        assert best is not None
        return best[2]

    def descent(self) -> Choice:
        """A plan that no single change makes better."""
        alike = [choice for choice in self.choices() if len({*choice.axes}) == 1 and self._fits(choice)]
        best = self._best(alike or [choice for choice in self.choices() if self._fits(choice)][:1])
        while True:
            better = self._best([best, *filter(self._fits, filter(self._is_legal, self._neighbours(best)))])
            if better == best:
                return best
            best = better

    def rate(self, choice: Choice) -> float:
        """Samples per second."""
        if choice not in self.rates:
            self.rates[choice] = self.steady(choice, quickly=True).samples_per_second
        return self.rates[choice]

    def plan(self, choice: Choice) -> ElasticPlan:
        """The plan of a choice."""
        axes = dict(zip(self._tables, choice.axes, strict=True))
        everyone = tuple(range(self._topology.device_count))
        servers = workers = everyone
        if choice.servers is not None:
            servers = tuple(sorted(device for kind, count in zip(self._kinds, choice.servers, strict=True) for device in kind[:count]))
            workers = tuple(device for device in everyone if device not in servers)
        return bipartite(self._graph, workers, servers, self._batch, self._consistency, partitions=choice.partitions, axis=axes)

    def steady(self, choice: Choice, *, quickly: bool) -> Steady:
        """How a choice trains. ``quickly``: played with fewer leases, if it does not settle before."""
        traffic, work = self._asked(choice)
        if quickly:
            return simulate(self._topology, traffic, work, delays=self._delays, most_leases=SEARCHED_LEASES, most_tasks=SEARCHED_TASKS)
        return simulate(self._topology, traffic, work, delays=self._delays)

    def _asked(self, choice: Choice) -> tuple[Traffic, EstimatedWork]:
        design = design_of(self.plan(choice), self._graph)
        traffic = Traffic(design, self._needs)
        return traffic, EstimatedWork(self._graph, self._topology, self._costs, traffic)

    def _bound(self, choice: Choice) -> float:
        """No more samples per second than the busiest device or link allows, if all workers go on alike; they need not if nothing keeps
        them together and their machines differ."""
        traffic, work = self._asked(choice)
        if (self._consistency.bound is None and len(self._kinds) > 1) or self._delays != NO_DELAYS:
            return inf
        held: dict[int, int] = {}
        for task in unroll(self._topology, traffic, work, 1).tasks:
            for resource in task.resources:
                held[resource] = held.get(resource, 0) + task.held_ns
        return 1e9 * self._batch * len(traffic.design.lanes) / max(held.values())

    def _best(self, choices: Iterable[Choice]) -> Choice:
        return max(choices, key=self.rate)  # the first of equal ones

    def _neighbours(self, choice: Choice) -> Iterator[Choice]:
        """Plans with one change, legal or not."""
        for table, axis in enumerate(choice.axes):
            axes = (*choice.axes[:table], 1 - axis, *choice.axes[table + 1 :])
            yield replace(choice, axes=axes)
        for servers in self._server_counts():
            if _apart(servers, choice.servers) <= 1:
                for partitions in self._partitions(servers):
                    yield Choice(servers, partitions, choice.axes if partitions > 1 else (0,) * len(choice.axes))

    def _server_counts(self) -> Iterator[tuple[int, ...] | None]:
        devices = self._topology.device_count
        found = [own for own in product(*(range(len(kind) + 1) for kind in self._kinds)) if 0 < sum(own) < devices]
        yield from sorted(found, key=lambda own: (sum(own), own))
        yield None

    def _partitions(self, servers: tuple[int, ...] | None) -> list[int]:
        return sorted({1, *(factor * self._server_count(servers) for factor in FACTORS)})

    def _is_legal(self, choice: Choice) -> bool:
        """Whether all tables have so many positions along these axes, each server has a part of one, and no other choice is the same."""
        sizes = [self._graph.tensors[name].shape[axis] for name, axis in zip(self._tables, choice.axes, strict=True)]
        used = choice.partitions * len(sizes) >= self._server_count(choice.servers)
        return used and min(sizes) >= choice.partitions and (choice.partitions > 1 or not any(choice.axes))

    def _server_count(self, servers: tuple[int, ...] | None) -> int:
        return self._topology.device_count if servers is None else sum(servers)

    def _fits(self, choice: Choice) -> bool:
        design = design_of(self.plan(choice), self._graph)
        held = dict.fromkeys(design.servers, 0)
        for place in design.layout.places:
            held[design.device(place)] += self._bytes(place.partition.parameter, prod(place.partition.cell))
        return all(size <= self._topology.memory_limits[device] for device, size in held.items())

    def _bytes(self, parameter: str, elements: int) -> int:
        """At a server, with the optimizer's state."""
        known = self._graph.tensors.get(parameter)
        return (1 + self._states) * elements * (self._needs.dense_item_bytes if known is None else known.itemsize)

    def _needed_bytes(self) -> int:
        return sum(self._bytes(name, prod(self._graph.tensors[name].shape)) for name in self._tables)


def kinds(topology: Topology) -> list[tuple[int, ...]]:
    """Devices that are alike: of one type, with equal links to and from the others."""
    found: dict[object, list[int]] = {}
    for device in topology.devices:
        near = sorted(
            (link.source == device.name, link.bandwidth_bytes_per_second, link.latency_seconds)
            for link in topology.links
            if device.name in (link.source, link.target)
        )
        found.setdefault((device.type, tuple(near)), []).append(device.index)
    return [tuple(own) for own in found.values()]


def _apart(first: tuple[int, ...] | None, second: tuple[int, ...] | None) -> int:
    """How many machines have another part; a fully connected plan is next to all."""
    if first is None or second is None:
        return 1
    return sum(abs(a - b) for a, b in zip(first, second, strict=True))
