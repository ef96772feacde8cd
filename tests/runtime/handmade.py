"""A TracedModel for the operators of ``tests.graph_builder``, computed by hand: what the runtime is tested with, apart from tracing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from zlib import crc32

import torch
import torch.nn.functional as F

from soap.model.graph import Operator, OperatorGraph, TensorKind
from soap.model.regions import relative
from soap.plan.tiling import Tile, tiles_of
from soap.strategy.config import OpConfig
from soap.tracing.calls import TileContext
from soap.tracing.execute import PlainModel

Tensors = Sequence[torch.Tensor]


def random_tensor(name: str, shape: Sequence[int], salt: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(crc32(name.encode()) + salt)
    return 0.5 * torch.randn(*shape, generator=generator, dtype=torch.float64) if shape else torch.ones((), dtype=torch.float64)


class HandModel(PlainModel):
    """Float64 values, whatever the graph says; "counted" operators have a buffer that they add to where their tiles work."""

    def __init__(self, graph: OperatorGraph, limit: int = 2) -> None:
        self.graph = graph
        tensors = graph.tensors.values()
        self.parameters = {t.name: random_tensor(t.name, t.shape) for t in tensors if t.kind is TensorKind.PARAMETER}
        self.constants = {t.name: random_tensor(t.name, t.shape) for t in tensors if t.kind is TensorKind.CONSTANT}
        counted = [op for op in graph.operators if op.kind == "counted"]
        self.buffers = {op.name: torch.zeros(graph.tensors[op.outputs[0].tensor].shape[-1], dtype=torch.float64) for op in counted}
        self.state: dict[str, str] = {}
        self.transient: frozenset[str] = frozenset()
        self.unchanged: dict[str, torch.Tensor] = {}
        self.input_names = [t.name for t in tensors if t.kind is TensorKind.INPUT]
        self.limit = limit
        self.example_inputs = self.inputs(0)

    def inputs(self, salt: int) -> list[torch.Tensor]:
        """A batch. Integers stay below ``limit``, so that they are legal everywhere."""
        result = []
        for name in self.input_names:
            tensor = self.graph.tensors[name]
            values = random_tensor(name, tensor.shape, 1 + salt)
            result.append((values.abs() * 100).long() % self.limit if tensor.dtype == "int64" else values)
        return result

    def run_tile(self, tile: Tile, inputs: Tensors, parameters: Tensors, context: TileContext) -> tuple[torch.Tensor, ...]:
        op = self.graph.operators[tile.operator]
        for operand, box, value in zip((*op.inputs, *op.parameters), (*tile.inputs, *tile.parameters), (*inputs, *parameters), strict=True):
            assert list(value.shape) == [b - a for a, b in box], (op.name, operand.tensor)
        if op.kind == "counted":
            places = torch.arange(*tile.intervals[-1])
            context.note_statistics(op.name, tile.intervals[-1], places, places)
        return KERNELS[op.kind](self, op, tile, inputs, parameters)

    def reference_loss(self, inputs: Tensors, parameters: Mapping[str, torch.Tensor], context: TileContext) -> torch.Tensor:
        values = {**dict(zip(self.input_names, inputs, strict=True)), **self.constants, **parameters}
        for position, op in enumerate(self.graph.operators):
            (tile,) = tiles_of(self.graph, position, OpConfig((1,) * len(op.factors), (0,)))
            read = [_cut(values[o.tensor], box) for o, box in zip(op.inputs, tile.inputs, strict=True)]
            weights = [_cut(values[o.tensor], box) for o, box in zip(op.parameters, tile.parameters, strict=True)]
            outputs = self.run_tile(tile, read, weights, context)
            values.update({operand.tensor: value for operand, value in zip(op.outputs, outputs, strict=True)})
        return values[self.graph.loss]

    def end_step(self, context: TileContext) -> None:
        for name, found in context.statistics.items():
            for (a, b), places, _ in found:
                context.buffers[name][a:b] += 1 + places


def _cut(tensor: torch.Tensor, box: tuple[tuple[int, int], ...]) -> torch.Tensor:
    return tensor[relative(box, tuple((0, n) for n in tensor.shape))]


def _linear(model: HandModel, op: Operator, tile: Tile, xs: Tensors, ps: Tensors) -> tuple[torch.Tensor, ...]:
    bias = ps[1] if len(ps) > 1 and tile.intervals[-2][0] == 0 else None  # partial results: the first one has the bias
    return (F.linear(xs[0], ps[0], bias),)


def _elementwise(model: HandModel, op: Operator, tile: Tile, xs: Tensors, ps: Tensors) -> tuple[torch.Tensor, ...]:
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return (torch.tanh(total.expand([b - a for a, b in tile.outputs[0]])),)


def _conv(model: HandModel, op: Operator, tile: Tile, xs: Tensors, ps: Tensors) -> tuple[torch.Tensor, ...]:
    window, size = op.inputs[0].dims[2], model.graph.tensors[op.inputs[0].tensor].shape[2]
    a, b = tile.intervals[3]
    wanted = (a * window.scale + window.lo, (b - 1) * window.scale + window.hi)
    held = tile.inputs[0][2]
    x = F.pad(xs[0], (max(0, min(held[0], size) - wanted[0]) if held[0] < held[1] else wanted[1] - wanted[0], 0))
    x = F.pad(x, (0, wanted[1] - wanted[0] - x.shape[2]))
    return (F.conv1d(x, ps[0], stride=window.scale),)


def _embedding(model: HandModel, op: Operator, tile: Tile, xs: Tensors, ps: Tensors) -> tuple[torch.Tensor, ...]:
    low, high = tile.intervals[-2]
    inside = (xs[0] >= low) & (xs[0] < high)
    found = F.embedding((xs[0] - low).clamp(0, high - low - 1), ps[0])
    return (found * inside.unsqueeze(-1),)


def _attention(model: HandModel, op: Operator, tile: Tile, xs: Tensors, ps: Tensors) -> tuple[torch.Tensor, ...]:
    heads = tile.intervals[1][1] - tile.intervals[1][0]
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in xs)
    weights = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1)
    return ((weights @ v).transpose(1, 2).flatten(2),)


def _concat(model: HandModel, op: Operator, tile: Tile, xs: Tensors, ps: Tensors) -> tuple[torch.Tensor, ...]:
    dim = next(i for i, m in enumerate(op.inputs[1].dims) if m.lo != 0)
    return (torch.cat(list(xs), dim),)


def _chunk(model: HandModel, op: Operator, tile: Tile, xs: Tensors, ps: Tensors) -> tuple[torch.Tensor, ...]:
    return (_part(xs[0], tile, 0), _part(xs[0], tile, 1))


def _part(x: torch.Tensor, tile: Tile, output: int) -> torch.Tensor:
    slices = []
    for (a, b), (start, stop) in zip(tile.inputs[0], tile.outputs[output], strict=True):
        length = stop - start
        slices.append(slice(0, length) if output == 0 else slice(b - a - length, b - a))
    return x[tuple(slices)]


def _mean_over(factors: Callable[[Operator], int]) -> Callable[..., tuple[torch.Tensor, ...]]:
    def kernel(model: HandModel, op: Operator, tile: Tile, xs: Tensors, ps: Tensors) -> tuple[torch.Tensor, ...]:
        return (xs[0].sum() / factors(op),)

    return kernel


def _cross_entropy(model: HandModel, op: Operator, tile: Tile, xs: Tensors, ps: Tensors) -> tuple[torch.Tensor, ...]:
    total = prod(factor.size for factor in op.factors)
    return (F.cross_entropy(xs[0].flatten(0, -2), xs[1].flatten(), reduction="sum") / total,)


KERNELS: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "linear": _linear,
    "elementwise": _elementwise,
    "counted": _elementwise,
    "norm": lambda m, op, t, xs, ps: (F.layer_norm(xs[0], xs[0].shape[-1:]) * ps[0],),
    "conv": _conv,
    "embedding": _embedding,
    "attention": _attention,
    "slice": lambda m, op, t, xs, ps: (xs[0],),
    "concat": _concat,
    "chunk": _chunk,
    "batch_mean": lambda m, op, t, xs, ps: (xs[0].sum(0) / op.factors[0].size,),
    "opaque": lambda m, op, t, xs, ps: (torch.tanh(xs[0]),),
    "next_state": lambda m, op, t, xs, ps: tuple(x.detach().clone() for x in xs),
    "keep_state": lambda m, op, t, xs, ps: (torch.zeros((), dtype=torch.float64),),
    "copy": lambda m, op, t, xs, ps: (ps[0],),
    "sum": lambda m, op, t, xs, ps: (sum(xs[1:], xs[0]),),
    "flatten": lambda m, op, t, xs, ps: (xs[0].flatten(1),),
    "mean": _mean_over(lambda op: prod(factor.size for factor in op.factors)),
    "cross_entropy": _cross_entropy,
}
