"""The costs seam: what the simulator asks of a cost model. All answers are whole nanoseconds of at least 1.

What communication costs follows from the topology alone (``communication``) and is no cost model's business.
"""

from __future__ import annotations

from math import ceil
from typing import Literal, Protocol, runtime_checkable

from soap.cluster.topology import DeviceType
from soap.model.graph import OperatorGraph
from soap.plan.tiling import Tile

CostSource = Literal["auto", "estimate"]
"""``auto``: what ``soap-profile`` has measured for the cluster's devices, as far as it goes; ``estimate``: only their figures."""
COST_SOURCES: tuple[CostSource, ...] = ("auto", "estimate")


def nanoseconds(seconds: float) -> int:
    """Whole nanoseconds, rounded up, at least 1: max(1, ceil(seconds * 1e9))."""
    return max(1, ceil(seconds * 1e9))


class CostModel(Protocol):
    """Durations of computations. Must be deterministic: equal questions get equal answers.

    A tile on rows (``Tile.on_rows``) is another question than the same tile with its whole regions: it finds out which rows it looks up,
    takes them from where they are kept, looks them up there, and gives a gradient to them alone.
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


@runtime_checkable
class Launching(Protocol):
    """What a cost model may say besides: how long a device's processor takes to launch a tile's kernels."""

    def launch_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType, *, backward: bool) -> int:
        """Of one pass over a tile; 0 on devices that are processors themselves."""


def launch_ns(costs: CostModel, graph: OperatorGraph, tile: Tile, device: DeviceType, *, backward: bool) -> int:
    """What launching one pass over a tile takes; 0 by cost models that say nothing of it."""
    return costs.launch_ns(graph, tile, device, backward=backward) if isinstance(costs, Launching) else 0


@runtime_checkable
class KnowingOptimizer(Protocol):
    """What a cost model may say besides of the optimizer whose updates it prices."""

    @property
    def updates_rows_alone(self) -> bool:
        """Whether a row without gradient stays as it is, and its state: so it is by SGD and Adagrad, but not by Adam."""


def updates_rows_alone(costs: CostModel) -> bool:
    """Whether of a table with gradients of some rows these alone are updated; so it is by cost models that say nothing of it."""
    return costs.updates_rows_alone if isinstance(costs, KnowingOptimizer) else True


def table_update_ns(costs: CostModel, rows_bytes: int, table_bytes: int, device: DeviceType) -> int:
    """Update of a table of which a step has gradients of some rows: of these, or of all rows, for which there is then a gradient to be
    made."""
    updated_bytes = rows_bytes if updates_rows_alone(costs) else table_bytes
    return costs.update_ns(updated_bytes, device) + dense_gradient_ns(costs, table_bytes, device)


def dense_gradient_ns(costs: CostModel, table_bytes: int, device: DeviceType) -> int:
    """Zeros for a whole table's gradient are written at the rate of memory; 0 where rows alone are updated."""
    return 0 if updates_rows_alone(costs) else nanoseconds(table_bytes / device.memory_bandwidth_bytes_per_second)
