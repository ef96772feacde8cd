"""What configurations of operators, and the transfers between two of them, take by themselves, as if nothing else ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from soap.cluster.topology import Topology
from soap.model.graph import Operand, OperatorGraph
from soap.model.regions import Box, volume
from soap.plan.tiling import Tile, tiles_of
from soap.search.durations import TileDurations
from soap.simulator.communication.prices import Communication
from soap.simulator.costs import CostModel
from soap.strategy.config import OpConfig

if TYPE_CHECKING:
    from soap.simulator.shared import Shared


@dataclass(slots=True)
class Laid:
    """A configuration. ``devices``: by tile. ``holders``: [part of the outputs, device]. ``boxes``: by output, the parts' regions;
    ``reads``: by input, the tiles' regions; both [part or tile, dimension, start or stop]. ``sums``: (devices, bytes) of sums of
    partial results."""

    devices: NDArray[np.int64]
    holders: NDArray[np.int64]
    boxes: list[NDArray[np.int64]]
    reads: list[NDArray[np.int64]]
    sums: list[tuple[tuple[int, ...], int]]
    tiles: list[Tile]


class RoughCosts:
    """Times of operators and edges of a graph on a cluster."""

    def __init__(self, graph: OperatorGraph, topology: Topology, costs: CostModel, shared: Shared | None = None) -> None:
        """``shared``: what engines of these have worked out; nothing if None."""
        self.graph, self.topology, self.costs = graph, topology, costs
        self.durations = TileDurations(graph, topology, costs, shared)
        self.communication = Communication(topology) if shared is None else shared.communication
        self._moved = np.zeros((topology.device_count, topology.device_count), np.int64)

    @cached_property
    def routes(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[sender, receiver]: (latency in seconds, seconds for each byte)."""
        count = self.topology.device_count
        figures = [[self.communication.route_figures(a, b) if a != b else (0.0, 0.0) for b in range(count)] for a in range(count)]
        return np.array([[f[0] for f in own] for own in figures]), np.array([[f[1] for f in own] for own in figures])

    @cached_property
    def _nearest(self) -> NDArray[np.int64]:
        latency, per_byte = self.routes
        return np.ascontiguousarray((latency + 2**20 * per_byte).argsort(axis=0, kind="stable"))

    def lay(self, position: int, config: OpConfig) -> Laid:
        """Where a configuration puts its tiles and outputs."""
        op, tiles = self.graph.operators[position], tiles_of(self.graph, position, config)
        parts: dict[tuple[object, ...], list[int]] = {}
        for t, tile in enumerate(tiles):
            kept = tuple(own for own, factor in zip(tile.intervals, op.factors, strict=True) if not factor.summed)
            parts.setdefault(kept, []).append(t)
        holders = np.zeros((len(parts), self.topology.device_count), np.int64)
        sums = []
        summed = prod(degree for degree, factor in zip(config.degrees, op.factors, strict=True) if factor.summed)
        for number, own in enumerate(parts.values()):
            holders[number, [tiles[t].device for t in own]] = 1
            size = sum(volume(b) * self.graph.tensors[o.tensor].itemsize for o, b in zip(op.outputs, tiles[own[0]].outputs, strict=True))
            for replica in range(config.replicas if summed > 1 else 0):
                sums.append((tuple(sorted({tiles[t].device for t in own if tiles[t].replica == replica})), size))
        first = [tiles[own[0]] for own in parts.values()]
        boxes = [_edges_of([tile.outputs[k] for tile in first]) for k in range(len(op.outputs))]
        reads = [_edges_of([tile.inputs[k] for tile in tiles]) for k in range(len(op.inputs))]
        return Laid(np.array([tile.device for tile in tiles]), holders, boxes, reads, sums, tiles)

    def node_seconds(self, position: int, config: OpConfig, laid: Laid) -> float:
        """Computation on the busiest device, sums of partial results and of gradients, and the update."""
        table = self.durations(position, config.degrees, config.shares)
        busy_ns = [0] * self.topology.device_count
        cells = len(laid.tiles) // config.replicas
        for t, device in enumerate(laid.devices.tolist()):
            busy_ns[device] += int(table[self.durations.type_of[device], :, t % cells].sum())
        return (max(busy_ns) + self.sums_ns(laid.sums) + self.upkeep_ns(position, laid)) / 1e9

    def sums_ns(self, sums: Sequence[tuple[tuple[int, ...], int]]) -> int:
        """Sums of partial results, and of gradients by them. ``sums``: as ``Laid.sums``."""
        return 2 * max((self.communication.allreduce(size, own)[0] for own, size in sums if len(own) > 1), default=0)

    def upkeep_ns(self, position: int, laid: Laid) -> int:
        """Sums of an operator's parameters' gradients, and their updates."""
        rest_ns = 0
        for k, operand in enumerate(self.graph.operators[position].parameters):
            tensor = self.graph.tensors[operand.tensor]
            if not tensor.requires_grad:
                continue
            copies: dict[Box, set[int]] = {}
            for tile in laid.tiles:
                copies.setdefault(tile.parameters[k], set()).add(tile.device)
            synchronized = [
                (self.communication.allreduce(volume(box) * tensor.itemsize, tuple(sorted(own)))[0] if len(own) > 1 else 0)
                + max(self.costs.update_ns(volume(box) * tensor.itemsize, self.topology.devices[d].type) for d in own)
                for box, own in copies.items()
            ]
            rest_ns += max(synchronized)
        return rest_ns

    def edge_seconds(self, operand: Operand, output: int, number: int, source: Laid, reader: Laid) -> float:
        """What the reader's busiest device receives, and the same again for the gradient."""
        return float(self.edges_seconds(operand, output, number, [source], [reader])[0, 0])

    def edges_seconds(
        self, operand: Operand, output: int, number: int, sources: Sequence[Laid], readers: Sequence[Laid]
    ) -> NDArray[np.float64]:
        """``edge_seconds`` of each pair, [source, reader]."""
        from soap.search.compiled.transfers import busiest_readers_seconds  # imported here: it imports numba

        tensor = self.graph.tensors[operand.tensor]
        latency, per_byte = self.routes
        boxes, reads = [own.boxes[output] for own in sources], [own.reads[number] for own in readers]
        devices = np.concatenate([own.devices for own in readers])
        seconds = np.zeros((len(sources), len(readers)))
        busiest_readers_seconds(
            _pointers(boxes), np.concatenate([own.holders for own in sources]), np.concatenate(boxes),
            _pointers(reads), devices, np.concatenate(reads),
            self._nearest, latency, per_byte, tensor.itemsize, self._moved, seconds,
        )  # fmt: skip
        return 2 * seconds if tensor.requires_grad else seconds


def _pointers(tables: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Where the rows of each table begin if they follow one another, and where the last one ends."""
    return np.cumsum([0, *map(len, tables)])


def _edges_of(boxes: list[Box]) -> NDArray[np.int64]:
    return np.array(boxes, np.int64).reshape(len(boxes), -1, 2)
