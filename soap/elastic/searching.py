"""The best plan of servers and workers for a list of machines.

If there are few plans, the best of all is found; otherwise a descent begins at the best plan whose tables are all cut alike, and changes
one thing at a time, as long as that is better. Among several plans the one with the highest bound on its rate is simulated first
(``steady.rate_bound``), and none whose bound is not above the best rate so far.

Machines of one kind (device, and link to the others) are alike, so a plan says how many of each kind are servers; the others are workers,
or all are both (*fully connected*). Of workers that share a step's samples there are as many as divide them, the quickest ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import inf, prod

from soap.cluster.topology import Device, Topology
from soap.elastic.faults import ElasticError
from soap.elastic.layout import ElasticPlan
from soap.elastic.simulation.design import Needs, Traffic, bipartite, design_of, needs_of_graph
from soap.elastic.simulation.steady import NO_DELAYS, Delays, Steady, rate_bound, simulate
from soap.elastic.simulation.work import EstimatedWork
from soap.model.graph import OperatorGraph
from soap.simulator.costs import CostModel
from soap.strategy.consistency import Consistency
from soap.strategy.grids import largest_divisor
from soap.strategy.served import samples_to_divide, tables_of

FACTORS = (1, 2)
"""Partitions of a table for each server."""


@dataclass(frozen=True)
class Choice:
    """``servers``: by kind of machine; None: fully connected. ``partitions``: of a table, at most its positions. ``axes``: by table."""

    servers: tuple[int, ...] | None
    partitions: int
    axes: tuple[int, ...]


class PlanSpace:
    """``batch``: of a lease; None: workers share the graph's samples. ElasticError if there is no plan: no table, or one machine alone."""

    def __init__(self, graph: OperatorGraph, topology: Topology, batch: int | None, consistency: Consistency) -> None:
        self._graph, self._topology, self._batch, self._consistency = graph, topology, batch, consistency
        self.tables = tables_of(graph)
        self.kinds = kinds(topology)
        if not self.tables or topology.device_count < 2:
            raise ElasticError(
                f"{len(self.tables)} tables and {topology.device_count} machines; expected a table that is looked up by rows (an "
                "embedding, or a bag that is a sum or a mean), and at least 2 machines"
            )
        self._samples = samples_to_divide(graph) if batch is None else 0

    @property
    def most(self) -> int:
        """No plans are more than this; without making them."""
        return sum(
            2 ** sum(self._axes(table, partitions) == (0, 1) for table in self.tables)
            for servers in self._server_counts()
            for partitions in self._partitions(servers)
        )

    def choices(self) -> Iterator[Choice]:
        """All plans, in a fixed order: those with few servers first."""
        for servers in self._server_counts():
            for partitions in self._partitions(servers):
                for axes in product(*(self._axes(table, partitions) for table in self.tables)):
                    yield from self._legal(Choice(servers, partitions, axes))

    def alike(self) -> Iterator[Choice]:
        """Those whose tables are cut along one axis, as far as they can be, and whose servers fill one kind before the next."""
        for servers in self._filled():
            for partitions in self._partitions(servers):
                ways = [tuple(self._axes(table, partitions)[way] for table in self.tables) for way in (0, -1)]
                for axes in dict.fromkeys(ways):
                    yield from self._legal(Choice(servers, partitions, axes))

    def neighbours(self, choice: Choice) -> Iterator[Choice]:
        """Plans with one change: a table's axis, the partitions, one machine's part, or fully connected."""
        for table, axis in enumerate(choice.axes):
            yield from self._legal(replace(choice, axes=(*choice.axes[:table], 1 - axis, *choice.axes[table + 1 :])))
        for servers in self._near(choice.servers):
            for partitions in self._partitions(servers):
                axes = [min(axis, max(self._axes(table, partitions))) for table, axis in zip(self.tables, choice.axes, strict=True)]
                yield from self._legal(Choice(servers, partitions, tuple(axes)))

    def plan(self, choice: Choice) -> ElasticPlan:
        """What a choice means."""
        order = self._order
        servers = workers = order
        if choice.servers is not None:
            servers = tuple(sorted(device for kind, count in zip(self.kinds, choice.servers, strict=True) for device in kind[:count]))
            workers = tuple(device for device in order if device not in servers)
        batch = self._batch
        if batch is None:
            count = largest_divisor(self._samples, len(workers))
            workers, batch = workers[:count], self._samples // count
        workers = tuple(sorted(workers))
        axes = dict(zip(self.tables, choice.axes, strict=True))
        servers = workers if choice.servers is None else servers
        return bipartite(self._graph, workers, servers, batch, self._consistency, partitions=choice.partitions, axis=axes)

    @property
    def _order(self) -> tuple[int, ...]:
        """Devices, the quickest first."""

        def slowness(device: Device) -> tuple[float, float, int]:
            return -max(device.type.flops_per_second.values()), -device.type.memory_bandwidth_bytes_per_second, device.index

        return tuple(device.index for device in sorted(self._topology.devices, key=slowness))

    def _legal(self, choice: Choice) -> Iterator[Choice]:
        """The choice, if its partitions are no more than some table has positions, each server has one, and no other choice is the same."""
        sizes = [self._graph.tensors[name].shape[axis] for name, axis in zip(self.tables, choice.axes, strict=True)]
        parts = [min(size, choice.partitions) for size in sizes]
        same = any(axis and count < 2 for axis, count in zip(choice.axes, parts, strict=True))
        if not same and max(parts) == choice.partitions and sum(parts) >= self._server_count(choice.servers):
            yield choice

    def _axes(self, table: str, partitions: int) -> tuple[int, ...]:
        """Along which a table may be cut in more than one part; 0 if along none."""
        shape = self._graph.tensors[table].shape
        return tuple(axis for axis in (0, 1) if min(shape[axis], partitions) > 1) or (0,)

    def _server_counts(self) -> Iterator[tuple[int, ...] | None]:
        devices = self._topology.device_count
        found = [own for own in product(*(range(len(kind) + 1) for kind in self.kinds)) if 0 < sum(own) < devices]
        yield from sorted(found, key=lambda own: (sum(own), own))
        yield None

    def _filled(self) -> Iterator[tuple[int, ...] | None]:
        """One for each number of servers, from the first kinds, and from the last ones."""
        for count in range(1, self._topology.device_count):
            found = []
            for order in (range(len(self.kinds)), reversed(range(len(self.kinds)))):
                own, left = [0] * len(self.kinds), count
                for kind in order:
                    own[kind] = min(left, len(self.kinds[kind]))
                    left -= own[kind]
                found.append(tuple(own))
            yield from dict.fromkeys(found)
        yield None

    def _near(self, servers: tuple[int, ...] | None) -> Iterator[tuple[int, ...] | None]:
        """Itself, what one machine more or less makes of it, and fully connected; behind which all numbers of servers come."""
        if servers is None:
            yield from self._filled()
            return
        yield servers
        for kind, count in enumerate(servers):
            for other in (count - 1, count + 1):
                found = (*servers[:kind], other, *servers[kind + 1 :])
                if 0 <= other <= len(self.kinds[kind]) and 0 < sum(found) < self._topology.device_count:
                    yield found
        yield None

    def _partitions(self, servers: tuple[int, ...] | None) -> list[int]:
        return sorted({1, *(factor * self._server_count(servers) for factor in FACTORS)})

    def _server_count(self, servers: tuple[int, ...] | None) -> int:
        if servers is not None:
            return sum(servers)
        everyone = self._topology.device_count
        return everyone if self._batch is not None else largest_divisor(self._samples, everyone)


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


MOST_PLANS = 400
"""Up to so many plans all of them are looked at."""
SEARCHED_LEASES, SEARCHED_TASKS = 64, 50_000
"""Limits of what a plan is played with while others are compared with it (``simulate``)."""
NOISE = 0.01
"""By how much a simulated rate that has not settled may be above its bound."""


@dataclass(frozen=True)
class Found:
    """``report``: how the plan trains in its steady state. ``simulated``: plans that were; ``possible``: plans that there are, at most.
    ``interrupted``: whether the search was ended before it was done. ``proven``: whether no other plan can be better."""

    plan: ElasticPlan
    report: Steady
    simulated: int
    possible: int
    interrupted: bool
    proven: bool


def never() -> bool:
    """Goes on to the end."""
    return False


class Search:
    """A search for the plan with the most samples per second. ``batch``: of a lease; None: workers share the graph's samples.
    ``optimizer_states``: tensors of a parameter's size that servers keep beside it. ``stopped``: asked before each plan but the first; once
    it returns True, the best so far is what is found. ``simulated``: told each plan's rate. ``rates``: samples per second of the plans that
    were simulated. ElasticError for fewer than two machines, or no table."""

    def __init__(
        self,
        graph: OperatorGraph,
        topology: Topology,
        costs: CostModel,
        batch: int | None,
        consistency: Consistency,
        *,
        delays: Delays = NO_DELAYS,
        optimizer_states: int = 1,
        stopped: Callable[[], bool] = never,
        simulated: Callable[[float], None] = lambda rate: None,
    ) -> None:
        self._graph, self._topology, self._costs = graph, topology, costs
        self._delays, self._states = delays, optimizer_states
        self._stopped, self._simulated = stopped, simulated
        self.space = PlanSpace(graph, topology, batch, consistency)
        self._alike = (consistency.bound is not None or len(self.space.kinds) == 1) and delays == NO_DELAYS
        self.count = self.space.most
        self.rates: dict[Choice, float] = {}
        self._times: dict[Hashable, int] = {}
        self._needs = lru_cache(maxsize=None)(self._found_needs)
        self._asked = lru_cache(maxsize=None)(self._found_asked)
        self._bound = lru_cache(maxsize=None)(self._found_bound)

    def find(self, most_plans: int = MOST_PLANS) -> Found:
        """The best of all plans, or, of more than so many, one that no single change makes better. ElasticError if tables fit on no
        servers; KeyboardInterrupt if the search was stopped before there was a plan."""
        interrupted, all_of_them = False, self.count <= most_plans
        try:
            best = self.exhaustive() if all_of_them else self.descent()
        except KeyboardInterrupt:
            known = self.best_so_far()
            if known is None:
                raise
            best, interrupted = known, True
        report = self.steady(best, quickly=interrupted)
        return Found(self.space.plan(best), report, len(self.rates), self.count, interrupted, all_of_them and not interrupted)

    def exhaustive(self) -> Choice:
        """The best of all; of equal ones the first."""
        return self._best(self.space.choices())

    def descent(self) -> Choice:
        """A plan that no single change makes better."""
        best = self._best(self.space.alike())
        while True:
            better = self._best([best, *self.space.neighbours(best)])
            if better == best:
                return best
            best = better

    def best_so_far(self) -> Choice | None:
        """Of those that were simulated."""
        return max(self.rates, key=self.rates.__getitem__, default=None)

    def rate(self, choice: Choice) -> float:
        """Samples per second."""
        if choice not in self.rates:
            self.rates[choice] = self.steady(choice, quickly=True).samples_per_second
            self._simulated(self.rates[choice])
        return self.rates[choice]

    def steady(self, choice: Choice, *, quickly: bool) -> Steady:
        """How a choice trains. ``quickly``: played with fewer leases, if it does not settle before."""
        traffic, work = self._asked(choice)
        if quickly:
            return simulate(self._topology, traffic, work, delays=self._delays, most_leases=SEARCHED_LEASES, most_tasks=SEARCHED_TASKS)
        return simulate(self._topology, traffic, work, delays=self._delays)

    def _best(self, choices: Iterable[Choice]) -> Choice:
        """The best of these that fit; of equal ones the first. KeyboardInterrupt if the search is ended."""
        order = [(-self._bound(choice), number, choice) for number, choice in enumerate(self._fitting(choices))]
        if not order:
            raise ElasticError(
                f"tables, with {self._states} states of the optimizer, have {self._needed_bytes()} bytes; no servers among "
                f"{self._topology.device_count} machines hold them: add machines, or memory"
            )
        best: tuple[float, int, Choice] | None = None
        for bound, number, choice in sorted(order, key=lambda one: one[:2]):
            if best is not None and -bound * (1 + NOISE) < -best[0]:
                break
            if self.rates and self._stopped():
                raise KeyboardInterrupt
            own = (-self.rate(choice), number, choice)
            best = own if best is None else min(best, own, key=lambda one: one[:2])
        assert best is not None
        return best[2]

    def _fitting(self, choices: Iterable[Choice]) -> Iterator[Choice]:
        for choice in choices:
            traffic = self._asked(choice)[0]
            design = traffic.design
            held = dict.fromkeys(design.servers, 0)
            for place in design.layout.places:
                size = prod(place.partition.cell) * self._item_bytes(place.partition.parameter, traffic.needs)
                held[design.device(place)] += (1 + self._states) * size
            if all(size <= self._topology.memory_limits[device] for device, size in held.items()):
                yield choice

    def _found_asked(self, choice: Choice) -> tuple[Traffic, EstimatedWork]:
        plan = self.space.plan(choice)
        traffic = Traffic(design_of(plan, self._graph), self._needs(plan.batch))
        return traffic, EstimatedWork(self._graph, self._topology, self._costs, traffic, known=self._times)

    def _found_needs(self, batch: int) -> Needs:
        return needs_of_graph(self._graph, self.space.tables, batch)

    def _found_bound(self, choice: Choice) -> float:
        """No more samples per second than this; workers need not go on alike if nothing keeps them together and their machines differ."""
        return inf if self._delays != NO_DELAYS else rate_bound(self._topology, *self._asked(choice), alike=self._alike)

    def _item_bytes(self, parameter: str, needs: Needs) -> int:
        known = self._graph.tensors.get(parameter)
        return needs.dense_item_bytes if known is None else known.itemsize

    def _needed_bytes(self) -> int:
        return (1 + self._states) * sum(self._graph.tensors[name].bytes for name in self.space.tables)
