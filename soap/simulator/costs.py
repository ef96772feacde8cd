"""The interface of cost models: what the simulator asks them. Durations are whole nanoseconds, at least 1.

A cost model does not price communication: its cost follows from the topology alone (``communication``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import Literal, Protocol, runtime_checkable

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

    def update_ns(self, parameter_bytes: int, device: DeviceType) -> int:
        """Optimizer update of a shard."""


def launch_ns(costs: CostModel, graph: OperatorGraph, tile: Tile, device: DeviceType, *, backward: bool) -> int:
    """Launch time of one pass of a tile, in nanoseconds; 0 on devices that are processors themselves, and if the cost model has no
    ``launch_ns``."""
    known: Callable[..., int] | None = getattr(costs, "launch_ns", None)
    return 0 if known is None else known(graph, tile, device, backward=backward)


def light_ns(costs: CostModel, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
    """Forward pass of a tile that keeps its product (``recomputation.LIGHT``), in nanoseconds; the whole forward pass if it has none, or
    the cost model has no ``light_ns``."""
    if not has_product(graph.operators[tile.operator]):
        return costs.forward_ns(graph, tile, device)
    known: Callable[..., int] = getattr(costs, "light_ns", costs.forward_ns)
    return known(graph, tile, device)


def _forward_ns(costs: CostModel, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
    return costs.forward_ns(graph, tile, device)


ROW_NS: Mapping[Takes, Callable[[CostModel, OperatorGraph, Tile, DeviceType], int]] = {Takes.PASS: _forward_ns, Takes.LIGHT: light_ns}
"""What rows of marks take of a tile's device."""


def half_ns(costs: CostModel, graph: OperatorGraph, tile: Tile, device: DeviceType, half: Half) -> int:
    """Input gradients (``I``) or weight gradients (``W``) of a tile that has both, each by itself, in nanoseconds: what both go through
    counts in both. Half of the backward pass if the cost model has no ``half_ns``."""
    known: Callable[..., int] | None = getattr(costs, "half_ns", None)
    return -(-costs.backward_ns(graph, tile, device) // 2) if known is None else known(graph, tile, device, half)


@runtime_checkable
class Compressing(Protocol):
    """An optional part of a cost model: how long a device takes to compress a gradient, or to decompress."""

    def compression_ns(self, compression: Compression, layout: Layout, work: Work, device: DeviceType) -> int:
        """One of the works of a method on a shard of this layout."""


def compression_ns(costs: CostModel, compression: Compression, layout: Layout, work: Work, device: DeviceType) -> int:
    """Nanoseconds of such work; at memory bandwidth if the cost model is not ``Compressing``."""
    if isinstance(costs, Compressing):
        return costs.compression_ns(compression, layout, work, device)
    on_host = device.kind == "cpu"
    moved_bytes = layout.effort(compression, work, on_host=on_host).moved_bytes(on_host=on_host)
    return nanoseconds(moved_bytes / device.memory_bandwidth_bytes_per_second)


@runtime_checkable
class KnowingOptimizer(Protocol):
    """An optional part of a cost model: which optimizer's updates it prices."""

    @property
    def updates_rows_alone(self) -> bool:
        """Whether a row without gradient, and its optimizer state, stay unchanged: true for SGD and Adagrad, false for Adam."""


def updates_rows_alone(costs: CostModel) -> bool:
    """Whether an update of a table changes only the rows that have a gradient; true if the cost model is not ``KnowingOptimizer``."""
    return costs.updates_rows_alone if isinstance(costs, KnowingOptimizer) else True


def table_update_ns(costs: CostModel, rows_bytes: int, table_bytes: int, device: DeviceType) -> int:
    """Nanoseconds to update a table with gradients of some rows: these rows alone, or all rows, after a dense gradient has been made."""
    updated_bytes = rows_bytes if updates_rows_alone(costs) else table_bytes
    return costs.update_ns(updated_bytes, device) + dense_gradient_ns(costs, table_bytes, device)


def dense_gradient_ns(costs: CostModel, table_bytes: int, device: DeviceType) -> int:
    """Nanoseconds to write a whole table's gradient of zeros at memory bandwidth; 0 where only rows with a gradient are updated."""
    return 0 if updates_rows_alone(costs) else nanoseconds(table_bytes / device.memory_bandwidth_bytes_per_second)
