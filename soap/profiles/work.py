"""The work of a tile's passes, whatever the device: operations, bytes and calls, counted from the graph alone.

The backward pass counts as two kernels, the gradients of the inputs and those of the parameters. For a contraction each costs as many
operations as the forward pass, hence the customary "backward is twice forward" (Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters", 2021, appendix). An operator without parameters, or whose inputs need no gradient, has only one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from soap.model.dtypes import is_differentiable
from soap.model.graph import RECURRENT_KINDS, Operand, Operator, OperatorGraph
from soap.model.regions import Box, volume
from soap.plan.row_counts import all_lookups, parameters_held
from soap.plan.tiling import NARROW_PRODUCTS, Tile, is_widened, iteration_points
from soap.strategy.division import Half

ATTENTION = "scaled_dot_product_attention"

LOOKUP_KINDS = frozenset({"embedding", "embedding_bag", "equal_bags"})
"""Operators that read only those rows of their parameter that the input names: at most as much as they write."""

SAVED_TRAFFIC = 2
"""Traffic of what an operator keeps between its fused calls: one call writes it and the next reads it."""

LSTM_CALLS = 24
"""Cost of a layer of an LSTM on a CPU besides its arithmetic, in calls: on a shared 2-core machine whose calls took 4 us, 97 us forward
and 215 us backward for 1 step (138 and 299 us for 32), because one kernel runs all steps."""

STEPWISE_KINDS = frozenset({"gru", "rnn_relu", "rnn_tanh"})
STEP_CALLS = 8
"""Calls of each step of these layers on a CPU: on the same machine 28 us forward and 66 us backward for a GRU."""

ROW_CALLS = 24
PLACE_TRAFFIC = 2560
"""Cost of a sparse lookup beside copying rows: calls, and bytes of traffic for each row that it looks up, since rows are found by
sorting, and their places by searching. On a shared 2-core machine whose calls took 6 us, at 19 GB/s: 120 to 170 us for few rows, and
130 to 155 ns for each of many lookups."""


DRAWN_PER_CALL = 1000
"""Random numbers that a processor draws in the time of a call, one after the other whatever threads there are: on a shared 2-core machine
whose calls took 5 to 6 us, ``bernoulli_`` took 5.4 ns for each (``rand`` 2.9, ``randn`` 2.9)."""

LOWER_BYTES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""Bytes of an element of the types narrower than float32."""
ALIGNED_BYTES = 16
"""What tensor cores ask of rows of matrices in these types (NVIDIA, Matrix Multiplication Background User's Guide: dimensions that are
multiples of 8 elements of two bytes)."""


class Scores(NamedTuple):
    """Scores of an attention: keys of each query, width of a head, and whether a mask lets kernels skip some."""

    keys: int
    width: int
    masked: bool


@dataclass(frozen=True, slots=True)
class Kernel:
    """One pass over an operator's data. ``dtype``: of the arithmetic. ``inner_calls``: further calls inside its own, on a CPU.
    ``apart_bytes``: of ``traffic_bytes``, what its light calls (casts, pointwise ones, copies) pass to each other. ``fused_bytes``: of
    ``traffic_bytes``, what kernels on GPUs neither write nor read. ``unaligned``: rows of an operand in a lower type do not begin at
    multiples of ``ALIGNED_BYTES``. ``widened``: processors compute it in float32. ``views``: of ``calls``, those for which a GPU has
    nothing to do. ``scores``: of an attention."""

    dtype: str
    flops: float
    traffic_bytes: int
    calls: int
    inner_calls: int = 0
    apart_bytes: int = 0
    fused_bytes: int = 0
    unaligned: bool = False
    widened: bool = False
    views: int = 0
    scores: Scores | None = None

    def dtype_on(self, device: str) -> str:
        """The type in which a device of this kind computes."""
        return "float32" if self.widened and device == "cpu" else self.dtype


def constants() -> list[object]:
    """All of the constants above that enter a count, as plain JSON values."""
    return [SAVED_TRAFFIC, sorted(LOOKUP_KINDS), LSTM_CALLS, STEP_CALLS, sorted(STEPWISE_KINDS), ROW_CALLS, PLACE_TRAFFIC, DRAWN_PER_CALL]


def forward_work(graph: OperatorGraph, tile: Tile, *, fused_lookups: bool = False) -> tuple[Kernel, ...]:
    """One pass over inputs, parameters and outputs, and over what is kept between the fused calls, and random numbers, which are drawn for
    whole blocks. A sparse lookup has to find its rows first, unless ``fused_lookups``: one kernel reads them where they are."""
    op = graph.operators[tile.operator]
    traffic = _bytes(graph, op.inputs, tile.inputs) + _bytes(graph, op.outputs, tile.outputs) + _read_parameters(graph, op, tile)
    kernel = _narrowed(op, tile, _kernel(graph, tile, tile_flops(op, tile), traffic, saves=True), backward=False)
    if op.drawn:
        drawing = ceil(sum(drawn.by(tile.intervals) for drawn in op.drawn) / DRAWN_PER_CALL)
        kernel = replace(kernel, inner_calls=kernel.inner_calls + drawing)
    return (_finding_rows(graph, op, tile), kernel) if tile.sparse_lookup and not fused_lookups else (kernel,)


def light_work(graph: OperatorGraph, tile: Tile) -> tuple[Kernel, ...]:
    """The forward pass without its product: light calls read inputs and what they pass to each other. Nothing, if all other calls are
    views."""
    op = graph.operators[tile.operator]
    if len(op.calls) - op.views < 2:
        return ()
    kernel = _kernel(graph, tile, 0.0, _bytes(graph, op.inputs, tile.inputs), saves=True)
    return (replace(kernel, calls=kernel.calls - 1, apart_bytes=kernel.traffic_bytes - kernel.fused_bytes),)


def backward_work(graph: OperatorGraph, tile: Tile, *, apart: bool = False) -> tuple[Kernel, ...]:
    """Gradients of the inputs, then of the parameters; each reads the outputs' gradients and what the forward pass read. ``apart``: as two
    passes, each of which goes through the light calls."""
    op = graph.operators[tile.operator]
    flops = tile_flops(op, tile)
    received = _bytes(graph, op.outputs, tile.outputs) + _bytes(graph, op.inputs, tile.inputs)
    input_gradients = _gradient_bytes(graph, op.inputs, tile.inputs)
    parameter_gradients = _gradient_bytes(graph, op.parameters, parameters_held(graph, tile))
    contractions = _input_contractions(graph, op)
    kernels = []
    if contractions or not parameter_gradients:
        traffic = received + input_gradients + _read_parameters(graph, op, tile)
        kernels.append(_kernel(graph, tile, flops * max(1, contractions), traffic, saves=True))
    if parameter_gradients:
        kernels.append(_kernel(graph, tile, flops, received + parameter_gradients, saves=apart))
    return (_narrowed(op, tile, kernels[0], backward=True), *kernels[1:])


def half_work(graph: OperatorGraph, tile: Tile, half: Half) -> tuple[Kernel, ...]:
    """The gradients of the inputs, or of the parameters, of a tile that has both, each as a pass of its own. Both go back through the light
    calls; in recurrent layers the second one also goes back through all steps once more."""
    whole = backward_work(graph, tile, apart=True)
    if half == "I":
        return whole[:1]
    return whole if graph.operators[tile.operator].kind in RECURRENT_KINDS else whole[1:]


def tile_flops(op: Operator, tile: Tile) -> float:
    """The tile's share of the operator's operations, without those that kernels skip: its share of the iteration space."""
    return op.flops * (1.0 - op.skipped_share) * tile.size / iteration_points(op)


def _input_contractions(graph: OperatorGraph, op: Operator) -> int:
    """Operations of the input gradients relative to the forward pass. With a parameter there is one contraction, with that parameter.
    Without one the inputs are contracted with each other (matmul, attention), which gives a contraction for each of two sides."""
    wanted = sum(graph.tensors[operand.tensor].requires_grad for operand in op.inputs)
    return min(1 if op.parameters else 2, wanted)


def _kernel(graph: OperatorGraph, tile: Tile, flops: float, traffic_bytes: int, *, saves: bool = False) -> Kernel:
    """``saves``: with the traffic of what is kept or passed on between the fused calls."""
    op = graph.operators[tile.operator]
    wide = is_widened(graph, tile)
    dtype = "float32" if wide and op.kind not in NARROW_PRODUCTS else arithmetic_of(graph, op)
    saved, fused = (SAVED_TRAFFIC * _share(size, op, tile) if saves else 0 for size in (op.saved_bytes, op.fused_bytes))
    calls, inner = len(op.calls) or 1, _inner_calls(graph, op)
    marks = _is_unaligned(tile, dtype), wide and dtype != "float32"
    scores = None
    if op.kind == ATTENTION:
        (*_, (first, last), (low, high)) = tile.inputs[1]
        scores = Scores(last - first, high - low, op.skipped_share > 0)
    return Kernel(dtype, flops, traffic_bytes + saved, calls, inner, saved - fused, fused, *marks, op.views, scores)


def _narrowed(op: Operator, tile: Tile, kernel: Kernel, *, backward: bool) -> Kernel:
    """The kernel with casts of what its product reads, or of its gradient. Of a product M x K by K x N the former are M K numbers, which
    is (M K N)² over weight and result."""
    each = op.narrowing_bytes[backward]
    if not each:
        return kernel
    made, weight = volume(tile.outputs[0]), max(map(volume, tile.parameters))
    numbers = made if backward else round((tile_flops(op, tile) / 2) ** 2 / (made * weight))
    traffic, apart = kernel.traffic_bytes + each * numbers, kernel.apart_bytes + each * numbers
    return replace(kernel, traffic_bytes=traffic, apart_bytes=apart, calls=kernel.calls + 1)


def _is_unaligned(tile: Tile, dtype: str) -> bool:
    """Whether a matrix of the tile has such rows. An input with one number a row is none: a norm's factor that the product's input is
    multiplied by on the way."""
    itemsize = LOWER_BYTES.get(dtype)
    rows = [box[-1] for box in tile.inputs if len(box) > 1 and box[-1][1] - box[-1][0] > 1]
    rows += [box[-1] for box in (*tile.parameters, *tile.outputs) if len(box) > 1]
    return itemsize is not None and any((stop - start) * itemsize % ALIGNED_BYTES for start, stop in rows)


def _finding_rows(graph: OperatorGraph, op: Operator, tile: Tile) -> Kernel:
    """Finding the rows that are looked up, copying them out of the table, and finding each lookup's place among them."""
    held = [(o, box) for o, box in zip(op.parameters, parameters_held(graph, tile), strict=True) if o.tensor in graph.sparse]
    copied = 2 * _bytes(graph, [o for o, _ in held], [box for _, box in held])
    return Kernel(arithmetic_of(graph, op), 0.0, copied + PLACE_TRAFFIC * all_lookups(graph, tile), ROW_CALLS)


def _inner_calls(graph: OperatorGraph, op: Operator) -> int:
    """Further calls that a recurrent layer makes in one pass."""
    if op.kind not in STEPWISE_KINDS | {"lstm"}:
        return 0
    layers = sum(len(graph.tensors[operand.tensor].shape) == 2 for operand in op.parameters) // 2  # for inputs and for states
    if op.kind == "lstm":
        return LSTM_CALLS * layers
    sequence = graph.tensors[op.inputs[0].tensor].shape
    samples = op.factors[0].size if op.factors else 1
    return STEP_CALLS * layers * (sequence[0] * sequence[1] // samples)


def arithmetic_of(graph: OperatorGraph, op: Operator) -> str:
    """The type in which the operator computes. If it does not say: the first floating one of its parameters, outputs and inputs."""
    if op.arithmetic:
        return op.arithmetic
    for operand in (*op.parameters, *op.outputs, *op.inputs):
        dtype = graph.tensors[operand.tensor].dtype
        if is_differentiable(dtype):
            return dtype
    return "float32"


def _read_parameters(graph: OperatorGraph, op: Operator, tile: Tile) -> int:
    size = _bytes(graph, op.parameters, parameters_held(graph, tile))
    return min(size, _bytes(graph, op.outputs, tile.outputs)) if op.kind in LOOKUP_KINDS else size


def _share(size_bytes: int, op: Operator, tile: Tile) -> int:
    return ceil(size_bytes * tile.size / iteration_points(op))


def _bytes(graph: OperatorGraph, operands: Iterable[Operand], boxes: Iterable[Box]) -> int:
    return sum(volume(box) * graph.tensors[o.tensor].itemsize for o, box in zip(operands, boxes, strict=True))


def _gradient_bytes(graph: OperatorGraph, operands: Sequence[Operand], boxes: Sequence[Box]) -> int:
    wanted = [graph.tensors[operand.tensor] for operand in operands]
    return sum(volume(box) * t.itemsize for t, box in zip(wanted, boxes, strict=True) if t.requires_grad)
