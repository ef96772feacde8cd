"""Variants: operators cut by certain degrees (``cut_operators``), as an engine numbers them, in arrays for compiled code.

A variant knows no devices. Operators that differ only in names (repeated layers) share their variants. Regions are numbered; equal numbers
mean equal regions, and -1 is an empty region.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from soap.model.batch import MicroBatches
from soap.model.regions import Box, volume
from soap.simulator.compiled.graph_arrays import Ints, LongRows, Longs
from soap.simulator.compiled.growing import Growing, are_same
from soap.simulator.compiled.shards import Geometries
from soap.simulator.compiled.tile_times import TileTimes
from soap.simulator.cut_operators import CutOperator, CutOperators, Grid
from soap.simulator.draws import Draws
from soap.strategy.shares import Shares

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
    under each draw, [place in ``costs``, draw]; nothing without draws. ``away``: bytes of tiles that offload (``sizes.away_bytes``).
    ``box_ptr``: where a region's (start, stop) per dimension begin in ``bounds``. ``box_volume``: a region's elements.

    A *grid* describes the distinct regions of one output (of tiles, or of sums): rank; whether they are disjoint; their number; for each
    dimension the number of intervals and where these begin; then where the following begin: the map (position per dimension -> region, -1
    if none), the pointers to each region's holders, the holders (tiles or groups of one replica), and the regions' numbers.
    """

    rows: LongRows
    data: Ints
    costs: Longs
    launches: Longs
    drawn: Longs
    away: Longs
    box_ptr: Longs
    box_volume: Longs
    bounds: Ints


class Variants:
    """The variants of one engine, made when they are first asked for. ``cuts``: what makes them. ``micro_batches``: how new ones are cut.
    ``divided``: positions of operators whose backward passes are in two. ``made``: by number."""

    def __init__(self, cuts: CutOperators, geometries: Geometries, draws: Draws | None = None) -> None:
        self.cuts, self.geometries, self.draws = cuts, geometries, draws
        self._numbers: dict[Hashable, int] = {}
        self.micro_batches, self.divided = MicroBatches(cuts.graph, 1), frozenset[int]()
        self.made: list[CutOperator] = []
        self._boxes: dict[Box, int] = {}
        self._rows, self._data, self._costs = Growing(np.int64), Growing(np.int32), Growing(np.int64)
        self._launches, self._drawn, self._away = Growing(np.int64), Growing(np.int64), Growing(np.int64)
        self._box_ptr, self._box_volume, self._bounds = Growing(np.int64), Growing(np.int64), Growing(np.int32)
        self._arrays: tuple[tuple[NDArray[Any], ...], VariantTables] | None = None

    def number(self, position: int, degrees: tuple[int, ...], shares: Shares = ()) -> int:
        """The variant of the operator at ``position`` under these degrees and shares."""
        key = self.cuts.key(position, degrees, shares, self.micro_batches, position in self.divided)
        found = self._numbers.get(key)
        if found is None:
            cut = self.cuts.cut(position, degrees, shares, self.micro_batches, position in self.divided)
            self._rows.add(self._row(cut))
            self.made.append(cut)
            found = self._numbers[key] = len(self.made) - 1
        return found

    def split(self, number: int) -> tuple[tuple[int, ...], Shares]:
        """The degrees and shares of a variant."""
        return self.made[number].degrees, self.made[number].shares

    def arrays(self) -> VariantTables:
        """All variants as arrays, with room behind them: the same ones until that is full."""
        boxes = self._box_ptr, self._box_volume, self._bounds
        rooms = tuple([own.room for own in (self._rows, self._data, self._costs, self._launches, self._drawn, self._away, *boxes)])
        if self._arrays is None or not are_same(self._arrays[0], rooms):
            rows = rooms[0][: len(rooms[0]) // COLUMNS * COLUMNS].reshape(-1, COLUMNS)
            self._arrays = rooms, VariantTables(rows, *rooms[1:])
        return self._arrays[1]

    def tie(self, key: tuple[int, ...]) -> None:
        """Make the geometry of a parameter that several operators use. ``key``: the parameter's number, then its users' cuts."""
        name = self.cuts.graph.parameters[key[0]].name
        self.geometries.tie(key, self.cuts.tied(name, self.geometries.grids(key[1:])))

    def _row(self, cut: CutOperator) -> list[int]:
        """Store a variant; returns its row."""
        row = [0] * COLUMNS
        row[CELLS], row[PARTS] = cut.tiles, cut.parts
        numbers = np.array([*self._number(cut.boxes), -1], np.int32)  # the last one for ``NOWHERE``
        row[READS], row[OUTPUTS] = self._data.add(numbers[cut.reads]), self._data.add(numbers[cut.outputs])
        row[COSTS] = row[ROW_COSTS] = self._add_times(cut.times)
        if cut.row_times is not None:
            row[ROW_COSTS] = self._add_times(cut.row_times)
        if cut.groups is not None:
            first = cut.groups.first
            row[GROUPS], row[GROUP_OF], row[GROUP_FIRST] = len(first), self._data.add(cut.groups.of), self._data.add(first)
            row[GROUP_BOXES] = self._data.add(numbers[cut.outputs[:, first]])
        row[GRIDS] = self._data.add([self._add_grid(own, numbers) for own in cut.grids])
        row[GEOMETRIES] = self._data.add([self.geometries.add(own) for own in cut.parameters])
        row[LOOKUPS] = -1 if cut.lookups is None else self._data.add(cut.lookups)
        row[AWAY] = self._away.add(cut.away)
        return row

    def _number(self, boxes: tuple[Box, ...]) -> list[int]:
        """The numbers of regions, none of which is empty."""
        known, first = self._boxes, len(self._boxes)
        numbers = [known.setdefault(box, len(known)) for box in boxes]
        new = [box for box, number in zip(boxes, numbers, strict=True) if number >= first]
        for box in new:
            self._box_ptr.add([self._bounds.add([edge for interval in box for edge in interval])])
        self._box_volume.add([volume(box) for box in new])
        return numbers

    def _add_times(self, times: TileTimes) -> int:
        """Store how long tiles and their launches take; returns where both begin."""
        self._launches.add(times.launches)
        if self.draws is not None:
            self._drawn.add(times.drawn(self.draws))
        return self._costs.add(times.durations)

    def _add_grid(self, grid: Grid, numbers: Ints) -> int:
        """Store a grid; returns where it begins."""
        header = [edge for own in grid.intervals for edge in (len(own) // 2, self._data.add(own))]
        tail = [self._data.add(own) for own in (grid.held, grid.ptr, grid.holders, numbers[grid.distinct])]
        return self._data.add([len(grid.intervals), int(grid.disjoint), len(grid.distinct), *header, *tail])
