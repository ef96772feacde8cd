"""Means over labels, such as cross-entropies, where each device is given its own labels alone (``Operator.own_inputs``). Pure data.

Such a mean divides by a number that all labels decide: how many are not to be ignored, or the sum of their weights. Its tiles are told
that number. Where several devices share the labels of a mean out, each counts its own when the step begins, and the counts are summed over
the devices that sum the loss. A device that has all of them counts alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from soap.model.graph import OperatorGraph
from soap.plan.plan import Plan, Reduction
from soap.plan.tiling import Tile

COUNT_BYTES = 8
"""Size of a count: a float64 holds numbers of labels and sums of weights alike."""


@dataclass(frozen=True, slots=True)
class LabelCount:
    """Tiles of one replica of a mean (positions in ``Plan.tiles``; in a device's own part of a plan, its own), whose labels are counted
    together. ``name``: of the sum over ``devices``, if these are several."""

    operator: int
    tiles: tuple[int, ...]
    devices: tuple[int, ...]
    name: str


def with_own_labels(graph: OperatorGraph, tile: Tile) -> Tile:
    """The tile as it is where batches come in parts: of labels it reads its own alone."""
    operands = graph.operators[tile.operator].own_inputs
    if not operands:
        return tile
    return replace(tile, inputs=tuple([own.box(tile.intervals, graph.tensors[own.tensor].shape) for own in operands]))


def count_name(graph: OperatorGraph, reduction: Reduction) -> str:
    """Task name of the sum of counted labels over the group that sums the loss."""
    return f"count labels of {graph.operators[reduction.operator].name}#{reduction.replica}"


def label_counts(plan: Plan) -> Iterator[LabelCount]:
    """What is counted together: the tiles of each sum of such means; others each by themselves. In the order of the plan's sums, then of
    its tiles."""
    summed = set[int]()
    for reduction in plan.reductions:
        if plan.graph.operators[reduction.operator].own_inputs:
            summed.update(reduction.tiles)
            yield LabelCount(reduction.operator, reduction.tiles, reduction.devices, count_name(plan.graph, reduction))
    for number, tile in enumerate(plan.tiles):
        if plan.operator(tile).own_inputs and number not in summed:
            yield LabelCount(tile.operator, (number,), (tile.device,), "")
