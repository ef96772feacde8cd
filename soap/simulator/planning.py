"""From a strategy to a plan: which tile runs where, what travels, what is summed, who keeps which shard. No costs, no torch.

Everything that depends on one operator's configuration alone (an ``OperatorPart``) or on the configurations of one parameter's
users is computed once and kept, with positions counted from the operator's first tile; building a plan then is
mostly adding offsets. A search should therefore keep one ``PlanBuilder`` for its graph and cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod

from soap.graph import OperatorGraph, TensorKind
from soap.regions import Box, cells, contains, subtract, volume, whole
from soap.simulator.coverage import HolderIndex
from soap.simulator.plan import Fetch, Holding, Piece, Plan, Reduction, Shard
from soap.simulator.tiling import Tile, tiles_of
from soap.strategy import OpConfig, Strategy
from soap.topology import Topology

Use = tuple[int, int]
"""(tile, operand position)."""
Read = tuple[str, Box, int, tuple[Use, ...]]
"""A region of an activation that tiles of one operator need on one device: (tensor, box, device, its readers)."""
Cell = tuple[Box, tuple[int, ...], tuple[tuple[int, int, int], ...]]
"""A shard before positions are known: (box, devices, uses as (operator, tile, parameter position))."""


@dataclass(frozen=True)
class OperatorPart:
    """What one operator under one configuration brings into a plan; tiles, holdings and reductions count from its own first."""

    tiles: tuple[Tile, ...]
    reductions: tuple[Reduction, ...]
    holdings: tuple[Holding, ...]
    holders: Mapping[str, HolderIndex]
    reads: tuple[Read, ...]


class PlanBuilder:
    """Builds plans for one graph on one cluster, keeping what consecutive strategies have in common."""

    def __init__(self, graph: OperatorGraph, topology: Topology) -> None:
        self.graph = graph
        self.topology = topology
        size = max(1024, 8 * len(graph.operators))
        self._part = lru_cache(size)(self._make_part)
        self._cells = lru_cache(size)(self._make_cells)
        self._distances = lru_cache(None)(self._make_distances)

    def __reduce__(self) -> tuple[object, ...]:
        return (PlanBuilder, (self.graph, self.topology))  # another process starts with empty caches

    def build(self, strategy: Strategy, *, empty_tiles: bool = False) -> Plan:
        """The plan of a strategy; raises StrategyError if it does not fit the graph or the cluster (``empty_tiles``: see there)."""
        strategy.validate(self.graph, self.topology.device_count, empty_tiles=empty_tiles)
        configs = [strategy.operators[op.name] for op in self.graph.operators]
        parts = [self._part(position, config) for position, config in enumerate(configs)]
        first_tile = _offsets([len(part.tiles) for part in parts])
        first_holding = _offsets([len(part.holdings) for part in parts])
        first_reduction = _offsets([len(part.reductions) for part in parts])
        return Plan(
            graph=self.graph,
            device_count=self.topology.device_count,
            tiles=tuple(tile for part in parts for tile in part.tiles),
            first_tile=first_tile,
            holdings=tuple(
                holding
                for part, tile, reduction in zip(parts, first_tile, first_reduction, strict=True)
                for holding in _shifted_holdings(part, tile, reduction)
            ),
            fetches=tuple(self._fetches(parts, first_tile, first_holding)),
            reductions=tuple(
                Reduction(r.operator, r.output, r.replica, r.box, tuple(first + t for t in r.tiles), r.devices)
                for part, first in zip(parts, first_tile, strict=True)
                for r in part.reductions
            ),
            shards=tuple(self._shards(configs, first_tile)),
        )

    def _make_part(self, position: int, config: OpConfig) -> OperatorPart:
        tiles = tuple(tiles_of(self.graph, position, config))
        reductions = tuple(_reductions(self.graph, position, config, tiles))
        holdings = tuple(_holdings(self.graph, position, tiles, reductions))
        places: dict[str, list[int]] = {out.tensor: [] for out in self.graph.operators[position].outputs}
        for place, holding in enumerate(holdings):
            places[holding.tensor].append(place)
        holders = {tensor: HolderIndex(tensor, own, holdings) for tensor, own in places.items()}
        return OperatorPart(tiles, reductions, holdings, holders, _reads(self.graph, position, tiles))

    def _make_distances(self, device: int) -> tuple[int, ...]:
        return tuple(self.topology.distance(source, device) for source in range(self.topology.device_count))

    def _fetches(self, parts: Sequence[OperatorPart], first_tile: Sequence[int], first_holding: Sequence[int]) -> Iterator[Fetch]:
        for (tensor, box, device), consumers in self._gather_reads(parts, first_tile):
            producer, _ = self.graph.producers[tensor]
            cover = parts[producer].holders[tensor].cover(box, device, self._distances(device))
            first = first_holding[producer]
            yield Fetch(tensor, box, device, tuple([Piece(part, first + holding) for part, holding in cover]), tuple(consumers))

    def _gather_reads(self, parts: Sequence[OperatorPart], first_tile: Sequence[int]) -> list[tuple[tuple[str, Box, int], list[Use]]]:
        """Distinct (tensor, box, device) in the order of their first readers; operators that read the same are joined."""
        gathered: list[tuple[tuple[str, Box, int], list[Use]]] = []
        shared: dict[tuple[str, Box, int], list[Use]] = {}
        for part, first in zip(parts, first_tile, strict=True):
            for tensor, box, device, uses in part.reads:
                key = (tensor, box, device)
                consumers = [(first + tile, place) for tile, place in uses]
                if len(self.graph.consumers[tensor]) > 1:
                    if key in shared:
                        shared[key] += consumers
                        continue
                    shared[key] = consumers
                gathered.append((key, consumers))
        return gathered

    def _shards(self, configs: Sequence[OpConfig], first_tile: Sequence[int]) -> Iterator[Shard]:
        users = self.graph.parameter_users
        for tensor in self.graph.parameters:
            operators = sorted({position for position, _ in users.get(tensor.name, ())})
            parameter_cells = self._cells(tensor.name, tuple((position, configs[position]) for position in operators))
            for index, (box, devices, uses) in enumerate(parameter_cells):
                places = tuple((first_tile[operator] + tile, place) for operator, tile, place in uses)
                yield Shard(tensor.name, index, box, devices, places, tensor.requires_grad)

    def _make_cells(self, parameter: str, configs: tuple[tuple[int, OpConfig], ...]) -> tuple[Cell, ...]:
        """Cut a parameter along all regions that the tiles of these operators need of it."""
        needed: dict[Box, list[tuple[int, int, int, int]]] = {}
        for position, config in configs:
            places = [k for k, operand in enumerate(self.graph.operators[position].parameters) if operand.tensor == parameter]
            for tile in self._part(position, config).tiles:
                for place in places:
                    if volume(tile.parameters[place]) > 0:
                        needed.setdefault(tile.parameters[place], []).append((position, tile.index, place, tile.device))
        result: list[Cell] = []
        grid = cells(needed)
        disjoint = set(grid) == needed.keys()
        for cell in grid:
            users = needed[cell] if disjoint else [use for box, uses in needed.items() if contains(box, cell) for use in uses]
            devices = tuple(sorted({device for *_, device in users}))
            result.append((cell, devices, tuple(sorted((position, tile, place) for position, tile, place, _ in users))))
        if result and self.graph.tensors[parameter].requires_grad:
            result += [(box, result[0][1][:1], ()) for box in _unread(whole(self.graph.tensors[parameter].shape), grid)]
        return tuple(result)


def _unread(box: Box, read: Sequence[Box]) -> list[Box]:
    """What no tile reads of a parameter. One process would keep it with a gradient of zero, and weight decay would change it."""
    rest = [box]
    for cell in read:
        rest = [piece for part in rest for piece in subtract(part, cell)]
    return rest


def build_plan(graph: OperatorGraph, strategy: Strategy, topology: Topology) -> Plan:
    """The plan of one strategy. For many strategies of one graph, keep a ``PlanBuilder``."""
    return PlanBuilder(graph, topology).build(strategy)


def _offsets(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(counts, initial=0))[:-1]


def _reductions(graph: OperatorGraph, position: int, config: OpConfig, tiles: Sequence[Tile]) -> Iterator[Reduction]:
    """The groups of partial results, if a summed factor is split. Outputs are not indexed by summed factors, so boxes agree."""
    op = graph.operators[position]
    summed = set(op.summed)
    if prod(config.degrees[i] for i in summed) <= 1:
        return
    groups: dict[tuple[object, ...], list[Tile]] = {}
    for tile in tiles:
        kept = tuple(interval for i, interval in enumerate(tile.intervals) if i not in summed)
        groups.setdefault((tile.replica, kept), []).append(tile)
    for output in range(len(op.outputs)):
        for group in groups.values():
            box = group[0].outputs[output]
            if volume(box) > 0:
                devices = tuple(sorted({tile.device for tile in group}))
                yield Reduction(position, output, group[0].replica, box, tuple(tile.index for tile in group), devices)


def _holdings(graph: OperatorGraph, position: int, tiles: Sequence[Tile], reductions: Sequence[Reduction]) -> Iterator[Holding]:
    """What lies where once the operator has run: its tiles' outputs, or the sums on every device of their groups."""
    outputs = graph.operators[position].outputs
    reduced = {reduction.output for reduction in reductions}
    for place, reduction in enumerate(reductions):
        first: dict[int, int] = {}
        for index in reduction.tiles:
            first.setdefault(tiles[index].device, index)
        for device in reduction.devices:
            yield Holding(outputs[reduction.output].tensor, reduction.box, device, first[device], place)
    for output, operand in enumerate(outputs):
        for tile in tiles if output not in reduced else ():
            if volume(tile.outputs[output]) > 0:
                yield Holding(operand.tensor, tile.outputs[output], tile.device, tile.index)


def _reads(graph: OperatorGraph, position: int, tiles: Sequence[Tile]) -> tuple[Read, ...]:
    """Regions of activations that the operator needs, each once per device, in the order of their first readers."""
    operands = graph.operators[position].inputs
    activations = [(k, operand.tensor) for k, operand in enumerate(operands) if graph.tensors[operand.tensor].kind is TensorKind.ACTIVATION]
    readers: dict[tuple[str, Box, int], list[Use]] = {}
    for tile in tiles:
        for k, tensor in activations:
            if volume(tile.inputs[k]) > 0:
                readers.setdefault((tensor, tile.inputs[k], tile.device), []).append((tile.index, k))
    return tuple((*key, tuple(uses)) for key, uses in readers.items())


def _shifted_holdings(part: OperatorPart, first_tile: int, first_reduction: int) -> Iterator[Holding]:
    for h in part.holdings:
        reduction = None if h.reduction is None else first_reduction + h.reduction
        yield Holding(h.tensor, h.box, h.device, first_tile + h.tile, reduction)
