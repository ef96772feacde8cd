"""Costs from a few figures of a device: its compute rate, its memory bandwidth, the overhead of a kernel call.

A kernel takes the longer of *operations / rate* and *bytes / bandwidth* (Williams, Waterman & Patterson, "Roofline", 2009), plus the
overhead of its calls. With figures of a data sheet this is an estimate; with ``this_machine`` they are rates that this machine reached.

What the kernels of a pass do is counted in ``work``. On a CPU, where nothing hides it, the Python of the runtime and the calls inside
recurrent layers are priced as further calls.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from soap.cluster.topology import DeviceType, Topology
from soap.model.graph import OperatorGraph
from soap.model.regions import Box
from soap.plan.compression.seam import Layout, Work
from soap.plan.row_counts import parameters_held
from soap.plan.tiling import Tile
from soap.profiles import efficiency
from soap.profiles.efficiency import PEAK_SHARE
from soap.profiles.work import Kernel, backward_work, constants, forward_work, half_work, light_work
from soap.simulator.costs import nanoseconds
from soap.simulator.kernels import FLASH2, Kernels
from soap.strategy.compression import Compression
from soap.strategy.division import Half

TILE_CALLS = 12
"""What the runtime's Python adds to a tile in each direction on a CPU, in calls (``kernel_seconds``), so that it follows the machine's
speed. Measured in one process on one thread of a shared 2-core machine whose calls took 4 us: a step's processor time without its
update, less that of plain calls with autograd, by tiles and directions, was 49 us for a 3-operator MLP, 33 us for zoo:gpt:tiny and 53
us for zoo:rnnlm:tiny, 12 calls on average. On a GPU the host runs ahead of the device, which hides it."""

UPDATE_CALLS_PER_STATE = 3
"""Calls of an update for each state of the optimizer, beside one: on the same machine SGD took 2 to 6 us a tensor, Adam 23 to 34 us."""

LEAST_DENSE_STATES = 2
"""An optimizer with so many tensors changes rows without gradient, too. One with fewer is taken for SGD or Adagrad."""

CACHE_ENTRIES = 2**18

AnswerKey = tuple[str, int, tuple[tuple[int, int], ...], DeviceType, bool, tuple[Box, ...]]


class RooflineCosts:
    """A ``CostModel`` from the figures of a topology's device types."""

    def __init__(self, topology: Topology, optimizer_states: int = 2, kernels: Kernels = "eager") -> None:
        """``optimizer_states``: tensors of a parameter's size that the optimizer keeps for it (Adam 2, momentum 1, plain SGD 0).
        ``kernels``: those that the graphs which are asked about have (``simulator.kernels.joined``)."""
        self.optimizer_states, self.kernels, (kind, *added) = optimizer_states, kernels, kernels.split("+")
        self._flash2, self._fused_lookups = FLASH2 in added, kind == "fused"
        types = {device.type.name: device.type for device in topology.devices}
        self._types = tuple(types[name] for name in sorted(types))
        self._tiles: dict[AnswerKey, int] = {}

    @property
    def description(self) -> str:
        """The source of costs as one line: measured or estimated."""
        measured = sum(device.is_measured for device in self._types)
        if measured == len(self._types):
            return "measured rates of this machine"
        kernels = "" if self.kernels == "eager" else f", {self.kernels} kernels"
        return f"estimate (roofline of data sheet{', some rates measured' if measured else ''}{kernels})"

    @property
    def updates_rows_alone(self) -> bool:
        """Whether rows without gradient stay as they are, as with optimizers that keep less than two tensors (SGD, Adagrad)."""
        return self.optimizer_states < LEAST_DENSE_STATES

    @property
    def hash(self) -> str:
        """16 hex digits over every figure and constant that enters an answer."""
        figures = [[device.identity, device.is_measured] for device in self._types]
        known = [PEAK_SHARE, *constants(), self.optimizer_states, TILE_CALLS, UPDATE_CALLS_PER_STATE]
        known += [efficiency.figures(flash2=self._flash2)] if any(device.kind == "cuda" for device in self._types) else []
        text = json.dumps(["roofline", 7, known, figures, *([] if self.kernels == "eager" else [self.kernels])])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def forward_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        """Forward pass of a tile."""
        return self._cached(graph, tile, device, backward=False)

    def backward_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        """Backward pass of a tile."""
        return self._cached(graph, tile, device, backward=True)

    def light_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        """Forward pass of a tile without its product."""
        work = light_work(graph, tile)
        return nanoseconds(self._seconds(work, graph, tile, device, backward=False))

    def half_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType, half: Half) -> int:
        """Input or weight gradients of a tile that has both."""
        work = half_work(graph, tile, half)
        return nanoseconds(self._seconds(work, graph, tile, device, backward=True))

    def launch_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType, *, backward: bool) -> int:
        """Nothing: a pass has its launches in it."""
        return 0

    def update_ns(self, parameter_bytes: int, device: DeviceType) -> int:
        """Optimizer update: parameter, gradient and states are read, parameter and states written; on a CPU by several calls for each
        tensor, on a GPU by kernels for many tensors."""
        traffic = (3 + 2 * self.optimizer_states) * parameter_bytes
        launching = efficiency.update_seconds(device, self.optimizer_states)
        if launching is None:
            launching = (1 + UPDATE_CALLS_PER_STATE * self.optimizer_states) * device.kernel_seconds
        bandwidth = device.memory_bandwidth_bytes_per_second * efficiency.memory_share(device)
        return nanoseconds(traffic / bandwidth + launching)

    def compression_ns(self, compression: Compression, layout: Layout, work: Work, device: DeviceType) -> int:
        """Compressing a gradient, or decompressing: its passes over memory, and its calls."""
        on_host = device.kind == "cpu"
        effort = layout.effort(compression, work, on_host=on_host)
        bandwidth = device.memory_bandwidth_bytes_per_second * efficiency.memory_share(device)
        return nanoseconds(effort.moved_bytes(on_host=on_host) / bandwidth + effort.calls * device.kernel_seconds)

    def _cached(self, graph: OperatorGraph, tile: Tile, device: DeviceType, *, backward: bool) -> int:
        """The key of a tile's answer: its intervals, which decide its regions. Replicas and devices of one type share the answer. The
        number of rows of a sparse lookup is included, because the graph's hash does not contain it."""
        key = (graph.hash, tile.operator, tile.intervals, device, backward, parameters_held(graph, tile) if tile.sparse_lookup else ())
        answer = self._tiles.get(key)
        if answer is None:
            if len(self._tiles) >= CACHE_ENTRIES:
                self._tiles.clear()
            work = backward_work(graph, tile) if backward else forward_work(graph, tile, fused_lookups=self._fused_lookups)
            answer = self._tiles[key] = nanoseconds(self._seconds(work, graph, tile, device, backward=backward))
        return answer

    def _seconds(self, work: Iterable[Kernel], graph: OperatorGraph, tile: Tile, device: DeviceType, *, backward: bool) -> float:
        kind = graph.operators[tile.operator].kind
        return work_seconds(work, device, kind, backward=backward, flash2=self._flash2) + runtime_seconds(device)


def work_seconds(work: Iterable[Kernel], device: DeviceType, kind: str, *, backward: bool, flash2: bool = False) -> float:
    """Time of these kernels of an operator of this kind, one after the other. ``flash2``: as for ``efficiency.shares``."""
    return sum((_kernel_seconds(kernel, device, kind, backward, flash2) for kernel in work), 0.0)


def runtime_seconds(device: DeviceType) -> float:
    """What the runtime adds to a tile in one direction."""
    return TILE_CALLS * device.kernel_seconds if device.kind == "cpu" else 0.0


def _kernel_seconds(kernel: Kernel, device: DeviceType, kind: str, backward: bool, flash2: bool) -> float:
    """On a GPU light calls have kernels of their own, behind the operator's; on a CPU their operands are still in the caches."""
    share = efficiency.shares(device, kind, kernel, backward=backward, flash2=flash2)
    rate, bandwidth = device.flops(kernel.dtype_on(device.kind)) * share.arithmetic, device.memory_bandwidth_bytes_per_second * share.memory
    if device.kind == "cpu":
        calls = (kernel.calls + kernel.inner_calls) * device.kernel_seconds
        return max(kernel.flops / rate, kernel.traffic_bytes / bandwidth) + calls
    own_bytes = kernel.traffic_bytes - kernel.apart_bytes - kernel.fused_bytes
    apart = kernel.apart_bytes / (device.memory_bandwidth_bytes_per_second * efficiency.memory_share(device))
    return max(kernel.flops / rate, own_bytes / bandwidth) + apart + (kernel.calls - kernel.views) * device.kernel_seconds
