"""The plans of servers and workers that a list of machines has: how many of each kind are servers, in how many partitions tables are, and
along which axis each table.

Machines of one kind (device, and link to the others) are alike, so a plan says how many of each kind are servers; the others are workers,
or all are both (*fully connected*). Of workers that share a step's samples there are as many as divide them, the quickest ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from soap.cluster.topology import Device, Topology
from soap.elastic.faults import ElasticError
from soap.elastic.plan import ElasticPlan
from soap.elastic.simulation.design import bipartite
from soap.model.graph import OperatorGraph
from soap.strategy.consistency import Consistency
from soap.strategy.grids import largest_divisor
from soap.strategy.served import samples_to_divide, tables_of

FACTORS = (1, 2)
"""Partitions of a table for each server."""


@dataclass(frozen=True)
class Choice:
    """``servers``: of each kind of machine, how many; None: fully connected. ``partitions``: of each table, or as many as it has
    positions. ``axes``: of each table."""

    servers: tuple[int, ...] | None
    partitions: int
    axes: tuple[int, ...]


class PlanSpace:
    """``batch``: of a lease; None: workers share the samples that the graph is for. ElasticError in one line if there is no plan: no table,
    or one machine alone."""

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
        """Those whose tables are all cut along one axis, as far as they can be, and whose servers are all of a kind before any of the
        next."""
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
