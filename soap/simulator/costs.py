"""The interface of cost models: what the simulator asks them. Durations are whole nanoseconds, at least 1.

A cost model does not price communication: its cost follows from the topology alone (``communication``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import Literal, Protocol

from soap.cluster.topology import DeviceType
from soap.model.graph import OperatorGraph
from soap.plan.compression.seam import Layout, Work
from soap.plan.marks.seam import Takes
from soap.plan.tiling import Tile
from soap.strategy.compression import Compression
from soap.strategy.division import Half
from soap.strategy.recomputation import has_product

CostSource = Literal["auto", "estimate"]
"""``auto``: use what ``soap-profile`` has measured of the cluster's devices, estimate the rest. ``estimate``: use only their figures."""
COST_SOURCES: tuple[CostSource, ...] = ("auto", "estimate")


def nanoseconds(seconds: float) -> int:
    """Whole nanoseconds, rounded up, at least 1: max(1, ceil(seconds * 1e9))."""
    return max(1, ceil(seconds * 1e9))


class CostModel(Protocol):
    """Durations of computations, in nanoseconds. Must be deterministic: equal questions get equal answers.

    A sparse lookup (``Tile.sparse_lookup``) costs something else than the same tile with its whole regions: it finds out which rows it
    looks up, copies them from the table, looks them up in the copy, and gives a gradient to these rows alone.
    """

    @property
    def description(self) -> str:
        """One line for people: where the numbers come from (measured, estimated)."""

    @property
    def hash(self) -> str:
        """16 hex digits that change whenever an answer could change."""

    def forward_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        """Forward pass of a tile."""

    def backward_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        """Backward pass of a tile."""

    def light_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        """Forward pass of a tile without its product, which it has."""

    def half_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType, half: Half) -> int:
        """Input gradients (``I``) or weight gradients (``W``) of a tile that has both, each by itself: what both go through counts in
        both."""

    def launch_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType, *, backward: bool) -> int:
        """Launch time of one pass of a tile; 0 on devices that are processors themselves."""

    def update_ns(self, parameter_bytes: int, device: DeviceType) -> int:
        """Optimizer update of a shard."""

    @property
    def updates_rows_alone(self) -> bool:
        """Whether a row without gradient, and its optimizer state, stay unchanged: true for SGD and Adagrad, false for Adam."""

    def compression_ns(self, compression: Compression, layout: Layout, work: Work, device: DeviceType) -> int:
        """One of the works of compressing a gradient, or decompressing, on a shard of this layout."""


def light_ns(costs: CostModel, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
    """Forward pass of a tile that keeps its product (``recomputation.LIGHT``), in nanoseconds; the whole forward pass if it has none."""
    known = costs.light_ns if has_product(graph.operators[tile.operator]) else costs.forward_ns
    return known(graph, tile, device)


def _forward_ns(costs: CostModel, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
    return costs.forward_ns(graph, tile, device)


ROW_NS: Mapping[Takes, Callable[[CostModel, OperatorGraph, Tile, DeviceType], int]] = {Takes.PASS: _forward_ns, Takes.LIGHT: light_ns}
"""What rows of marks take of a tile's device."""


def table_update_ns(costs: CostModel, rows_bytes: int, table_bytes: int, device: DeviceType) -> int:
    """Nanoseconds to update a table with gradients of some rows: these rows alone, or all rows, after a dense gradient has been made."""
    updated_bytes = rows_bytes if costs.updates_rows_alone else table_bytes
    return costs.update_ns(updated_bytes, device) + dense_gradient_ns(costs, table_bytes, device)


def dense_gradient_ns(costs: CostModel, table_bytes: int, device: DeviceType) -> int:
    """Nanoseconds to write a whole table's gradient of zeros at memory bandwidth; 0 where only rows with a gradient are updated."""
    return 0 if costs.updates_rows_alone else nanoseconds(table_bytes / device.memory_bandwidth_bytes_per_second)
