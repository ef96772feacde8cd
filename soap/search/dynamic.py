"""A start from a dynamic programme: OptCNN's elimination of nodes and edges (Jia et al., "Exploring Hidden Dimensions in Parallelizing
Convolutional Neural Networks", 2018).

It minimises a sum: each operator's time on its busiest device with the sum of its gradients and its update, and each edge's transfers,
forward and back. Nothing overlaps in this sum, so it is no prediction. Its minimum is a good place to begin.

An operator with two neighbours is eliminated: for each pair of its neighbours' configurations its best one is remembered. Two edges
between the same operators are added up. An operator with one neighbour, or none, is eliminated in the same way. If every operator has
more neighbours (not so with chains, branches that join again, and residual connections), the one with the fewest is fixed to the
configuration that is best with its neighbours' best, and the elimination goes on. The result is then no longer the minimum of the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from soap.cluster.topology import Topology
from soap.model.graph import Operand, OperatorGraph
from soap.model.regions import Box, volume
from soap.plan.tiling import Tile, tiles_of
from soap.search.durations import TileDurations
from soap.search.space import OperatorSpace, Space
from soap.simulator.communication.prices import Communication
from soap.simulator.costs import CostModel
from soap.strategy.config import OpConfig, Strategy

Costs = NDArray[np.float64]

MAX_CANDIDATES = 48
"""Configurations per operator; see ``candidates``."""

MAX_PAIRS = 100_000
"""A search makes this start if all edges together have at most so many pairs of configurations: it takes a few seconds."""


@dataclass
class Additive:
    """A cost that is a sum. ``nodes``: by operator and candidate. ``edges``: (i, j) with i < j, by both candidates."""

    nodes: list[Costs]
    edges: dict[tuple[int, int], Costs]

    def total(self, chosen: list[int]) -> float:
        """The sum for one candidate per operator."""
        whole = sum(float(own[c]) for own, c in zip(self.nodes, chosen, strict=True))
        return whole + sum(float(own[chosen[i], chosen[j]]) for (i, j), own in self.edges.items())


@dataclass
class _Elimination:
    """The remaining problem. ``decisions``: how to choose an eliminated operator once those after it are chosen."""

    nodes: dict[int, Costs]
    edges: dict[int, dict[int, Costs]] = field(default_factory=dict)
    decisions: list[tuple[int, Callable[[dict[int, int]], int]]] = field(default_factory=list)
    exact: bool = True

    def join(self, i: int, j: int, cost: Costs) -> None:
        """Add a cost between i (rows) and j."""
        known = self.edges.setdefault(i, {}).get(j)
        total = cost if known is None else known + cost
        self.edges[i][j] = total
        self.edges.setdefault(j, {})[i] = total.T

    def run(self) -> None:
        """Eliminate everything."""
        while self.nodes:
            i = min(self.nodes, key=lambda n: (len(self.edges.get(n, {})), n))
            around = self.edges.pop(i, {})
            for j in around:
                del self.edges[j][i]
            own = self.nodes.pop(i)
            if len(around) > 2:
                self._fix(i, own, around)
            elif len(around) == 2:
                (j, to_j), (k, to_k) = around.items()
                table = own[:, None, None] + to_j[:, :, None] + to_k[:, None, :]
                best = table.argmin(axis=0)
                self.decisions.append((i, lambda chosen, best=best, j=j, k=k: int(best[chosen[j], chosen[k]])))  # type: ignore[misc]
                self.join(j, k, table.min(axis=0))
            elif around:
                ((j, to_j),) = around.items()
                pair = own[:, None] + to_j
                best = pair.argmin(axis=0)
                self.decisions.append((i, lambda chosen, best=best, j=j: int(best[chosen[j]])))  # type: ignore[misc]
                self.nodes[j] = self.nodes[j] + pair.min(axis=0)
            else:
                alone = int(own.argmin())
                self.decisions.append((i, lambda chosen, alone=alone: alone))  # type: ignore[misc]

    def _fix(self, i: int, own: Costs, around: dict[int, Costs]) -> None:
        """Fix one configuration for good: the best one if each neighbour may choose for itself."""
        self.exact = False
        best = int((own + sum((cost + self.nodes[j]).min(axis=1) for j, cost in around.items())).argmin())
        self.decisions.append((i, lambda chosen: best))
        for j, cost in around.items():
            self.nodes[j] = self.nodes[j] + cost[best]


def minimise(problem: Additive) -> tuple[list[int], bool]:
    """One candidate per operator, and whether they are certainly the minimum of the sum."""
    left = _Elimination(dict(enumerate(problem.nodes)))
    for (i, j), cost in problem.edges.items():
        left.join(i, j, cost)
    left.run()
    chosen: dict[int, int] = {}
    for i, decide in reversed(left.decisions):
        chosen[i] = decide(chosen)
    return [chosen[i] for i in range(len(problem.nodes))], left.exact


def candidates(space: OperatorSpace, most: int = MAX_CANDIDATES) -> list[OpConfig]:
    """Structured configurations: all of them, or the first and the last placement of each grid in the order of preference."""
    every = list(space.structured())
    if len(every) <= most:
        return every
    by_grid: dict[tuple[int, ...], list[OpConfig]] = {}
    for config in every:
        by_grid.setdefault((config.replicas, *config.degrees), []).append(config)
    chosen = [own[0] for own in by_grid.values()]
    singles = [config for config in every if len(config.devices) == 1]
    return list(dict.fromkeys([*singles[:8], *chosen]))[:most]


def pair_count(space: Space) -> int:
    """Roughly how many pairs of candidates the costs are made for: those on edges that differ in more than names."""
    graph = space.graph
    counts = [min(MAX_CANDIDATES, own.structured_count) for own in space.operators]
    seen: dict[tuple[object, ...], int] = {}
    for j, op in enumerate(graph.operators):
        for k, operand in enumerate(op.inputs):
            if operand.tensor in graph.producers:
                i, output = graph.producers[operand.tensor]
                other = graph.operators[i]
                seen[other.kind, other.factors, output, op.kind, op.factors, k] = counts[i] * counts[j]
    return sum(seen.values())


def dynamic_strategy(space: Space, topology: Topology, costs: CostModel) -> Strategy:
    """The strategy of structured configurations that the dynamic programme finds."""
    problem, choices = additive_costs(space, topology, costs)
    chosen, _ = minimise(problem)
    names = [op.name for op in space.graph.operators]
    return Strategy({name: own[c] for name, own, c in zip(names, choices, chosen, strict=True)})


def additive_costs(space: Space, topology: Topology, costs: CostModel) -> tuple[Additive, list[list[OpConfig]]]:
    """The sum to minimise, in seconds, and each operator's candidates."""
    graph = space.graph
    estimate = _Estimate(graph, topology, costs)
    choices = [candidates(own) for own in space.operators]
    laid = [[estimate.lay(i, config) for config in own] for i, own in enumerate(choices)]
    nodes = [np.array([estimate.node_seconds(i, config, tiles) for config, tiles in zip(choices[i], laid[i], strict=True)])
             for i in range(len(choices))]  # fmt: skip
    edges: dict[tuple[int, int], Costs] = {}
    known: dict[tuple[int, ...], Costs] = {}
    for j, op in enumerate(graph.operators):
        for k, operand in enumerate(op.inputs):
            if operand.tensor not in graph.producers:
                continue
            i, output = graph.producers[operand.tensor]
            key = (estimate.durations.same(i), output, estimate.durations.same(j), k)
            if key not in known:
                known[key] = np.array([[estimate.edge_seconds(operand, output, k, a, b) for b in laid[j]] for a in laid[i]])
            edges[i, j] = edges[i, j] + known[key] if (i, j) in edges else known[key]
    return Additive(nodes, edges), choices


@dataclass(slots=True)
class _Laid:
    """A configuration. ``devices``: by tile. ``holders``: [part of the outputs, device]. ``boxes``: by output, the parts' regions;
    ``reads``: by input, the tiles' regions; both [part or tile, dimension, start or stop]. ``sums``: (devices, bytes) of sums of
    partial results."""

    degrees: tuple[int, ...]
    devices: NDArray[np.int64]
    holders: NDArray[np.int64]
    boxes: list[NDArray[np.int64]]
    reads: list[NDArray[np.int64]]
    sums: list[tuple[tuple[int, ...], int]]
    tiles: list[Tile]


class _Estimate:
    """Seconds of operators and edges, each as if nothing else ran."""

    def __init__(self, graph: OperatorGraph, topology: Topology, costs: CostModel) -> None:
        from soap.search.compiled.transfers import busiest_reader_seconds  # imported here: it imports numba

        self._busiest_reader_seconds = busiest_reader_seconds
        self.graph, self.topology, self.costs = graph, topology, costs
        self.durations = TileDurations(graph, topology, costs)
        self.communication = Communication(topology)
        count = topology.device_count
        figures = [[self.communication.route_figures(a, b) if a != b else (0.0, 0.0) for b in range(count)] for a in range(count)]
        self.latency, self.per_byte = np.array([[f[0] for f in own] for own in figures]), np.array([[f[1] for f in own] for own in figures])
        self._nearest = np.ascontiguousarray((self.latency + 2**20 * self.per_byte).argsort(axis=0, kind="stable"))
        self._moved = np.zeros((count, count), np.int64)
        self._common: dict[tuple[object, ...], NDArray[np.int64]] = {}

    def lay(self, position: int, config: OpConfig) -> _Laid:
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
        return _Laid(config.degrees, np.array([tile.device for tile in tiles]), holders, boxes, reads, sums, tiles)

    def node_seconds(self, position: int, config: OpConfig, laid: _Laid) -> float:
        """Computation on the busiest device, sums of partial results and of gradients, and the update."""
        op = self.graph.operators[position]
        table = self.durations(position, config.degrees)
        busy_ns = [0] * self.topology.device_count
        cells = len(laid.tiles) // config.replicas
        for t, device in enumerate(laid.devices.tolist()):
            busy_ns[device] += int(table[self.durations.type_of[device], :, t % cells].sum())
        rest_ns = 2 * max((self.communication.allreduce(size, own)[0] for own, size in laid.sums if len(own) > 1), default=0)
        for k, operand in enumerate(op.parameters):
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
        return (max(busy_ns) + rest_ns) / 1e9

    def edge_seconds(self, operand: Operand, output: int, number: int, source: _Laid, reader: _Laid) -> float:
        """What the reader's busiest device receives, and the same again for the gradient."""
        key = (operand, output, number, source.degrees, reader.degrees, len(source.boxes[output]), len(reader.devices))
        common = self._common.get(key)
        if common is None:
            common = self._common[key] = _overlaps(source.boxes[output], reader.reads[number])
        tensor = self.graph.tensors[operand.tensor]
        seconds = float(
            self._busiest_reader_seconds(
                source.holders, reader.devices, common, self._nearest, self.latency, self.per_byte, tensor.itemsize, self._moved
            )
        )
        return 2 * seconds if tensor.requires_grad else seconds


def _edges_of(boxes: list[Box]) -> NDArray[np.int64]:
    return np.array(boxes, np.int64).reshape(len(boxes), -1, 2)


def _overlaps(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    """Elements that each box of a has in common with each of b."""
    stop = np.minimum(a[:, None, :, 1], b[None, :, :, 1])
    common: NDArray[np.int64] = np.maximum(0, stop - np.maximum(a[:, None, :, 0], b[None, :, :, 0])).prod(axis=2)
    return common
