"""Bytes that tiles of variants keep, read and make: worked out once for all engines of a graph (``shared``). It knows no devices, and
no engine's numbers; ``memory_sum`` puts it into an engine's tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from soap.cluster.topology import Topology
from soap.model.graph import Operand, Operator, OperatorGraph, TensorKind
from soap.model.regions import Box, cells, in_one_piece, volume
from soap.plan.tiling import windows
from soap.simulator.compiled.graph_arrays import Longs
from soap.simulator.cut_operators import CutOperator, CutOperators, boxes_of, by_lengths, distinct, volumes
from soap.simulator.memory.footprint import kept_share, product_share, shares_of
from soap.simulator.memory.sizes import PACKING_KINDS, padded_bytes
from soap.strategy.recomputation import has_product


class Regions(NamedTuple):
    """The regions of a parameter that a variant's tiles need. ``sizes``: distinct ones -> elements. ``place``: by tile, which of these.
    ``boxes``: those that are not empty. ``volume``: elements of these together; -1 if they overlap."""

    sizes: Mapping[Box, int]
    place: Longs
    boxes: frozenset[Box]
    volume: int


@dataclass(frozen=True, slots=True, eq=False)
class VariantMemory:
    """By tile, in bytes: what it keeps (``kept``), copies of parts of the batch (``read``), its gradients and its parameters', its outputs
    (``made``), what its products make besides these (``products``). ``regions``: by parameter operand."""

    kept: Longs
    read: Longs
    gradients: Longs
    parameter_gradients: Longs
    made: Longs
    products: Longs
    regions: tuple[Regions, ...]


class VariantMemories:
    """The memory of a graph's variants on a cluster's devices. Threads may ask at the same time."""

    def __init__(self, graph: OperatorGraph, topology: Topology, cuts: CutOperators) -> None:
        self._graph = graph.copies_of or graph  # of all copies, whose footprints are known
        self._cuts = cuts
        self._packing = {device.type.kind != "cpu" for device in topology.devices}
        self._known: dict[CutOperator, VariantMemory] = {}

    def of(self, variant: CutOperator) -> VariantMemory:
        """The memory of a variant."""
        found = self._known.get(variant)
        if found is None:
            found = self._known[variant] = self._make(variant)
        return found

    def _make(self, variant: CutOperator) -> VariantMemory:
        graph = self._graph
        position, degrees, cut = variant.position, variant.degrees, variant.micro_batches
        op = graph.operators[position]
        intervals, regions = self._cuts.regions(position, degrees, variant.shares, cut)
        size = {o: volumes(regions[o]) * graph.tensors[o.tensor].itemsize for o in {*op.inputs, *op.outputs, *op.parameters}}
        parted = cut.parts(position) > 1 and cut.factors[position] in op.summed
        parted |= any(degree > 1 and factor.summed for degree, factor in zip(degrees, op.factors, strict=True))
        if parted:
            size |= {o: volumes(regions[o]) * graph.tensors[o.tensor].partial_itemsize for o in op.outputs}
        nothing = np.zeros(len(intervals), np.int64)
        kept, work = self._kept_and_work(op, intervals, regions)
        made = sum((size[o] for o in op.outputs), nothing)
        kept = kept + made
        read = sum((self._part(o, regions[o], size[o], cut.parts(position)) for o in op.inputs), nothing)
        if op.kind in PACKING_KINDS:
            packed = sum((size[o] for o in op.parameters), nothing)
            if self._packing == {True}:
                kept = kept + packed
            elif True in self._packing:  # only some devices pack: all of them count it
                read = read + packed
        wanted = [o for o in (*op.inputs, *op.outputs) if graph.tensors[o.tensor].requires_grad]
        return VariantMemory(
            kept=kept,
            read=read,
            gradients=sum((size[o] for o in wanted if graph.needs_backward(op)), work),
            parameter_gradients=sum((size[o] for o in op.parameters if graph.tensors[o.tensor].requires_grad), nothing),
            made=made,
            products=by_lengths(intervals, lambda cell: product_share(graph, op, cell)) if has_product(op) else nothing,
            regions=tuple([_regions(regions[o]) for o in op.parameters]),
        )

    def _kept_and_work(self, op: Operator, intervals: np.ndarray, regions: Mapping[Operand, np.ndarray]) -> tuple[Longs, Longs]:
        """For each tile: ``kept_share`` plus padded copies; and ``Shares.work`` plus padded copies, or, without a backward pass, what its
        forward calls pass to each other."""
        graph = self._graph
        kept = by_lengths(intervals, lambda cell: kept_share(graph, op, cell))
        if graph.needs_backward(op):
            work = by_lengths(intervals, lambda cell: shares_of(graph, op, cell).work)
        else:
            work = by_lengths(intervals, lambda cell: shares_of(graph, op, cell).forward)
        for k in windows(op):
            boxes = zip(boxes_of(regions[op.inputs[k]]), boxes_of(intervals), strict=True)
            padded = np.array([padded_bytes(graph, op, k, box, cell) for box, cell in boxes], np.int64)
            kept = kept + padded
            work = work + padded if graph.needs_backward(op) else work
        return kept, work

    def _part(self, operand: Operand, region: np.ndarray, size: Longs, micro_batches: int) -> Longs:
        """[tile]: bytes of parts of the batch or of constants that the tile may copy. The whole batch is held anyway. Micro-batches share
        the parts that are the same for all of them."""
        tensor = self._graph.tensors[operand.tensor]
        if tensor.kind not in (TensorKind.INPUT, TensorKind.CONSTANT):
            return np.zeros_like(size)
        first, place = distinct(region)
        copied = np.array([not in_one_piece(box, tensor.shape) for box in boxes_of(region[first])])[place]
        own = len(region) // micro_batches
        copied[own:] &= place[own:] != np.tile(place[:own], micro_batches)[own:]
        return np.where(copied, size, 0)


def _regions(region: np.ndarray) -> Regions:
    first, place = distinct(region)
    sizes = {box: volume(box) for box in boxes_of(region[first])}
    boxes = frozenset(box for box, size in sizes.items() if size > 0)
    disjoint = len(boxes) < 2 or set(cells(dict.fromkeys(boxes))) == boxes
    return Regions(sizes, place, boxes, sum(sizes.values()) if disjoint else -1)
