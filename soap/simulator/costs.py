"""The costs seam: what the simulator asks of a cost model. All answers are whole nanoseconds of at least 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from soap.graph import OperatorGraph
from soap.simulator.collectives import Flow
from soap.simulator.tiling import Tile
from soap.topology import DeviceType, Link, Topology


class CostModel(Protocol):
    """Durations of tasks. Must be deterministic: equal questions get equal answers."""

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

    def transfer_ns(self, transfer_bytes: int, links: Sequence[Link]) -> int:
        """One message over a route: latency + bytes / bottleneck bandwidth."""

    def allreduce_ns(self, reduced_bytes: int, topology: Topology, devices: Sequence[int]) -> int:
        """All-reduce of a buffer over two or more devices."""

    def exchange_ns(self, flows: Sequence[Flow], topology: Topology, reduced_bytes: int = 0) -> int:
        """Flows between devices that run at once as one collective; every target then adds up at most ``reduced_bytes``."""
