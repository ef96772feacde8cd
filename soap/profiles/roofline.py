"""Costs from a few figures of a device: its compute rate, its memory bandwidth, the overhead of a kernel call.

A kernel takes the longer of *operations / rate* and *bytes / bandwidth* (Williams, Waterman & Patterson, "Roofline", 2009), plus the
overhead of its calls. With figures of a data sheet this is an estimate; with ``measure_machine`` they are rates that this machine reached.

The backward pass is priced as two kernels, the gradients of the inputs and those of the parameters. For a contraction each costs as many
operations as the forward pass, hence the customary "backward is twice forward" (Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters", 2021, appendix); an operator without parameters, or whose inputs need no gradient, has only one of them.

On a CPU, where nothing hides it, the Python of the runtime and the calls inside recurrent layers are priced as further calls.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from math import ceil

from soap.graph import Operand, Operator, OperatorGraph
from soap.regions import Box, volume
from soap.simulator.costs import nanoseconds
from soap.simulator.tiling import Tile, iteration_points
from soap.topology import DeviceType, Topology

PEAK_SHARE = 0.75
"""Part of a data sheet's peak rate that operators reach: what PyTorch's own estimator assumes (``torch.utils._runtime_estimation``)."""

MEASURED = "measured"
"""A device type whose ``source`` begins with this word holds rates that were reached, not peaks of a data sheet."""

LOOKUP_KINDS = frozenset({"embedding", "embedding_bag"})
"""Operators that read only the rows of their parameter that the input names, at most as much as they write."""

SAVED_TRAFFIC = 2
"""What an operator keeps between its fused calls is written by one call and read by the next."""

TILE_CALLS = 12
"""What the runtime's Python adds to a tile in each direction on a CPU, in calls (``kernel_seconds``), so that it follows the machine.

Measured in one process on one thread of a shared 2-core machine whose calls took 4 us: a step's processor time without its update, less
that of plain calls with autograd, by tiles and directions, was 49 us for a 3-operator MLP, 33 us for zoo:gpt:tiny and 53 us for
zoo:rnnlm:tiny, 12 calls on average. On a GPU the host runs ahead of the device and this is hidden.
"""

UPDATE_CALLS_PER_STATE = 3
"""Calls of an update for each state of the optimizer, besides one: on the same machine SGD took 2 to 6 us a tensor, Adam 23 to 34 us."""

LSTM_CALLS = 24
"""What a layer of an LSTM costs on a CPU besides its arithmetic, in calls: on the same machine 97 us forward and 215 us backward for 1 step
(138 and 299 us for 32), because one kernel runs all steps."""

STEPWISE_KINDS = frozenset({"gru", "rnn_relu", "rnn_tanh"})
STEP_CALLS = 8
"""Calls of each step of these layers on a CPU: on the same machine 28 us forward and 66 us backward for a GRU."""

CACHE_ENTRIES = 2**18

FLOATING = ("float", "bfloat", "complex")

TileKey = tuple[str, int, tuple[tuple[int, int], ...], DeviceType, bool]


def is_measured(device: DeviceType) -> bool:
    """Whether the device type's figures were measured."""
    return device.source.startswith(MEASURED)


class RooflineCosts:
    """A ``CostModel`` from the figures of a topology's device types."""

    def __init__(self, topology: Topology, optimizer_states: int = 2) -> None:
        """``optimizer_states``: tensors of a parameter's size that the optimizer keeps for it (Adam 2, momentum 1, plain SGD 0)."""
        self.optimizer_states = optimizer_states
        types = {device.type.name: device.type for device in topology.devices}
        self._types = tuple(types[name] for name in sorted(types))
        self._tiles: dict[TileKey, int] = {}

    @property
    def description(self) -> str:
        """One line for people: measured or estimated."""
        measured = sum(is_measured(device) for device in self._types)
        if measured == len(self._types):
            return "measured rates of this machine"
        if measured == 0:
            return "estimate (roofline of data sheet)"
        return "estimate (roofline of data sheet, some rates measured)"

    @property
    def hash(self) -> str:
        """16 hex digits over every figure and constant that enters an answer."""
        figures = [[device.identity, is_measured(device)] for device in self._types]
        overheads = [TILE_CALLS, UPDATE_CALLS_PER_STATE, LSTM_CALLS, STEP_CALLS, sorted(STEPWISE_KINDS)]
        constants = [PEAK_SHARE, SAVED_TRAFFIC, sorted(LOOKUP_KINDS), self.optimizer_states, *overheads]
        text = json.dumps(["roofline", 3, constants, figures])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def forward_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        """Forward pass of a tile."""
        return self._cached(graph, tile, device, backward=False)

    def backward_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        """Backward pass of a tile."""
        return self._cached(graph, tile, device, backward=True)

    def update_ns(self, parameter_bytes: int, device: DeviceType) -> int:
        """Optimizer update: parameter, gradient and states are read, parameter and states written, by several calls."""
        traffic = (3 + 2 * self.optimizer_states) * parameter_bytes
        calls = 1 + UPDATE_CALLS_PER_STATE * self.optimizer_states
        return nanoseconds(traffic / device.memory_bandwidth_bytes_per_second + calls * device.kernel_seconds)

    def _cached(self, graph: OperatorGraph, tile: Tile, device: DeviceType, *, backward: bool) -> int:
        """The intervals of a tile decide its regions, so they name it; replicas and devices of one type share the answer."""
        key = (graph.hash, tile.operator, tile.intervals, device, backward)
        answer = self._tiles.get(key)
        if answer is None:
            if len(self._tiles) >= CACHE_ENTRIES:
                self._tiles.clear()
            seconds = backward_seconds(graph, tile, device) if backward else forward_seconds(graph, tile, device)
            answer = self._tiles[key] = nanoseconds(seconds + _runtime_seconds(device))
        return answer


def forward_seconds(graph: OperatorGraph, tile: Tile, device: DeviceType) -> float:
    """One pass over inputs, parameters and outputs, and what is kept between the fused calls."""
    op = graph.operators[tile.operator]
    traffic = _bytes(graph, op.inputs, tile.inputs) + _bytes(graph, op.outputs, tile.outputs)
    traffic += _read_parameters(graph, op, tile) + SAVED_TRAFFIC * _saved_bytes(op, tile)
    return _kernel_seconds(graph, op, device, tile_flops(op, tile), traffic)


def backward_seconds(graph: OperatorGraph, tile: Tile, device: DeviceType) -> float:
    """Gradients of the inputs, then of the parameters; each reads the outputs' gradients and what the forward pass read."""
    op = graph.operators[tile.operator]
    flops = tile_flops(op, tile)
    received = _bytes(graph, op.outputs, tile.outputs) + _bytes(graph, op.inputs, tile.inputs)
    input_gradients = _gradient_bytes(graph, op.inputs, tile.inputs)
    parameter_gradients = _gradient_bytes(graph, op.parameters, tile.parameters)
    contractions = _input_contractions(graph, op)
    seconds = 0.0
    if contractions or not parameter_gradients:
        traffic = received + input_gradients + _read_parameters(graph, op, tile) + SAVED_TRAFFIC * _saved_bytes(op, tile)
        seconds += _kernel_seconds(graph, op, device, flops * max(1, contractions), traffic)
    if parameter_gradients:
        seconds += _kernel_seconds(graph, op, device, flops, received + parameter_gradients)
    return seconds


def tile_flops(op: Operator, tile: Tile) -> float:
    """The tile's share of the operator's operations, by its share of the iteration space."""
    return op.flops * tile.size / iteration_points(op)


def _input_contractions(graph: OperatorGraph, op: Operator) -> int:
    """How many times the forward pass's operations the input gradients cost.

    Beside a parameter there is one contraction, with it; without parameters the inputs are contracted with each other
    (matmul, attention), which gives one for each of two sides.
    """
    wanted = sum(graph.tensors[operand.tensor].requires_grad for operand in op.inputs)
    return min(1 if op.parameters else 2, wanted)


def _kernel_seconds(graph: OperatorGraph, op: Operator, device: DeviceType, flops: float, traffic_bytes: int) -> float:
    peak = device.flops(_compute_dtype(graph, op)) * (1.0 if is_measured(device) else PEAK_SHARE)
    seconds = max(flops / peak, traffic_bytes / device.memory_bandwidth_bytes_per_second)
    return seconds + _calls(graph, op, device) * device.kernel_seconds


def _calls(graph: OperatorGraph, op: Operator, device: DeviceType) -> int:
    """Calls of one pass; a recurrent layer makes many of its own."""
    calls = len(op.calls) or 1
    if device.kind != "cpu" or op.kind not in STEPWISE_KINDS | {"lstm"}:
        return calls
    layers = sum(len(graph.tensors[operand.tensor].shape) == 2 for operand in op.parameters) // 2  # for inputs and for states
    if op.kind == "lstm":
        return calls + LSTM_CALLS * layers
    sequence = graph.tensors[op.inputs[0].tensor].shape
    samples = op.factors[0].size if op.factors else 1
    return calls + STEP_CALLS * layers * (sequence[0] * sequence[1] // samples)


def _runtime_seconds(device: DeviceType) -> float:
    """What the runtime adds to a tile in one direction."""
    return TILE_CALLS * device.kernel_seconds if device.kind == "cpu" else 0.0


def _compute_dtype(graph: OperatorGraph, op: Operator) -> str:
    """The type in which it computes: the first floating one of its parameters, outputs and inputs."""
    for operand in (*op.parameters, *op.outputs, *op.inputs):
        dtype = graph.tensors[operand.tensor].dtype
        if dtype.startswith(FLOATING):
            return dtype
    return "float32"


def _read_parameters(graph: OperatorGraph, op: Operator, tile: Tile) -> int:
    size = _bytes(graph, op.parameters, tile.parameters)
    return min(size, _bytes(graph, op.outputs, tile.outputs)) if op.kind in LOOKUP_KINDS else size


def _saved_bytes(op: Operator, tile: Tile) -> int:
    return ceil(op.saved_bytes * tile.size / iteration_points(op))


def _bytes(graph: OperatorGraph, operands: Iterable[Operand], boxes: Iterable[Box]) -> int:
    return sum(volume(box) * graph.tensors[o.tensor].itemsize for o, box in zip(operands, boxes, strict=True))


def _gradient_bytes(graph: OperatorGraph, operands: Sequence[Operand], boxes: Sequence[Box]) -> int:
    wanted = [graph.tensors[operand.tensor] for operand in operands]
    return sum(volume(box) * t.itemsize for t, box in zip(wanted, boxes, strict=True) if t.requires_grad)
