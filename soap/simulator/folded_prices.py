"""Prices of a folded strategy: what sums over all copies cost on the small topology, and tiles of two copies' graph (``folding``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from soap.cluster.topology import DeviceType, Topology
from soap.model.graph import OperatorGraph
from soap.plan.tiling import Tile
from soap.simulator.communication.allreduce import allreduce_bytes
from soap.simulator.communication.options import AllReduceOption
from soap.simulator.communication.prices import Communication
from soap.simulator.costs import CostModel, half_ns, launch_ns, light_ns
from soap.strategy.division import Half


@dataclass(frozen=True)
class CommonSums:
    """Sums over all copies. ``devices``: those of the cluster, ascending. ``options``: of all-reduces, with the cluster's links. ``small``:
    with the links of the small topology that represent these. ``parted``: the same of collectives of equal parts; none if there are none.
    """

    devices: tuple[int, ...]
    options: tuple[AllReduceOption, ...]
    small: tuple[AllReduceOption, ...]
    parted: tuple[AllReduceOption, ...] = ()


class FoldedCommunication(Communication):
    """Prices of communication on the small topology. A sum over both copies costs what the sum over all copies does.

    ``common``: devices of the small topology -> the sum over all copies.
    """

    def __init__(
        self, topology: Topology, common: Mapping[tuple[int, ...], CommonSums], groups: Sequence[tuple[int, ...]] = ()
    ) -> None:
        super().__init__(topology)
        self.common, self.groups = common, groups

    def allreduce_options(self, devices: tuple[int, ...]) -> tuple[AllReduceOption, ...]:
        """The options for an all-reduce over these devices of the small topology."""
        common = self.common.get(devices)
        return super().allreduce_options(devices) if common is None else common.small

    def parted_options(self, devices: tuple[int, ...]) -> tuple[AllReduceOption, ...]:
        """The options for a collective of equal parts over these devices of the small topology."""
        common = self.common.get(devices)
        return super().parted_options(devices) if common is None else common.parted

    def allreduce_bytes(self, reduced_bytes: int, devices: tuple[int, ...]) -> int:
        """Bytes on all hops together."""
        common = self.common.get(devices)
        return allreduce_bytes(reduced_bytes, len(devices if common is None else common.devices))


@dataclass(frozen=True)
class FoldedCosts:
    """A cost model that is asked about tiles of two copies' graph, and passes the question on with the whole graph."""

    graph: OperatorGraph
    costs: CostModel

    @property
    def description(self) -> str:
        """Where the numbers come from."""
        return self.costs.description

    @property
    def hash(self) -> str:
        """As the cost model's own."""
        return self.costs.hash

    def forward_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        """Forward pass of a tile."""
        return self.costs.forward_ns(self.graph, tile, device)

    def backward_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        """Backward pass of a tile."""
        return self.costs.backward_ns(self.graph, tile, device)

    def light_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        """Forward pass of a tile without its product."""
        return light_ns(self.costs, self.graph, tile, device)

    def half_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType, half: Half) -> int:
        """Input or weight gradients of a tile that has both."""
        return half_ns(self.costs, self.graph, tile, device, half)

    def launch_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType, *, backward: bool) -> int:
        """Launching one pass of a tile."""
        return launch_ns(self.costs, self.graph, tile, device, backward=backward)

    def update_ns(self, parameter_bytes: int, device: DeviceType) -> int:
        """Optimizer update of a shard."""
        return self.costs.update_ns(parameter_bytes, device)
