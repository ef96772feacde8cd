"""A cost model of devices whose figures are others than those it was made for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from soap.cluster.topology import DeviceType, Topology
from soap.model.graph import OperatorGraph
from soap.plan.compression.seam import Layout, Work
from soap.plan.tiling import Tile
from soap.profiles.roofline import RooflineCosts
from soap.simulator.costs import CostModel
from soap.strategy.compression import Compression
from soap.strategy.division import Half


class ScaledCosts:
    """A cost model's answers about the devices of ``topology``, for those of ``scaled``, which is the same cluster with other figures.

    Measured times do not follow from figures. So every answer is multiplied by what the roofline says for the new figures ÷ for the old
    ones: a tile of which the estimate is bound by memory does not get faster with the rate, however it was measured. Estimates follow
    exactly. Launch times go with the time of a kernel call.
    """

    def __init__(self, costs: CostModel, topology: Topology, scaled: Topology, optimizer_states: int = 2) -> None:
        self._costs = costs
        self._before, self._now = RooflineCosts(topology, optimizer_states), RooflineCosts(scaled, optimizer_states)
        pairs = [(new.type, old.type) for new, old in zip(scaled.devices, topology.devices, strict=True)]
        pairs += [(new.core, old.core) for new, old in zip(scaled.hosts, topology.hosts, strict=True) if new.core and old.core]
        self._original = dict(pairs)

    @property
    def description(self) -> str:
        """Where the numbers come from."""
        return f"{self._costs.description}, for devices with other figures"

    @property
    def hash(self) -> str:
        """16 hex digits over the cost model and both rooflines."""
        return hashlib.sha256(f"scaled {self._costs.hash} {self._before.hash} {self._now.hash}".encode()).hexdigest()[:16]

    @property
    def updates_rows_alone(self) -> bool:
        """As the cost model says."""
        return self._costs.updates_rows_alone

    def forward_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        """Forward pass of a tile."""
        return self._scaled(device, lambda costs, own: costs.forward_ns(graph, tile, own))

    def backward_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        """Backward pass of a tile."""
        return self._scaled(device, lambda costs, own: costs.backward_ns(graph, tile, own))

    def light_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        """Forward pass of a tile without its product."""
        return self._scaled(device, lambda costs, own: costs.light_ns(graph, tile, own))

    def half_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType, half: Half) -> int:
        """Input or weight gradients of a tile that has both."""
        return self._scaled(device, lambda costs, own: costs.half_ns(graph, tile, own, half))

    def update_ns(self, parameter_bytes: int, device: DeviceType) -> int:
        """Optimizer update of a shard."""
        return self._scaled(device, lambda costs, own: costs.update_ns(parameter_bytes, own))

    def compression_ns(self, compression: Compression, layout: Layout, work: Work, device: DeviceType) -> int:
        """Compressing a gradient, or decompressing."""
        return self._scaled(device, lambda costs, own: costs.compression_ns(compression, layout, work, own))

    def launch_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType, *, backward: bool) -> int:
        """Launch time of one pass of a tile."""
        old = self._original.get(device, device)
        found = self._costs.launch_ns(graph, tile, old, backward=backward)
        return round(found * device.kernel_seconds / old.kernel_seconds) if old.kernel_seconds else found

    def _scaled(self, device: DeviceType, asked: Callable[[CostModel, DeviceType], int]) -> int:
        """The cost model's answer about the original of a device, in proportion to the estimates for both."""
        old = self._original.get(device, device)
        return max(1, -(-asked(self._costs, old) * asked(self._now, device) // asked(self._before, old)))
