"""What the configurations of a small space mean: the tiles of each one, and what goes between those of two. Every configuration of
every operator is laid out once, so that bounds for many strategies (``partial``) only look things up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

from soap.cluster.topology import Topology
from soap.model.graph import Operand
from soap.model.regions import Box, intersect, volume
from soap.plan.tiling import Tile, tiles_of
from soap.search.oracles.bounds import always_covered, always_touched, certain_gradients, is_partitioned
from soap.search.space import Space
from soap.simulator.communication.prices import Communication
from soap.simulator.costs import CostModel
from soap.simulator.cut_operators import CutOperators
from soap.strategy.config import OpConfig


@dataclass(slots=True)
class Holding:
    """Tiles of one replica that have one part of the outputs; or that together have a sum for it, which takes at least ``sum_ns``."""

    part: int
    tiles: list[int]
    devices: list[int]
    sum_ns: int = 0


@dataclass(slots=True)
class Choice:
    """One configuration of an operator. ``devices``, ``forward``, ``backward`` (nanoseconds): by tile. ``boxes``: by part of the
    outputs and output. ``held``: by part, the holdings that have it. ``regions``: by parameter and tile, the tile's region of it.
    ``updates``: by parameter and device, the least nanoseconds of the updates of these regions."""

    config: OpConfig
    devices: list[int]
    forward: list[int]
    backward: list[int]
    reads: list[tuple[Box, ...]]
    boxes: list[list[Box]]
    held: list[list[Holding]]
    regions: dict[str, list[Box]]
    updates: dict[str, list[int]]

    @property
    def whole(self) -> bool:
        """Whether each replica is one tile."""
        return len(self.devices) == self.config.replicas

    @property
    def update_ns(self) -> list[int]:
        """By tile: time of the updates on its device that this operator causes; 0 if the tile has an empty part of a parameter."""
        sure = [all(volume(regions[t]) for regions in self.regions.values()) for t in range(len(self.devices))]
        return [sum(own[d] for own in self.updates.values()) if all_there else 0 for d, all_there in zip(self.devices, sure, strict=True)]


@dataclass(frozen=True, slots=True)
class Edge:
    """An operand that another operator makes. ``partitioned``: no two parts of the producer's outputs share an element of it.
    ``covered``: the reader's tiles have all of it. ``touched``: each of them has some of it. ``gradient``: whether a gradient goes
    back."""

    producer: int
    output: int
    operand: int
    itemsize: int
    gradient: bool
    partitioned: bool
    covered: bool
    touched: bool


class Flow(NamedTuple):
    """Tile ``tile`` reads ``part``. ``ahead_ns`` and ``back_ns``: least time of a message if the part comes from another device, and of
    its gradient's way back; otherwise -1."""

    tile: int
    part: int
    ahead_ns: int
    back_ns: int


class Choices:
    """All configurations of a space on one cluster."""

    def __init__(self, space: Space, topology: Topology, costs: CostModel) -> None:
        self.space, self.graph, self.topology, self.costs = space, space.graph, topology, costs
        self.certain = certain_gradients(self.graph)
        self._communication = Communication(topology)
        self._cuts = CutOperators(self.graph, topology, costs)
        self._flows: dict[tuple[int, int, int, int], list[Flow]] = {}
        self._sums: dict[tuple[int, tuple[int, ...]], int] = {}
        positions = range(len(self.graph.operators))
        self.edges = [list(self._edges_of(position)) for position in positions]
        self.readers: list[list[tuple[int, int]]] = [[] for _ in positions]
        """By operator: its readers, each with the number of its edge."""
        for reader, edges in enumerate(self.edges):
            for number, edge in enumerate(edges):
                self.readers[edge.producer].append((reader, number))
        self.of = [[self._choice(i, config) for config in own.structured()] for i, own in enumerate(space.operators)]

    @cached_property
    def loss(self) -> int | None:
        """The operator that makes the loss."""
        return self.graph.producers[self.graph.loss][0] if self.graph.loss in self.graph.producers else None

    @cached_property
    def same_regions(self) -> set[str]:
        """Parameters of which any two regions are equal or share no element, whatever is chosen."""
        same = set()
        for name, users in self.graph.parameter_users.items():
            choices = [own for user in {user for user, _ in users} for own in self.of[user]]
            if all(name in own.regions for own in choices):
                regions = {box for own in choices for box in own.regions[name] if volume(box)}
                if len(regions) == 1 or len({user for user, _ in users}) == 1:
                    same.add(name)
        return same

    def flows(self, reader: int, number: int, before: int, choice: int) -> list[Flow]:
        """Which tile reads which part on an edge, if the producer and the reader have these choices."""
        key = (reader, number, before, choice)
        found = self._flows.get(key)
        if found is None:
            edge = self.edges[reader][number]
            found = self._flows[key] = list(self._find_flows(edge, self.of[edge.producer][before], self.of[reader][choice]))
        return found

    def sum_ns(self, size: int, devices: tuple[int, ...]) -> int:
        """The least time to sum so many bytes of gradients over these devices, and perhaps others."""
        key = (size, devices)
        if key not in self._sums:
            others = [d for d in range(self.topology.device_count) if d not in devices]
            groups = (devices + more for count in range(len(others) + 1) for more in combinations(others, count))
            self._sums[key] = min(self._communication.allreduce(size, tuple(sorted(group)))[0] for group in groups)
        return self._sums[key]

    def _edges_of(self, position: int) -> Iterator[Edge]:
        for number, operand in enumerate(self.graph.operators[position].inputs):
            if operand.tensor in self.graph.producers:
                producer, output = self.graph.producers[operand.tensor]
                tensor, out = self.graph.tensors[operand.tensor], self.graph.operators[producer].outputs[output]
                partitioned = is_partitioned(self.graph, producer, out)
                covered, touched = (test(self.graph, position, operand) for test in (always_covered, always_touched))
                yield Edge(producer, output, number, tensor.itemsize, tensor.requires_grad, partitioned, covered, touched)

    def _choice(self, position: int, config: OpConfig) -> Choice:
        op, tiles = self.graph.operators[position], tiles_of(self.graph, position, config)
        devices = [tile.device for tile in tiles]
        table = self._cuts.durations(position, config.degrees, config.shares)
        cells = len(tiles) // config.replicas
        forward, backward = (
            [int(table[self._cuts.type_of[d], way, t % cells]) for t, d in enumerate(devices)] for way in (0, 1)
        )
        if not self.graph.needs_backward(op):
            backward = [0] * len(tiles)
        parts: dict[tuple[tuple[int, int], ...], int] = {}
        boxes: list[list[Box]] = []
        held: list[dict[int, Holding]] = []
        for t, tile in enumerate(tiles):
            kept = tuple(own for own, factor in zip(tile.intervals, op.factors, strict=True) if not factor.summed)
            part = parts.setdefault(kept, len(parts))
            if part == len(boxes):
                boxes.append(list(tile.outputs))
                held.append({})
            holding = held[part].setdefault(tile.replica, Holding(part, [], []))
            holding.tiles.append(t)
            if tile.device not in holding.devices:
                holding.devices.append(tile.device)
        for own in held:
            for holding in own.values():
                if len(holding.devices) > 1:
                    outputs = zip(op.outputs, boxes[holding.part], strict=True)
                    size = min(volume(box) * self.graph.tensors[o.tensor].itemsize for o, box in outputs)
                    holding.sum_ns = self._least_sum_ns(size, holding.devices)
        regions, updates = self._parameters(position, tiles)
        reads = [tile.inputs for tile in tiles]
        return Choice(config, devices, forward, backward, reads, boxes, [list(own.values()) for own in held], regions, updates)

    def _parameters(self, position: int, tiles: list[Tile]) -> tuple[dict[str, list[Box]], dict[str, list[int]]]:
        """Regions of parameters that are updated, by tile, and how long that takes by device. Regions without a clean cut are left out."""
        op = self.graph.operators[position]
        regions: dict[str, list[Box]] = {}
        updates: dict[str, list[int]] = {}
        for k, operand in enumerate(op.parameters):
            tensor = self.graph.tensors[operand.tensor]
            once = sum(other.tensor == operand.tensor for other in op.parameters) == 1
            if tensor.requires_grad and once and _cut_cleanly(operand):
                regions[operand.tensor] = [tile.parameters[k] for tile in tiles]
                spent = updates[operand.tensor] = [0] * self.topology.device_count
                for box, device in {(tile.parameters[k], tile.device) for tile in tiles if volume(tile.parameters[k])}:
                    spent[device] += self.costs.update_ns(volume(box) * tensor.itemsize, self.topology.devices[device].type)
        return regions, updates

    def _find_flows(self, edge: Edge, source: Choice, own: Choice) -> Iterator[Flow]:
        held = [[d for holding in holdings for d in holding.devices] for holdings in source.held]
        for tile, device in enumerate(own.devices):
            region = own.reads[tile][edge.operand]
            for part, boxes in enumerate(source.boxes):
                common = intersect(region, boxes[edge.output])
                if common is None:
                    continue
                size = edge.itemsize * volume(common)
                if device in held[part]:
                    yield Flow(tile, part, -1, -1)
                else:
                    yield Flow(tile, part, self._message_ns(size, held[part], [device]), self._message_ns(size, [device], held[part]))

    def _least_sum_ns(self, size: int, devices: Sequence[int]) -> int:
        """The least time to sum partial results: each device gets a message with its share, or all get all of it at once, which between
        GPUs may have less latency than a message."""
        share = -(-size // len(devices))
        scattered = min(self._message_ns(share, (device,), devices) for device in devices)
        return min(scattered, self._communication.allreduce(size, tuple(sorted(devices)))[0])

    def _message_ns(self, size: int, sources: Sequence[int], targets: Sequence[int]) -> int:
        """The least time of a message from one of these devices to one of those. Collectives and joint messages are not quicker."""
        pairs = ((a, b) for a in sources for b in targets if a != b)
        return min(self._communication.transfer_ns(size, a, b) for a, b in pairs) - 1  # rounding


def _cut_cleanly(operand: Operand) -> bool:
    """Whether any two tiles have either the same part of a parameter, or parts without common elements."""
    return all(dim.exact or (dim.factor is None and dim.scale != 0) for dim in operand.dims)
