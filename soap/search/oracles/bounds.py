"""A lower bound of the iteration time: no strategy of a space is quicker, whatever the links.

It is the larger of two bounds. Both leave out all communication, all updates and all waiting.

- *Path*: operators that depend on each other run one after the other, forward and backward. At least one tile of each lies on the path; it
  counts as the quickest tile that any degrees give. From a tile of the loss (of replica 0, where the backward pass begins) the path goes
  back through tiles for which it waits, and its gradient comes back the same way. A step to an operator's producer counts only if every
  tile of the operator reads something of it.
- *Work*: all computation, divided among all devices. For each operator those degrees count with which its tiles take the least time
  together. The backward pass counts only if every element of an output has a reader that certainly has a backward pass. A device of another
  type counts as so many of the first type as it can be faster at any tile.

Tiles with lookups of sparse parameters count as plain ones or as sparse lookups, whichever is quicker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, prod
from typing import TYPE_CHECKING

import numpy as np

from soap.model.graph import Operand, OperatorGraph
from soap.search.space import Grid, Space
from soap.simulator.cut_operators import CutOperators

if TYPE_CHECKING:
    pass

ROUNDING = 1e-9
"""Relative margin for floating-point division."""


MAX_TILES = 100_000
"""Tiles of all degrees of different operators together, up to which a bound takes seconds."""


@dataclass(frozen=True, slots=True)
class LowerBound:
    """``path_ns``: the longest dependent computation. ``work_ns``: all computation, divided among the devices."""

    path_ns: int
    work_ns: int

    @property
    def bound_ns(self) -> int:
        """The bound: no strategy takes less."""
        return max(self.path_ns, self.work_ns)


def is_quickly_bounded(space: Space) -> bool:
    """Whether ``lower_bound`` takes seconds: it asks for the time of every tile under all degrees of the space."""
    different = {(op.kind, op.factors, op.flops): own for op, own in zip(space.graph.operators, space.operators, strict=True)}
    return sum(prod(grid[1:]) for own in different.values() for grid in own.grids) <= MAX_TILES


def lower_bound(space: Space, cuts: CutOperators) -> LowerBound:
    """The bound for all strategies of ``space`` on this cluster; strategies outside of it (more tiles than devices) may be below."""
    least = _Least(space, cuts)
    certain = certain_gradients(space.graph)
    work = sum(least.work_ns(i, backward=certain[i]) for i in range(len(certain)))
    power = sum(least.speeds[kind] for kind in least.cuts.type_of)
    return LowerBound(_path_ns(space.graph, least), floor(work / power * (1 - ROUNDING)))


def _path_ns(graph: OperatorGraph, least: _Least) -> int:
    """The longest such path. ``there``: time before the end of any tile's forward pass. ``both``: that, and the time after the begin of
    its backward pass, if it has one. A tile that reads only one of several inputs (a concatenation) has the shortest of their paths
    before it."""
    there: list[int] = []
    both: list[int] = []
    longest = 0
    for i, op in enumerate(graph.operators):
        known: list[tuple[Operand, int, int]] = []
        for operand in op.inputs:
            if operand.tensor in graph.producers:
                j = graph.producers[operand.tensor][0]
                known.append((operand, there[j], both[j] if graph.tensors[operand.tensor].requires_grad else there[j]))
        sure = [own for own in known if always_touched(graph, i, own[0])]
        before = max((own[1] for own in sure), default=0), max((own[2] for own in sure), default=0)
        if known and not sure and one_touched(graph, i, [own[0] for own in known]):
            before = min(own[1] for own in known), min(own[2] for own in known)
        there.append(before[0] + least.tile_ns(i, backward=False))
        both.append(max(before) + least.tile_ns(i, backward=True) if graph.needs_backward(op) else there[i])
        if any(out.tensor == graph.loss for out in op.outputs):
            longest = both[i] if graph.tensors[graph.loss].requires_grad else there[i]
    return longest


def certain_gradients(graph: OperatorGraph) -> list[bool]:
    """Per operator, whether under every strategy at least one replica of each of its tiles runs a backward pass."""
    certain = [False] * len(graph.operators)
    for i in range(len(graph.operators) - 1, -1, -1):
        for out in graph.operators[i].outputs:
            if not graph.tensors[out.tensor].requires_grad or not is_partitioned(graph, i, out):
                continue
            readers = graph.consumers.get(out.tensor, ())
            read = any(certain[j] and always_covered(graph, j, graph.operators[j].inputs[k]) for j, k in readers)
            certain[i] |= read or out.tensor == graph.loss
    return certain


def one_touched(graph: OperatorGraph, position: int, operands: Sequence[Operand]) -> bool:
    """Whether every tile has a part of at least one of these operands, which are adjacent along one factor."""
    factors = graph.operators[position].factors
    along, parts = set[int](), list[tuple[int, int]]()
    for operand in operands:
        shape, limited = graph.tensors[operand.tensor].shape, list[tuple[int, int, int]]()
        for dim, size in zip(operand.dims, shape, strict=True):
            if dim.factor is None:
                if dim.interval((), size)[0] >= dim.interval((), size)[1]:
                    return False
                continue
            if dim.scale < 1 or dim.lo >= dim.hi:
                return False
            # index i has something if i * scale + hi > 0 and i * scale + lo < size
            first, stop = max(0, -dim.hi // dim.scale + 1), min(factors[dim.factor].size, -((dim.lo - size) // dim.scale))
            if (first, stop) != (0, factors[dim.factor].size):
                limited.append((dim.factor, first, stop))
        if len(limited) != 1:
            return False
        along.add(limited[0][0])
        parts.append(limited[0][1:])
    if len(along) != 1:
        return False
    reached = 0
    for first, stop in sorted(parts):
        if first > reached:
            return False
        reached = max(reached, stop)
    return reached >= factors[along.pop()].size


def always_touched(graph: OperatorGraph, position: int, operand: Operand) -> bool:
    """Whether every tile of the operator at ``position``, however it is split, has a non-empty part of the operand."""
    factors, shape = graph.operators[position].factors, graph.tensors[operand.tensor].shape
    for dim, size in zip(operand.dims, shape, strict=True):
        if dim.factor is None:
            start, stop = dim.interval((), size)
            touched = start < stop
        else:  # only the first index's part may lie before the dimension, and only the last one's behind it
            touched = dim.lo < dim.hi and dim.hi > 0 and (factors[dim.factor].size - 1) * dim.scale + dim.lo < size
        if not touched:
            return False
    return True


def always_covered(graph: OperatorGraph, position: int, operand: Operand) -> bool:
    """Whether the tiles of one replica together, however the operator is split, have all of the operand."""
    factors, shape = graph.operators[position].factors, graph.tensors[operand.tensor].shape
    used = [dim.factor for dim in operand.dims if dim.factor is not None]
    return len(used) == len(set(used)) and all(
        dim.interval((), size) == (0, size) if dim.factor is None
        else dim.lo <= 0 and dim.hi - dim.lo >= dim.scale and (factors[dim.factor].size - 1) * dim.scale + dim.hi >= size
        for dim, size in zip(operand.dims, shape, strict=True)
    )  # fmt: skip


def is_partitioned(graph: OperatorGraph, position: int, out: Operand) -> bool:
    """Whether different tiles (or sums over tiles) of one replica hold different, non-empty parts of this output."""
    op = graph.operators[position]
    needed = {i for i, factor in enumerate(op.factors) if not factor.summed and factor.size > 1}
    return needed <= {dim.factor for dim in out.dims if dim.exact} and always_touched(graph, position, out)


class _Least:
    """The least times of operators over all degrees of a space. ``speeds``: how many times as fast as the first type each type can be."""

    def __init__(self, space: Space, cuts: CutOperators) -> None:
        self.cuts = cuts
        self._found: dict[tuple[int, tuple[Grid, ...]], tuple[int, int, int, int]] = {}
        looking_up = {lookup.operator for access in space.graph.sparse.values() for lookup in access.lookups}
        ratios = np.ones(len(self.cuts.types))
        self._of: list[tuple[int, int, int, int]] = []
        for position, operator in enumerate(space.operators):
            key = (self.cuts.class_of(position), operator.grids)
            if key not in self._found:
                ways = (False, True) if position in looking_up else (False,)
                every = dict.fromkeys(grid[1:] for grid in operator.grids)
                tables = [self.cuts.durations(position, degrees, sparse_lookup=way) for degrees in every for way in ways]
                for table in tables:
                    ratios = np.maximum(ratios, (table[:1] / table).max(axis=(1, 2)))
                tile, tile_both = min(int(t[:, 0].min()) for t in tables), min(int(t.sum(axis=1).min()) for t in tables)
                work, work_both = min(int(t[0, 0].sum()) for t in tables), min(int(t[0].sum()) for t in tables)
                self._found[key] = tile, tile_both, work, work_both
            self._of.append(self._found[key])
        self.speeds: list[float] = ratios.tolist()

    def tile_ns(self, position: int, *, backward: bool) -> int:
        """Least time of one tile on any device: forward, and backward if ``backward``."""
        return self._of[position][1 if backward else 0]

    def work_ns(self, position: int, *, backward: bool) -> int:
        """Least time of all tiles of one replica on the first type."""
        return self._of[position][3 if backward else 2]
