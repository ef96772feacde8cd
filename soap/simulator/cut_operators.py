"""Operators cut by certain degrees: which region of each operand each tile touches, and how long a tile takes. Worked out once for all
engines of a graph (``shared``), which number what is here by themselves (``compiled.variants``).

A cut operator knows no devices. Operators that differ only in names (repeated layers) share it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

import numpy as np

from soap.cluster.topology import DeviceType, Topology
from soap.model.batch import MicroBatches
from soap.model.graph import DimMap, Operand, Operator, OperatorGraph, TensorKind
from soap.model.likeness import alike_operators
from soap.model.regions import Box, volume
from soap.plan.row_counts import tile_lookups
from soap.plan.tiling import Tile, pieces_of, windows
from soap.simulator.compiled.graph_arrays import Ints, Longs, device_types
from soap.simulator.compiled.tile_times import WAYS, TileTimes
from soap.simulator.costs import CostModel
from soap.simulator.cut_parameters import CutParameter, Need, cut_parameter
from soap.simulator.memory.sizes import away_bytes
from soap.strategy.shares import Shares, weights_of

Regions = Mapping[Operand, Longs]
"""Operand -> its regions, [tile, dimension, start or stop]."""

NOWHERE = -1
"""In place of a number of ``CutOperator.boxes``: an empty region."""


class Groups(NamedTuple):
    """Groups of tiles whose partial results are summed, numbered in the order of their first tiles. ``of``: [tile]; ``first``: [group]."""

    of: Ints
    first: Ints


class Grid(NamedTuple):
    """The distinct regions of one output (of tiles, or of sums), and who holds them.

    ``disjoint``: whether they are. ``intervals``: by dimension, (start, stop) one after the other, ascending. ``held``: position per
    dimension -> region, -1 if none. ``ptr``: pointers to each region's ``holders`` (tiles or groups of one replica). ``distinct``: the
    regions, by their numbers in ``CutOperator.boxes``."""

    disjoint: bool
    intervals: tuple[Ints, ...]
    held: Ints
    ptr: Ints
    holders: Ints
    distinct: Ints


@dataclass(frozen=True, slots=True, eq=False)
class CutOperator:
    """An operator under certain degrees and shares. ``position``: of one that is cut so; others may differ in names. ``tiles``: of one
    replica, those of each micro-batch one after the other. ``boxes``: the distinct regions of its activations; numbers below are places
    there, or ``NOWHERE``. ``reads``: [activation input, tile]. ``outputs``: [output, tile]. ``groups``: None if nothing is summed.
    ``grids``: by output, of the groups if there are any. ``parameters``: by parameter, in the order of the graph's, as if nobody else used
    it. ``lookups``: weighed numbers of rows that are looked up, [parameter, tile]; None if none are. ``row_times``: of sparse lookups.
    ``away``: bytes of tiles that offload (``sizes.away_bytes``)."""

    position: int
    degrees: tuple[int, ...]
    shares: Shares
    micro_batches: MicroBatches
    tiles: int
    boxes: tuple[Box, ...]
    reads: Ints
    outputs: Ints
    groups: Groups | None
    grids: tuple[Grid, ...]
    parameters: tuple[CutParameter, ...]
    lookups: Longs | None
    times: TileTimes
    row_times: TileTimes | None
    away: Longs

    @property
    def parts(self) -> int:
        """Number of micro-batches, whose tiles follow each other."""
        return self.micro_batches.parts(self.position)


class CutOperators:
    """The operators of one graph, cut in whatever way was asked for. Threads may ask at the same time."""

    def __init__(self, graph: OperatorGraph, topology: Topology, costs: CostModel) -> None:
        self.graph, self.costs = graph, costs
        by_name: dict[str, DeviceType] = {device.type.name: device.type for device in topology.devices}
        names = device_types(topology)
        self.types = tuple(by_name[name] for name in names)
        self.type_of = tuple(names.index(device.type.name) for device in topology.devices)
        """Device -> position of its type."""
        self._parameters = {tensor.name: i for i, tensor in enumerate(graph.parameters)}
        self._class_of = alike_operators(graph)
        self._whole = MicroBatches(graph, 1)
        self._made: dict[Hashable, CutOperator] = {}
        self._timed: dict[Hashable, TileTimes] = {}
        self._tied: dict[Hashable, CutParameter] = {}
        self._updates_ns: dict[int, tuple[int, ...]] = {}
        self._last: tuple[Hashable, tuple[Longs, dict[Operand, Longs]]] | None = None

    def class_of(self, position: int) -> int:
        """The first operator that differs from the one at ``position`` only in names."""
        return self._class_of[position]

    def key(self, position: int, degrees: tuple[int, ...], shares: Shares, micro_batches: MicroBatches, divided: bool) -> Hashable:
        """Equal for what is cut alike."""
        return self._class_of[position], degrees, shares, micro_batches.count, divided

    def cut(
        self, position: int, degrees: tuple[int, ...], shares: Shares, micro_batches: MicroBatches, divided: bool
    ) -> CutOperator:
        """An operator under these degrees and shares, in micro-batches. ``divided``: whether its backward pass is in two."""
        key = self.key(position, degrees, shares, micro_batches, divided)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._make(self._class_of[position], degrees, shares, micro_batches, divided)
        return found

    def tied(self, name: str, grids: tuple[tuple[Box, ...], ...]) -> CutParameter:
        """A parameter that several operators use. ``grids``: of each, in the order of their positions, the grid by which it alone would
        cut the parameter."""
        found = self._tied.get((name, grids))
        if found is None:
            users = sorted({position for position, _ in self.graph.parameter_users[name]})
            needs = [(user, place, box) for user, own in enumerate(grids) for place, box in enumerate(own)]
            found = self._tied[name, grids] = self._cut_parameter(name, users, needs)
        return found

    def durations(self, position: int, degrees: tuple[int, ...], shares: Shares = (), *, sparse_lookup: bool = False) -> Longs:
        """Nanoseconds of the tiles, [device type, forward or backward, tile of one replica], of one micro-batch. ``sparse_lookup``: whether
        its sparse parameters are synchronized by rows instead of all-reduced."""
        same = self._class_of[position]
        times = self._times(same, degrees, shares, self._whole, False, sparse_lookup, None)
        return times.durations[:, : len(WAYS)]

    def regions(
        self, position: int, degrees: tuple[int, ...], shares: Shares = (), micro_batches: MicroBatches | None = None
    ) -> tuple[Longs, dict[Operand, Longs]]:
        """(the tiles' intervals, [tile, factor, start or stop]; ``Regions`` of all operands). ``micro_batches``: a single one if None."""
        op, cut = self.graph.operators[position], micro_batches or self._whole
        key, last = (position, degrees, shares, cut.count), self._last
        if last is not None and last[0] == key:
            return last[1]
        parts = pieces_of(self.graph, position, weights_of(degrees, shares), cut)
        found = [cell for pieces in parts for cell in product(*pieces)]
        cells = np.array(found, np.int64).reshape(len(found), len(op.factors), 2)
        known: dict[tuple[DimMap, int], tuple[Longs, Longs] | tuple[int, int]] = {}
        made = cells, {o: self._regions(o, cells, known) for o in {*op.inputs, *op.parameters, *op.outputs}}
        self._last = key, made
        return made

    def _regions(
        self, operand: Operand, cells: Longs, known: dict[tuple[DimMap, int], tuple[Longs, Longs] | tuple[int, int]]
    ) -> Longs:
        """An operand's regions, [tile, dimension, start or stop]: ``Operand.box`` for each tile. ``known``: by dimension and its size, what
        other operands have."""
        shape = self.graph.tensors[operand.tensor].shape
        found = np.zeros((len(cells), len(shape), 2), np.int64)
        for i, key in enumerate(zip(operand.dims, shape, strict=True)):
            if key not in known:
                known[key] = _edges(*key, cells)
            found[:, i, 0], found[:, i, 1] = known[key]
        return found

    def _make(
        self, position: int, degrees: tuple[int, ...], shares: Shares, micro_batches: MicroBatches, divided: bool
    ) -> CutOperator:
        op, graph = self.graph.operators[position], self.graph
        cut = self.regions(position, degrees, shares, micro_batches)
        cells, regions = cut
        inputs = [o for o in op.inputs if graph.tensors[o.tensor].kind is TensorKind.ACTIVATION]
        boxes, numbers = _numbered(regions, dict.fromkeys((*inputs, *op.outputs)))
        outputs = [numbers[o] for o in op.outputs]
        groups = _groups(op, degrees, micro_batches.parts(position), micro_batches.factors[position])
        held = outputs if groups is None else [own[groups.first] for own in outputs]
        asked = position, degrees, shares, micro_batches, divided
        sparse = any(o.tensor in graph.sparse for o in op.parameters)
        return CutOperator(
            position=position,
            degrees=degrees,
            shares=shares,
            micro_batches=micro_batches,
            tiles=len(cells),
            boxes=boxes,
            reads=np.array([numbers[o] for o in inputs], np.int32).reshape(len(inputs), len(cells)),
            outputs=np.array(outputs, np.int32).reshape(len(outputs), len(cells)),
            groups=groups,
            grids=tuple([_grid(boxes, own.tolist()) for own in held]),
            parameters=tuple([self._cut_parameter(name, [position], _needs(op, name, regions)) for name in self._parameters_of(op)]),
            lookups=self._lookups(position, *cut) if sparse else None,
            times=self._times(*asked, False, cut),
            row_times=self._times(*asked, True, cut) if sparse else None,
            away=self._away(position, *cut),
        )

    def _cut_parameter(self, name: str, users: Sequence[int], needs: Sequence[Need]) -> CutParameter:
        return cut_parameter(self.graph, name, users, needs, self._update_ns, len(self.types))

    def _update_ns(self, size: int) -> tuple[int, ...]:
        found = self._updates_ns.get(size)
        if found is None:
            found = self._updates_ns[size] = tuple([self.costs.update_ns(size, kind) for kind in self.types])
        return found

    def _parameters_of(self, op: Operator) -> list[str]:
        """Names of an operator's parameters, each once, in the order of the graph's parameters."""
        return sorted({o.tensor for o in op.parameters}, key=self._parameters.__getitem__)

    def _times(
        self, position: int, degrees: tuple[int, ...], shares: Shares, micro_batches: MicroBatches, divided: bool, sparse_lookup: bool,
        cut: tuple[Longs, Regions] | None,
    ) -> TileTimes:  # fmt: skip
        """How long tiles take. Those whose regions have equal shapes take equal times, so the cost model is asked once for them. ``cut``:
        ``regions``, if they are known."""
        key = self.key(position, degrees, shares, micro_batches, divided), sparse_lookup
        found = self._timed.get(key)
        if found is None:
            op = self.graph.operators[position]
            cells, regions = cut or self.regions(position, degrees, shares, micro_batches)
            firsts, place = alike(_shapes(op, cells, regions))
            tiles = [replace(_tile(op, position, i, cells, regions), sparse_lookup=sparse_lookup) for i in firsts]
            found = self._timed[key] = TileTimes(self.graph, self.costs, self.types, tiles, place, divided=divided)
        return found

    def _lookups(self, position: int, cells: Longs, regions: Regions) -> Longs:
        op, sparse = self.graph.operators[position], self.graph.sparse
        tiles = [_tile(op, position, index, cells, regions) for index in range(len(cells))]
        names = self._parameters_of(op)
        found = [tile_lookups(self.graph, name, tile, weighed=True) if name in sparse else 0 for name in names for tile in tiles]
        return np.array(found, np.int64)

    def _away(self, position: int, cells: Longs, regions: Regions) -> Longs:
        """``sizes.away_bytes`` of each tile. Equal shapes have equal bytes, unless there is padding, or one tensor is read twice: what both
        regions have in common then counts once."""
        op = self.graph.operators[position]
        read = [o.tensor for o in op.inputs]
        if windows(op) or len({*read}) < len(read):
            firsts, place = list(range(len(cells))), np.arange(len(cells))
        else:
            firsts, place = alike(_shapes(op, cells, regions))
        own = [away_bytes(self.graph, _tile(op, position, index, cells, regions)) for index in firsts]
        return np.array(own, np.int64)[place]


def alike(table: Longs) -> tuple[list[int], Longs]:
    """(the first of each kind of equal rows, [row]: of which kind it is)."""
    count, rows = len(table), np.ascontiguousarray(table.reshape(len(table), -1))
    width = rows.shape[1] * rows.itemsize
    if width == 0 or (rows == rows[0]).all():
        return [0], np.zeros(count, np.int64)
    raw, kinds = rows.tobytes(), dict[bytes, int]()
    firsts, place = list[int](), list[int]()
    for row in range(count):
        kind = kinds.setdefault(raw[row * width : (row + 1) * width], len(firsts))
        if kind == len(firsts):
            firsts.append(row)
        place.append(kind)
    return firsts, np.array(place, np.int64)


def _edges(dim: DimMap, size: int, cells: Longs) -> tuple[Longs, Longs] | tuple[int, int]:
    """Where the tiles' intervals of a dimension start and stop: ``DimMap.interval`` for each tile, or of all."""
    if dim.factor is None:
        return dim.interval((), size)
    start = np.minimum(np.maximum(cells[:, dim.factor, 0] * dim.scale + dim.lo, 0), size)
    stop = np.minimum((cells[:, dim.factor, 1] - 1) * dim.scale + dim.hi, size)
    return start, np.maximum(start, stop)


def _numbered(regions: Regions, operands: Mapping[Operand, None]) -> tuple[tuple[Box, ...], dict[Operand, Ints]]:
    """(the distinct regions of some operands, operand -> by tile the number of its region)."""
    known: dict[Box, int] = {}
    numbers = {}
    for operand in operands:
        firsts, place = alike(regions[operand])
        own = [known.setdefault(box, len(known)) if volume(box) else NOWHERE for box in boxes_of(regions[operand][firsts])]
        numbers[operand] = np.array(own, np.int32)[place]
    return tuple(known), numbers


def _grid(boxes: Sequence[Box], numbers: Sequence[int]) -> Grid:
    """The grid of an output. ``numbers``: by holder, the number of its region."""
    held: dict[int, list[int]] = {}
    for holder, number in enumerate(numbers):
        if number != NOWHERE:
            held.setdefault(number, []).append(holder)
    distinct = sorted(held)
    rank = len(boxes[distinct[0]]) if distinct else 0
    places, size, disjoint = [0] * len(distinct), 1, True
    intervals: list[Ints] = []
    for dim in range(rank):
        column = [boxes[number][dim] for number in distinct]
        own = sorted({*column})
        order = {interval: place for place, interval in enumerate(own)}
        places = [place * len(own) + order[interval] for place, interval in zip(places, column, strict=True)]
        size, disjoint = size * len(own), disjoint and all(a[1] <= b[0] for a, b in pairwise(own))
        intervals.append(np.array(own, np.int32).ravel())
    region = np.full(size, -1, np.int32)
    if distinct:
        region[places] = np.arange(len(distinct))
    return Grid(
        disjoint=disjoint,
        intervals=tuple(intervals),
        held=region,
        ptr=np.cumsum([0, *(len(held[number]) for number in distinct)]).astype(np.int32),
        holders=np.array([holder for number in distinct for holder in held[number]], np.int32),
        distinct=np.array(distinct, np.int32),
    )


def _groups(op: Operator, degrees: tuple[int, ...], parts: int, cut: int | None) -> Groups | None:
    """``parts``: number of micro-batches. ``cut``: the factor along which these are cut."""
    summed = [1 + i for i in op.summed] + [0] * (cut in op.summed)
    grid = (parts, *degrees)
    if all(grid[i] == 1 for i in summed):
        return None
    kept = [degree if i not in summed else 1 for i, degree in enumerate(grid)]
    places = np.array(np.unravel_index(np.arange(prod(grid)), grid))
    places[summed] = 0
    numbers: Ints = np.ravel_multi_index(tuple(places), kept).astype(np.int32)
    return Groups(numbers, np.unique(numbers, return_index=True)[1].astype(np.int32))


def _needs(op: Operator, name: str, regions: Regions) -> list[Need]:
    own = [o for o in op.parameters if o.tensor == name]
    return [(0, tile, box) for o in own for tile, box in enumerate(boxes_of(regions[o]))]


def _shapes(op: Operator, cells: Longs, regions: Regions) -> Longs:
    """[tile]: the lengths of its intervals and regions."""
    parts = [cells, *(regions[o] for o in (*op.inputs, *op.parameters, *op.outputs))]
    edges: Longs = np.concatenate(parts, axis=1)
    lengths: Longs = edges[:, :, 1] - edges[:, :, 0]
    return lengths


def _tile(op: Operator, position: int, index: int, cells: Longs, regions: Regions) -> Tile:
    intervals = _as_box(cells[index])
    inputs, parameters, outputs = (tuple([_as_box(regions[o][index]) for o in own]) for own in (op.inputs, op.parameters, op.outputs))
    return Tile(position, index, 0, 0, intervals, inputs, parameters, outputs)


def _as_box(table: Longs) -> Box:
    return tuple([(start, stop) for start, stop in table.tolist()])


def volumes(region: np.ndarray) -> Longs:
    """[tile]: elements in its region."""
    found: Longs = np.prod(region[:, :, 1] - region[:, :, 0], axis=1, dtype=np.int64)
    return found


def distinct(region: np.ndarray) -> tuple[Longs, Longs]:
    """(first tiles of distinct regions, [tile]: which of these its region is). Many tiles, as there are with micro-batches, have few."""
    place = np.zeros(len(region), np.int64)
    for column in region.reshape(len(region), -1).T:
        if (column != column[0]).any():
            lowest, highest = int(column.min()), int(column.max())
            place = np.unique(place * (highest - lowest + 1) + column - lowest, return_inverse=True)[1]
    _, first, place = np.unique(place, return_index=True, return_inverse=True)
    return first, place


def by_lengths(intervals: np.ndarray, of: Callable[[Box], int]) -> Longs:
    """[tile]: what follows from the lengths of its intervals alone, worked out once for equal ones."""
    first, place = distinct(intervals[:, :, 1] - intervals[:, :, 0])
    return np.array([of(cell) for cell in boxes_of(intervals[first])], np.int64)[place]


def boxes_of(region: np.ndarray) -> list[Box]:
    """The regions as boxes."""
    return [tuple((start, stop) for start, stop in box) for box in region.tolist()]
