"""Variants: an operator cut by certain degrees. A variant knows which region of each operand each tile touches, and how long a tile takes.

A variant knows no devices. Operators that differ only in names (repeated layers) share their variants. Regions are numbered; equal numbers
mean equal regions, and -1 is an empty region.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from soap.cluster.topology import DeviceType, Topology
from soap.model.graph import Operand, Operator, OperatorGraph, TensorKind
from soap.model.micro_batches import MicroBatches
from soap.model.regions import Box, volume
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.plan.row_counts import tile_lookups
from soap.plan.tiling import Tile, pieces_of
from soap.simulator.compiled.graph_arrays import Ints, Longs, device_types
from soap.simulator.compiled.growing import Growing
from soap.simulator.compiled.shards import Geometries, Need
from soap.simulator.compiled.tile_times import WAYS, TileTimes
from soap.simulator.costs import CostModel
from soap.simulator.draws import Draws
from soap.simulator.memory.peaks import away_bytes
from soap.strategy.division import is_divided
from soap.strategy.shares import Shares, weights_of

CELLS, READS, OUTPUTS, COSTS, GROUPS, GROUP_OF, GROUP_FIRST, GROUP_BOXES, GRIDS, GEOMETRIES, LOOKUPS = range(11)
ROW_COSTS, PARTS, AWAY = 11, 12, 13
"""Columns of ``VariantTables.rows``. Except for CELLS and GROUPS they say where values begin, in ``data`` unless stated otherwise.

CELLS: number of tiles of one replica. READS: regions, [activation input, tile]. OUTPUTS: regions, [output, tile]. COSTS: in ``costs``,
[device type, pass (``tile_times``), tile]. GROUPS: number of groups of partial results, 0 if none. GROUP_OF: each tile's group.
GROUP_FIRST: each group's first tile. GROUP_BOXES: regions, [output, group]. GRIDS: pointers to the outputs' grids. GEOMETRIES: the
geometries into which the operator alone would cut its parameters. LOOKUPS: weighed numbers of rows that are looked up, [parameter, tile];
-1 if none are. ROW_COSTS: as COSTS, for tiles that are sparse lookups; equal to COSTS if no rows are looked up. PARTS: number of micro-
batches, whose tiles follow each other. AWAY: in ``away``, by tile."""
COLUMNS = 14


class VariantTables(NamedTuple):
    """``rows``: one per variant. ``costs``: ns of tiles. ``launches``: ns of launching them, in the same places. ``drawn``: ns of tiles
    under each draw, [place in ``costs``, draw]; empty without draws. ``away``: bytes of tiles that offload (``peaks.away_bytes``).
    ``box_ptr``: where a region's (start, stop) per dimension begin in ``bounds``. ``box_volume``: a region's elements.

    A *grid* describes the distinct regions of one output (of tiles, or of sums): rank; whether they are disjoint; their number; for each
    dimension the number of intervals and where these begin; then where the following begin: the map (position per dimension -> region, -1
    if none), the pointers to each region's holders, the holders (tiles or groups of one replica), and the regions' numbers.
    """

    rows: Longs
    data: Ints
    costs: Longs
    launches: Longs
    drawn: Longs
    away: Longs
    box_ptr: Longs
    box_volume: Longs
    bounds: Ints


class Variants:
    """The variants of one graph's operators, made when they are first asked for. ``micro_batches``: how new ones are cut. ``divides``:
    whether their backward passes are in two. ``cuts``: by variant, how it is cut in micro-batches; ``degrees`` and
    ``shares``: in how many parts, and which."""

    def __init__(
        self,
        graph: OperatorGraph,
        topology: Topology,
        costs: CostModel,
        draws: Draws | None = None,
        training: PlannedTraining = PLAIN,
    ) -> None:
        self.graph, self.costs, self.draws = graph, costs, draws
        by_name: dict[str, DeviceType] = {device.type.name: device.type for device in topology.devices}
        self._types = [by_name[name] for name in device_types(topology)]
        classes: dict[Hashable, int] = {}
        self._parameters = {tensor.name: i for i, tensor in enumerate(graph.parameters)}
        self._class_of = [classes.setdefault(_likeness(graph, op, self._parameters), i) for i, op in enumerate(graph.operators)]
        self.geometries = Geometries(graph, topology, self._types, costs, training)
        self._numbers: dict[tuple[int, tuple[int, ...], Shares, int, bool], int] = {}
        self.micro_batches, self.divides = MicroBatches(graph, 1), False
        self.cuts: list[MicroBatches] = []
        self._boxes: dict[Box, int] = {}
        self._known: list[Box] = []
        self._positions: list[int] = []
        self.degrees: list[tuple[int, ...]] = []
        self.shares: list[Shares] = []
        self._rows, self._data, self._costs = Growing(np.int64), Growing(np.int32), Growing(np.int64)
        self._launches, self._drawn, self._away = Growing(np.int64), Growing(np.int64), Growing(np.int64)
        self._box_ptr, self._box_volume, self._bounds = Growing(np.int64), Growing(np.int64), Growing(np.int32)

    def number(self, position: int, degrees: tuple[int, ...], shares: Shares = ()) -> int:
        """The variant of the operator at ``position`` under these degrees and shares."""
        key = (self._class_of[position], degrees, shares, self.micro_batches.count, self.divides)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.degrees)
            self._rows.add(self._make(self._class_of[position], degrees, shares))
        return found

    def durations(self, position: int, degrees: tuple[int, ...], shares: Shares = (), *, sparse_lookup: bool = False) -> Longs:
        """Nanoseconds of the tiles, [device type, forward or backward, tile]. Makes no variant."""
        return self._times(position, *self.cut(position, degrees, shares), sparse_lookup=sparse_lookup).durations[:, : len(WAYS)]

    def split(self, number: int) -> tuple[tuple[int, ...], Shares]:
        """The degrees and shares of a variant."""
        return self.degrees[number], self.shares[number]

    def position(self, number: int) -> int:
        """The position of an operator that has this variant."""
        return self._positions[number]

    def class_of(self, position: int) -> int:
        """The first operator that differs from the one at ``position`` only in names."""
        return self._class_of[position]

    def arrays(self) -> VariantTables:
        """All variants as arrays."""
        return VariantTables(
            rows=self._rows.array().reshape(-1, COLUMNS),
            data=self._data.array(),
            costs=self._costs.array(),
            launches=self._launches.array(),
            drawn=self._drawn.array(),
            away=self._away.array(),
            box_ptr=self._box_ptr.array(),
            box_volume=self._box_volume.array(),
            bounds=self._bounds.array(),
        )

    def _make(self, position: int, degrees: tuple[int, ...], shares: Shares) -> list[int]:
        op = self.graph.operators[position]
        cells, regions = self.cut(position, degrees, shares)
        activations = [o for o in op.inputs if self.graph.tensors[o.tensor].kind is TensorKind.ACTIVATION]
        self._positions.append(position)
        self.degrees.append(degrees)
        self.shares.append(shares)
        self.cuts.append(self.micro_batches)
        row = [0] * COLUMNS
        row[CELLS], row[PARTS] = len(cells), self.micro_batches.parts(position)
        numbers = {o: self._number_boxes(regions[o]) for o in {*activations, *op.outputs}}
        for column, operands in ((READS, activations), (OUTPUTS, op.outputs)):
            row[column] = self._data.add(np.array([numbers[o] for o in operands], np.int32))
        row[COSTS] = row[ROW_COSTS] = self._add_costs(position, cells, regions, sparse_lookup=False)
        if any(o.tensor in self.graph.sparse for o in op.parameters):
            row[ROW_COSTS] = self._add_costs(position, cells, regions, sparse_lookup=True)
        groups = _groups(op, degrees, row[PARTS], self.micro_batches.factors[position])
        holders = np.arange(len(cells))
        outputs = [numbers[o] for o in op.outputs]
        if groups is not None:
            firsts = np.unique(groups, return_index=True)[1]
            row[GROUPS], row[GROUP_OF], row[GROUP_FIRST] = len(firsts), self._data.add(groups), self._data.add(firsts)
            outputs = [own[firsts] for own in outputs]
            row[GROUP_BOXES] = self._data.add(np.array(outputs, np.int32))
            holders = np.arange(len(firsts))
        row[GRIDS] = self._data.add([self._grid(own, holders) for own in outputs])
        shards = [self.geometries.add(name, [position], self._needs(position, name, cells)) for name in self._parameters_of(op)]
        row[GEOMETRIES] = self._data.add(shards)
        row[LOOKUPS] = self._lookups(position, cells, regions)
        own = (_tile(op, position, index, cells, regions) for index in range(len(cells)))
        row[AWAY] = self._away.add([away_bytes(self.graph, tile) for tile in own])
        return row

    def _lookups(self, position: int, cells: np.ndarray, regions: dict[Operand, np.ndarray]) -> int:
        """Store the numbers of rows that tiles look up; returns where they begin, -1 if no operand is sparse."""
        op, sparse = self.graph.operators[position], self.graph.sparse
        names = self._parameters_of(op)
        if not any(name in sparse for name in names):
            return -1
        tiles = [_tile(op, position, index, cells, regions) for index in range(len(cells))]
        count = lambda name, tile: tile_lookups(self.graph, name, tile, weighed=True) if name in sparse else 0  # noqa: E731
        return self._data.add([count(name, tile) for name in names for tile in tiles])

    def cut(
        self, position: int, degrees: tuple[int, ...], shares: Shares = (), micro_batches: MicroBatches | None = None
    ) -> tuple[np.ndarray, dict[Operand, np.ndarray]]:
        """(the tiles' intervals, [tile, factor, start or stop]; operand -> its regions, [tile, dimension, start or stop]).
        ``micro_batches``: the present ones if None."""
        op = self.graph.operators[position]
        parts = pieces_of(self.graph, position, weights_of(degrees, shares), micro_batches or self.micro_batches)
        found = [cell for pieces in parts for cell in product(*pieces)]
        cells = np.array(found, np.int64).reshape(len(found), len(op.factors), 2)
        return cells, {o: self._regions(o, cells) for o in {*op.inputs, *op.parameters, *op.outputs}}

    def tie(self, key: tuple[int, ...]) -> None:
        """Make the geometry of a parameter that several operators use. ``key``: the parameter's number, then its users' cuts."""
        name = self.graph.parameters[key[0]].name
        self.geometries.tie(key, name, sorted({position for position, _ in self.graph.parameter_users[name]}))

    def _parameters_of(self, op: Operator) -> list[str]:
        """Names of an operator's parameters, each once, in the order of the graph's parameters."""
        return sorted({o.tensor for o in op.parameters}, key=self._parameters.__getitem__)

    def _needs(self, position: int, name: str, cells: np.ndarray) -> list[Need]:
        own = [o for o in self.graph.operators[position].parameters if o.tensor == name]
        return [(0, tile, _as_box(box)) for o in own for tile, box in enumerate(self._regions(o, cells))]

    def _regions(self, operand: Operand, cells: np.ndarray) -> np.ndarray:
        """An operand's regions, [tile, dimension, start or stop]: ``Operand.box`` for each tile."""
        shape = self.graph.tensors[operand.tensor].shape
        found = np.zeros((len(cells), len(shape), 2), np.int64)
        for i, (dim, size) in enumerate(zip(operand.dims, shape, strict=True)):
            if dim.factor is None:
                found[:, i] = dim.interval((), size)
                continue
            start = np.clip(cells[:, dim.factor, 0] * dim.scale + dim.lo, 0, size)
            stop = np.minimum((cells[:, dim.factor, 1] - 1) * dim.scale + dim.hi, size)
            found[:, i, 0], found[:, i, 1] = start, np.maximum(start, stop)
        return found

    def _number_boxes(self, regions: np.ndarray) -> Ints:
        """[tile]: the number of its region."""
        flat = regions.reshape(len(regions), -1)
        distinct, place = np.unique(flat, axis=0, return_inverse=True) if flat.shape[1] else (flat[:1], np.zeros(len(flat), np.int64))
        known = np.array([self._box(tuple(zip(row[::2], row[1::2], strict=True))) for row in distinct.tolist()], np.int32)
        return known[place.ravel()]

    def _box(self, box: Box) -> int:
        if volume(box) == 0:
            return -1
        found = self._boxes.get(box)
        if found is None:
            found = self._boxes[box] = len(self._known)
            self._known.append(box)
            self._box_ptr.add([self._bounds.add([edge for interval in box for edge in interval])])
            self._box_volume.add([volume(box)])
        return found

    def _add_costs(self, position: int, cells: np.ndarray, regions: dict[Operand, np.ndarray], *, sparse_lookup: bool) -> int:
        """Store how long tiles and their launches take; returns where both begin."""
        times = self._times(position, cells, regions, sparse_lookup=sparse_lookup)
        self._launches.add(times.launches)
        if self.draws is not None:
            self._drawn.add(times.drawn(self.draws))
        return self._costs.add(times.durations)

    def _times(self, position: int, cells: np.ndarray, regions: dict[Operand, np.ndarray], *, sparse_lookup: bool) -> TileTimes:
        """Tiles whose regions have equal shapes take equal times, so the cost model is asked once for them."""
        op = self.graph.operators[position]
        parts = [cells, *(regions[o] for o in (*op.inputs, *op.parameters, *op.outputs))]
        shapes = np.concatenate([np.diff(part, axis=2).reshape(len(cells), -1) for part in parts], axis=1)
        _, firsts, place = np.unique(shapes, axis=0, return_index=True, return_inverse=True)
        tiles = [replace(_tile(op, position, int(i), cells, regions), sparse_lookup=sparse_lookup) for i in firsts]
        divided = self.divides and is_divided(self.graph, op)
        return TileTimes(self.graph, self.costs, self._types, tiles, place.ravel(), divided=divided)

    def _grid(self, boxes: Ints, holders: np.ndarray) -> int:
        """Store the grid of an output's distinct regions; returns where it begins."""
        distinct = np.unique(boxes[boxes >= 0])
        known = [self._known[b] for b in distinct]
        rank = len(known[0]) if known else 0
        edges = np.array(known, np.int64).reshape(len(distinct), rank, 2)
        header, places, disjoint = list[int](), np.zeros((len(distinct), rank), np.int64), True
        sizes = []
        for dim in range(rank):
            intervals, place = np.unique(edges[:, dim], axis=0, return_inverse=True)
            places[:, dim] = place.ravel()
            disjoint &= bool(np.all(intervals[:-1, 1] <= intervals[1:, 0]))
            sizes.append(len(intervals))
            header += [len(intervals), self._data.add(intervals)]
        held = np.full(int(np.prod(sizes, initial=1)), -1, np.int32)
        if len(distinct):
            held[np.ravel_multi_index(tuple(places.T), sizes) if rank else [0]] = np.arange(len(distinct))
        own = [holders[boxes == box] for box in distinct]
        tail = [self._data.add(held), self._data.add(np.cumsum([0, *map(len, own)]))]
        tail += [self._data.add(np.concatenate(own) if own else []), self._data.add(distinct)]
        return self._data.add([rank, int(disjoint), len(distinct), *header, *tail])


def _groups(op: Operator, degrees: tuple[int, ...], parts: int, cut: int | None) -> Ints | None:
    """[tile]: the group whose sum its partial results belong to, numbered in the order of first tiles; None if nothing is summed.
    ``parts``: number of micro-batches. ``cut``: the factor along which these are cut."""
    summed = [1 + i for i in op.summed] + [0] * (cut in op.summed)
    grid = (parts, *degrees)
    if all(grid[i] == 1 for i in summed):
        return None
    kept = [degree if i not in summed else 1 for i, degree in enumerate(grid)]
    places = np.array(np.unravel_index(np.arange(prod(grid)), grid))
    places[summed] = 0
    numbers: Ints = np.ravel_multi_index(tuple(places), kept).astype(np.int32)
    return numbers


def _tile(op: Operator, position: int, index: int, cells: np.ndarray, regions: dict[Operand, np.ndarray]) -> Tile:
    intervals = _as_box(cells[index])
    inputs, parameters, outputs = (tuple(_as_box(regions[o][index]) for o in own) for own in (op.inputs, op.parameters, op.outputs))
    return Tile(position, index, 0, 0, intervals, inputs, parameters, outputs)


def _as_box(table: np.ndarray) -> Box:
    return tuple((int(start), int(stop)) for start, stop in table.tolist())


def _likeness(graph: OperatorGraph, op: Operator, numbers: Mapping[str, int]) -> Hashable:
    """A value that is equal for operators that differ only in names."""
    operands = [
        [(o.dims, t.shape, t.dtype, t.itemsize, t.kind, t.requires_grad) for o in own for t in (graph.tensors[o.tensor],)]
        for own in (op.inputs, op.parameters, op.outputs)
    ]
    same = [[own.index(o) for o in own] for own in (op.inputs, op.parameters)]  # an operand that is there twice
    order = sorted(range(len(op.parameters)), key=lambda k: numbers[op.parameters[k].tensor])
    alone = [len({user for user, _ in graph.parameter_users[o.tensor]}) == 1 for o in op.parameters]
    backward = graph.needs_backward(op)
    position = graph.index[op.name]
    lookups = (own for o in op.parameters if o.tensor in graph.sparse for own in graph.sparse[o.tensor].lookups)
    rows = [(own.parameter, own.indices, own.weighed) for own in lookups if own.operator == position]
    touched = [(graph.sparse[o.tensor].weighed, graph.sparse[o.tensor].touched) for o in op.parameters if o.tensor in graph.sparse]
    kept = graph.footprints.get(op.name), graph.part_footprints.get(op.name)
    calls = len(op.calls), op.views
    figures = (kept, op.flops, op.saved_bytes, calls, op.partitionable, op.arithmetic, op.skipped_share, op.fused_bytes, op.drawn)
    return repr((backward, rows, touched, order, alone, op.kind, op.factors, operands, same, figures))
