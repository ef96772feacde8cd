"""Tiles: an operator under a configuration, cut into the pieces that devices execute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from soap.model.batch import MicroBatches
from soap.model.graph import DimMap, FactorKind, Operand, Operator, OperatorGraph
from soap.model.regions import Box, Interval, proportional, volume
from soap.strategy.config import OpConfig

Place = tuple[int, ...]
"""A cell of an operator's grid: for each factor, the number of its piece."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One piece of one operator on one device.

    ``index``: its position in ``OpConfig.devices`` (row-major over replica and factors); with micro-batches a replica's tiles come once
    for each of them, and ``part`` is the micro-batch; None if the operator is not cut. ``intervals``: one per factor. ``inputs``,
    ``parameters``, ``outputs``: the region of each operand that it reads or writes, in the operator's operand order; some may be empty.
    ``sparse_lookup``: whether it has, of its sparse parameters, only the rows that it looks up. Always False in ``Plan.tiles``;
    ``Plan.as_run`` fills it in.
    """

    operator: int
    index: int
    replica: int
    device: int
    intervals: tuple[Interval, ...]
    inputs: tuple[Box, ...]
    parameters: tuple[Box, ...]
    outputs: tuple[Box, ...]
    sparse_lookup: bool = False
    part: int | None = None

    @property
    def size(self) -> int:
        """Number of points of the operator's iteration space in this tile (1 if it has no factors)."""
        return volume(self.intervals)


def is_partial(op: Operator, intervals: Sequence[Interval]) -> bool:
    """Whether a tile's results are partial: parts of a sum over a summed factor that is split."""
    return any(f.summed and interval != (0, f.size) for f, interval in zip(op.factors, intervals, strict=True))


NARROW_PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "expert_product"})
"""Kinds of which GPUs make a part of a sum in float32 from operands that stay narrow (``tracing.compiled``)."""


def is_widened(graph: OperatorGraph, tile: Tile) -> bool:
    """Whether a tile's results are in float32 because they are partial sums of a tensor of a lower type. It is computed in float32, too,
    except for ``NARROW_PRODUCTS`` on GPUs."""
    op = graph.operators[tile.operator]
    lower = any(t.partial_itemsize > t.itemsize for t in (graph.tensors[o.tensor] for o in op.outputs))
    return lower and is_partial(op, tile.intervals)


def made_bytes(graph: OperatorGraph, op: Operator, tile: Tile, output: int) -> int:
    """Size of one of a tile's outputs."""
    tensor = graph.tensors[op.outputs[output].tensor]
    return volume(tile.outputs[output]) * (tensor.partial_itemsize if is_partial(op, tile.intervals) else tensor.itemsize)


def tiles_of(graph: OperatorGraph, position: int, config: OpConfig, cut: MicroBatches | None = None) -> list[Tile]:
    """All tiles of the operator at ``position`` under ``config``, in index order. ``cut``: micro-batches; each has tiles on the devices of
    the configuration."""
    op = graph.operators[position]
    shapes = {o.tensor: graph.tensors[o.tensor].shape for o in (*op.inputs, *op.parameters, *op.outputs)}
    cells, boxes = list[tuple[Interval, ...]](), list[tuple[tuple[Box, ...], tuple[Box, ...], tuple[Box, ...]]]()
    for pieces in pieces_of(graph, position, config.weights, cut):
        places = list(product(*[range(len(own)) for own in pieces]))
        cells += product(*pieces)
        inputs, parameters, outputs = (_boxes(group, shapes, pieces, places) for group in (op.inputs, op.parameters, op.outputs))
        boxes += zip(inputs, parameters, outputs, strict=True)
    own = prod(config.degrees)
    part: Callable[[int], int | None] = (lambda i: i // own) if len(cells) > own else lambda i: None
    return [
        Tile(position, replica * len(cells) + i, replica, config.devices[replica * own + i % own], cell, *boxes[i], False, part(i))
        for replica in range(config.replicas)
        for i, cell in enumerate(cells)
    ]


def part_of(config: OpConfig, tile: int, count: int) -> int:
    """The micro-batch of the tile with this index, of an operator that is cut into ``count``."""
    return tile // (len(config.devices) // config.replicas) % count


def pieces_of(
    graph: OperatorGraph, position: int, weights: Sequence[Sequence[int]], cut: MicroBatches | None = None
) -> list[tuple[list[Interval], ...]]:
    """For each part of an operator, the pieces of each of its factors, in proportion to the factor's ``weights``; a single part without
    micro-batches."""
    if cut is None or cut.parts(position) == 1:
        sizes = [factor.size for factor in graph.operators[position].factors]
        return [tuple(proportional(size, own) for size, own in zip(sizes, weights, strict=True))]
    by_factor = [cut.pieces(position, factor, own) for factor, own in enumerate(weights)]
    return list(zip(*by_factor, strict=True))


def whole_tile(graph: OperatorGraph, position: int) -> Tile:
    """The whole operator at ``position`` as one tile, on device 0."""
    return tiles_of(graph, position, OpConfig((1,) * len(graph.operators[position].factors), (0,)))[0]


def _boxes(
    operands: Sequence[Operand], shapes: Mapping[str, tuple[int, ...]], pieces: Sequence[Sequence[Interval]], places: Sequence[Place]
) -> list[tuple[Box, ...]]:
    """The operands' regions for each cell of the grid. A dimension follows one factor, so its intervals are computed once per piece."""
    tables = []
    for operand in operands:
        own: list[tuple[int | None, list[Interval]]] = []
        for dim, size in zip(operand.dims, shapes[operand.tensor], strict=True):
            parts = [()] if dim.factor is None else [((0, 0),) * dim.factor + (piece,) for piece in pieces[dim.factor]]
            own.append((dim.factor, [dim.interval(part, size) for part in parts]))
        tables.append(own)
    return [
        tuple([tuple([found[0 if factor is None else place[factor]] for factor, found in own]) for own in tables])
        for place in places
    ]


def iteration_points(op: Operator) -> int:
    """Number of points of the operator's whole iteration space."""
    points = 1
    for factor in op.factors:
        points *= factor.size
    return points


def windows(op: Operator) -> list[int]:
    """Positions of the inputs over which a window slides (convolution, pooling); what lies beyond their border is padding."""
    return [k for k, operand in enumerate(op.inputs) if any(is_window(dim) for dim in operand.dims)]


def is_window(dim: DimMap) -> bool:
    """Whether an input's dimension is read through a window that may reach beyond its border."""
    return dim.factor is not None and (dim.lo < 0 < dim.hi or dim.hi > dim.scale)


def spatial_factors(op: Operator) -> frozenset[int]:
    """The factors of a convolution's image along which tiles read other inputs than their share, with steps between them or their
    neighbours', or make more than they keep, as transposed ones do; none of any other operator."""
    if not op.kind.startswith("conv"):
        return frozenset()
    transposed = "transpose" in op.kind
    read = {dim for operand in op.inputs for dim in operand.dims if dim.factor is not None and (transposed or dim != DimMap(dim.factor))}
    return frozenset(dim.factor for dim in read if dim.factor is not None and op.factors[dim.factor].kind is FactorKind.ATTRIBUTE)
