"""What configurations of operators, and the transfers between two of them, take by themselves, as if nothing else ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from soap.model.graph import Operand
from soap.strategy.config import OpConfig

if TYPE_CHECKING:
    from soap.simulator.shared import Shared

Longs = NDArray[np.int64]
Floats = NDArray[np.float64]
TilesBytes = tuple[list[int], int]
"""Tiles that have the same region, and its bytes."""


@dataclass(slots=True)
class Cut:
    """An operator's tiles, on whatever devices. ``part``: by tile, which part of the outputs it makes, perhaps with others. ``boxes``: by
    output, the parts' regions; ``reads``: by input, the tiles' regions; both [part or tile, dimension, start or stop]. ``sums``: of partial
    results. ``trained``: by parameter that is trained, its regions."""

    part: Longs
    boxes: list[Longs]
    reads: list[Longs]
    sums: list[TilesBytes]
    trained: list[list[TilesBytes]]


@dataclass(slots=True)
class Laid:
    """A configuration. ``devices``: by tile. ``holders``: [part of the outputs, device]. ``sums``: (devices, bytes) of sums of partial
    results."""

    cut: Cut
    devices: Longs
    holders: Longs
    sums: list[tuple[tuple[int, ...], int]]


class RoughCosts:
    """Times of operators and edges of a graph on a cluster."""

    def __init__(self, shared: Shared) -> None:
        """``shared``: graph, cluster and costs, with what engines of these have worked out."""
        self.graph, self.topology, self.costs, self._shared = shared.graph, shared.topology, shared.costs, shared
        self.cuts, self.communication, topology = shared.cuts, shared.communication, shared.topology
        self._moved = np.zeros((topology.device_count, topology.device_count), np.int64)
        self._cuts: dict[tuple[object, ...], Cut] = {}
        self._updates_ns: dict[tuple[int, int], int] = {}

    @property
    def routes(self) -> tuple[Floats, Floats]:
        """[sender, receiver]: (latency in seconds, seconds for each byte)."""
        cluster = self._shared.cluster_tables
        return cluster.message_latency_seconds, cluster.seconds_per_byte

    @cached_property
    def _nearest(self) -> Longs:
        latency, per_byte = self.routes
        return np.ascontiguousarray((latency + 2**20 * per_byte).argsort(axis=0, kind="stable"))

    def lay(self, position: int, config: OpConfig) -> Laid:
        """Where a configuration puts its tiles and outputs."""
        same = self.cuts.class_of(position)
        key = same, config.degrees, config.shares, config.replicas
        cut = self._cuts.get(key)
        if cut is None:
            cut = self._cuts[key] = self._cut(same, config)
        devices = np.array(config.devices, np.int64)
        holders = np.zeros((cut.part.max() + 1, self.topology.device_count), np.int64)
        holders[cut.part, devices] = 1
        return Laid(cut, devices, holders, [(_devices_of(config, own), size) for own, size in cut.sums])

    def _cut(self, position: int, config: OpConfig) -> Cut:
        from soap.simulator.cut_operators import alike  # compiled code

        op, (cells, regions) = self.graph.operators[position], self._shared.cuts.regions(position, config.degrees, config.shares)
        count, copies = len(cells), range(config.replicas)
        firsts, part = alike(cells[:, [not factor.summed for factor in op.factors]])
        boxes = [regions[operand][firsts] for operand in op.outputs]
        sums = list[TilesBytes]()
        if any(degree > 1 for degree, factor in zip(config.degrees, op.factors, strict=True) if factor.summed):
            sizes = np.sum([self._bytes(operand, own) for operand, own in zip(op.outputs, boxes, strict=True)], axis=0).tolist()
            members = _members(part, len(firsts))
            sums = [([copy * count + t for t in own], size) for own, size in zip(members, sizes, strict=True) for copy in copies]
        reads = [np.tile(regions[operand], (config.replicas, 1, 1)) for operand in op.inputs]
        trained = list[list[TilesBytes]]()
        for operand in op.parameters:
            if self.graph.tensors[operand.tensor].requires_grad:
                kinds, kind = alike(regions[operand])
                sizes = self._bytes(operand, regions[operand][kinds]).tolist()
                everywhere = [[copy * count + t for copy in copies for t in own] for own in _members(kind, len(kinds))]
                trained.append(list(zip(everywhere, sizes, strict=True)))
        return Cut(np.tile(part, config.replicas), boxes, reads, sums, trained)

    def _bytes(self, operand: Operand, regions: Longs) -> Longs:
        """Of each region."""
        found: Longs = (regions[:, :, 1] - regions[:, :, 0]).prod(axis=1) * self.graph.tensors[operand.tensor].itemsize
        return found

    def node_seconds(self, position: int, config: OpConfig, laid: Laid) -> float:
        """Computation on the busiest device, sums of partial results and of gradients, and the update."""
        both_ns = self.cuts.durations(position, config.degrees, config.shares).sum(axis=1).tolist()
        busy_ns, cells = [0] * self.topology.device_count, len(config.devices) // config.replicas
        for t, device in enumerate(config.devices):
            busy_ns[device] += both_ns[self.cuts.type_of[device]][t % cells]
        return (max(busy_ns) + self.sums_ns(laid.sums) + self.upkeep_ns(config, laid)) / 1e9

    def sums_ns(self, sums: Sequence[tuple[tuple[int, ...], int]]) -> int:
        """Sums of partial results, and of gradients by them. ``sums``: as ``Laid.sums``."""
        return 2 * max((self.communication.allreduce(size, own)[0] for own, size in sums if len(own) > 1), default=0)

    def upkeep_ns(self, config: OpConfig, laid: Laid) -> int:
        """Sums of an operator's parameters' gradients, and their updates."""
        rest_ns = 0
        for regions in laid.cut.trained:
            slowest_ns = 0
            for own, size in regions:
                devices = _devices_of(config, own)
                sum_ns = self.communication.allreduce(size, devices)[0] if len(devices) > 1 else 0
                slowest_ns = max(slowest_ns, sum_ns + max(self._update_ns(size, device) for device in devices))
            rest_ns += slowest_ns
        return rest_ns

    def _update_ns(self, size: int, device: int) -> int:
        key = size, self.cuts.type_of[device]
        found = self._updates_ns.get(key)
        if found is None:
            found = self._updates_ns[key] = self.costs.update_ns(size, self.topology.devices[device].type)
        return found

    def edge_seconds(self, operand: Operand, output: int, number: int, source: Laid, reader: Laid) -> float:
        """What the reader's busiest device receives, and the same again for the gradient."""
        return float(self.edges_seconds(operand, output, number, [source], [reader])[0, 0])

    def edges_seconds(
        self, operand: Operand, output: int, number: int, sources: Sequence[Laid], readers: Sequence[Laid]
    ) -> Floats:
        """``edge_seconds`` of each pair, [source, reader]."""
        from soap.search.compiled.transfers import Edges, busiest_readers_seconds
        from soap.simulator.compiled.handles import handle

        tensor = self.graph.tensors[operand.tensor]
        latency, per_byte = self.routes
        boxes, reads = [own.cut.boxes[output] for own in sources], [own.cut.reads[number] for own in readers]
        devices = np.concatenate([own.devices for own in readers])
        seconds = np.zeros((len(sources), len(readers)))
        edges = Edges(
            _pointers(boxes), np.concatenate([own.holders for own in sources]), np.concatenate(boxes),
            _pointers(reads), devices, np.concatenate(reads),
            self._nearest, latency, per_byte, self._moved, seconds,
        )  # fmt: skip
        busiest_readers_seconds(handle(edges), tensor.itemsize)
        return 2 * seconds if tensor.requires_grad else seconds


def _devices_of(config: OpConfig, tiles: Sequence[int]) -> tuple[int, ...]:
    """The devices of some tiles, each once."""
    return tuple(sorted({config.devices[t] for t in tiles}))


def _pointers(tables: Sequence[Longs]) -> Longs:
    """Where the rows of each table begin if they follow one another, and where the last one ends."""
    return np.cumsum([0, *map(len, tables)])


def _members(kind: Longs, kinds: int) -> list[list[int]]:
    """The places of each kind. ``kind``: by place."""
    found: list[list[int]] = [[] for _ in range(kinds)]
    for place, own in enumerate(kind.tolist()):
        found[own].append(place)
    return found
