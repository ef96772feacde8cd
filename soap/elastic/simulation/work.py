"""How long workers and owners compute for a lease: what the simulator asks, and answers from the costs of a graph's tiles."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import replace
from math import prod
from typing import Protocol

from soap.cluster.topology import DeviceType, Topology
from soap.elastic.faults import ElasticError
from soap.elastic.layout import Place
from soap.elastic.simulation.design import Lane, Traffic
from soap.model.batch import samples_of
from soap.model.graph import FactorKind, OperatorGraph
from soap.model.regions import Interval
from soap.plan.collectives import REDUCE_TRAFFIC
from soap.plan.tiling import Tile, tiles_of
from soap.simulator.communication.servers import server_type
from soap.simulator.costs import CostModel, nanoseconds
from soap.strategy.config import OpConfig

ROUTED_WORDS = 16
"""Words of 8 bytes that ``layout.route`` reads and writes for an entry: its cell (2), its sample (1), its place (3), their order (4),
counts (1), and the taking of ids and values (5)."""
LOGGED_PASSES = 3
"""Passes over a push that is logged: its checksum, and the copy into the system's memory (one read, one write)."""


class Work(Protocol):
    """Durations in nanoseconds, at least 1 except for ``control_ns``. Equal questions get equal answers."""

    @property
    def control_ns(self) -> int:
        """From the dealer to a worker, or back: it holds no device."""

    def front_ns(self, lane: Lane) -> int:
        """Reading a batch, and finding out who is asked for what."""

    def rest_ns(self, lane: Lane) -> int:
        """From the sums to their gradients and those of the dense variables."""

    def look_up_ns(self, place: Place) -> int:
        """An owner's sums; under the partition's lock."""

    def gradient_ns(self, place: Place) -> int:
        """An owner's gradient of rows, from that of sums."""

    def count_ns(self, place: Place) -> int:
        """Logging a push, and applying it if each push is an update (``Design.averaged``); under the partition's lock."""

    def update_ns(self, place: Place) -> int:
        """The update with the sum of a step's gradients, where they are one; under the partition's lock."""

    def pull_ns(self, place: Place) -> int:
        """Copying a piece of the dense variables; under its lock."""


class EstimatedWork:
    """From a cost model of the graph: an owner computes a tile of the look-ups that its table's factor is cut into, a lane the tiles of
    all other operators, one after the other. What is beside tiles (routing, logs, sums of partial sums) is traffic at memory bandwidth.
    ``known``: times of tiles by what they depend on, shared by all designs of one graph and cost model."""

    def __init__(
        self, graph: OperatorGraph, topology: Topology, costs: CostModel, traffic: Traffic, known: dict[Hashable, int] | None = None
    ) -> None:
        self._graph, self._topology, self._costs, self._traffic = graph, topology, costs, traffic
        self._design, self.control_ns = traffic.design, 0
        samples = samples_of(graph) or self._design.batch
        self._parts = max(1, samples // self._design.batch)
        """In how many leases' batches the graph's batch is cut."""
        self._times = {} if known is None else known

    def front_ns(self, lane: Lane) -> int:
        """See ``Work``."""
        needs = self._traffic.needs
        entries = sum(asked.entries for asked in needs.tables.values())
        size = sum(self._traffic.asking(place) for places in self._design.layout.tables.values() for place in places)
        return self._moving_ns(2 * (size + needs.input_bytes) + 8 * ROUTED_WORDS * entries, self._topology.devices[lane.front].type)

    def rest_ns(self, lane: Lane) -> int:
        """See ``Work``."""
        device = self._topology.devices[lane.rest].type
        sums = [self._traffic.sums(place) for places in self._design.layout.tables.values() for place in places if len(places) > 1]
        dense = sum(self._traffic.values(place) for place in self._design.layout.dense)
        looked_up = {lookup.operator for name in self._design.layout.tables for lookup in self._graph.sparse[name].lookups}
        key = ("rest", frozenset(looked_up), self._parts, device)
        if key not in self._times:
            self._times[key] = self._computing_ns(looked_up, device)
        return self._moving_ns(REDUCE_TRAFFIC * sum(sums) + 4 * dense, device) + self._times[key]

    def _computing_ns(self, looked_up: Set[int], device: DeviceType) -> int:
        """A lease's part of all other operators."""
        found = 0
        for position, op in enumerate(self._graph.operators):
            if position not in looked_up:
                tile = _tile(self._graph, position, self._degrees(position))
                found += self._costs.forward_ns(self._graph, tile, device)
                if self._graph.needs_backward(op):
                    found += self._costs.backward_ns(self._graph, tile, device)
        return found

    def look_up_ns(self, place: Place) -> int:
        """See ``Work``."""
        return self._tiles_ns(place, False)

    def gradient_ns(self, place: Place) -> int:
        """See ``Work``."""
        return self._tiles_ns(place, True)

    def count_ns(self, place: Place) -> int:
        """See ``Work``."""
        kind = self._owner(place)
        logging_ns = self._moving_ns(LOGGED_PASSES * self._traffic.push(place), kind)
        return logging_ns if self._design.averaged else logging_ns + self._costs.update_ns(self._changed_bytes(place, 1), kind)

    def update_ns(self, place: Place) -> int:
        """See ``Work``."""
        kind, leases = self._owner(place), len(self._design.lanes)
        added = REDUCE_TRAFFIC * (leases - 1) * self._changed_bytes(place, 1)
        return self._moving_ns(added, kind) + self._costs.update_ns(self._changed_bytes(place, leases), kind)

    def _changed_bytes(self, place: Place, leases: int) -> int:
        """Of a partition's values that have a gradient in one or more of so many leases."""
        partition = place.partition
        if partition.parameter not in self._design.layout.tables:
            return self._traffic.needs.dense_item_bytes * partition.cell[0]
        access, table = self._graph.sparse[partition.parameter], self._graph.tensors[partition.parameter]
        asked = -(-access.weighed * leases // self._parts)
        touched = access.touched_by(asked)
        if asked > access.weighed:  # more than the graph's batch
            touched = min(table.shape[0], -(-touched * asked // access.weighed))
        return -(-touched * partition.cell[0] // table.shape[0]) * partition.cell[1] * table.itemsize

    def pull_ns(self, place: Place) -> int:
        """See ``Work``."""
        return self._moving_ns(2 * self._traffic.values(place), self._owner(place))

    def _tiles_ns(self, place: Place, backward: bool) -> int:
        """Parts of equal size cost the same."""
        partition, parts = place.partition, len(self._design.layout.tables[place.partition.parameter])
        key = (partition.parameter, partition.axis, partition.cell, parts, self._parts, self._owner(place), backward)
        if key not in self._times:
            self._times[key] = self._found_tiles_ns(place, backward)
        return self._times[key]

    def _found_tiles_ns(self, place: Place, backward: bool) -> int:
        """All uses of a table, as the owner of a partition computes them."""
        partition, total = place.partition, 0
        for lookup in self._graph.sparse[partition.parameter].lookups:
            op = self._graph.operators[lookup.operator]
            factor = op.parameters[lookup.parameter].dims[partition.axis].factor
            if factor is None:
                raise ElasticError(
                    f"{op.name!r} cannot be cut along axis {partition.axis} of {partition.parameter!r}; expected the other axis"
                )
            degrees = [*self._degrees(lookup.operator)]
            degrees[factor] = len(self._design.layout.tables[partition.parameter])
            tile = _tile(self._graph, lookup.operator, degrees, {factor: (partition.start, partition.stop)})
            kind = self._owner(place)
            if backward:
                total += self._costs.backward_ns(self._graph, replace(tile, sparse_lookup=True), kind)
            else:
                total += self._costs.forward_ns(self._graph, tile, kind)
        return total

    def _degrees(self, position: int) -> tuple[int, ...]:
        """Of a lease's part of an operator: its first sample factor is cut."""
        op = self._graph.operators[position]
        sample = next((k for k, factor in enumerate(op.factors) if factor.kind is FactorKind.SAMPLE), None)
        return tuple(min(self._parts, factor.size) if k == sample else 1 for k, factor in enumerate(op.factors))

    def _owner(self, place: Place) -> DeviceType:
        return server_type(self._topology, self._design.device(place))

    def _moving_ns(self, moved_bytes: int, device: DeviceType) -> int:
        return nanoseconds(moved_bytes / device.memory_bandwidth_bytes_per_second + device.kernel_seconds)


def _tile(graph: OperatorGraph, position: int, degrees: Sequence[int], wanted: Mapping[int, Interval] | None = None) -> Tile:
    """The first tile of an operator that is cut so, or the first with these intervals."""
    tiles = tiles_of(graph, position, OpConfig(tuple(degrees), tuple(range(prod(degrees)))))
    return next(tile for tile in tiles if all(tile.intervals[factor] == own for factor, own in (wanted or {}).items()))
