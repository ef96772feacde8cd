"""The loss epilogue: the last operators of a model if they only add up and scale numbers, such as the losses of parts of a sequence.

The loss is linear in the numbers that enter the epilogue, so its gradient by them is constant. The backward pass can therefore begin there,
before the numbers have been summed over the devices: no rank waits for another between forward and backward pass. The sums go on meanwhile;
the epilogue itself runs after the backward pass.
"""

from __future__ import annotations

import torch

from soap.model.graph import OperatorGraph, TensorKind
from soap.model.regions import volume, whole
from soap.plan.tiling import tiles_of
from soap.runtime.program.epilogue import LossEpilogue, no_epilogue
from soap.strategy.config import OpConfig
from soap.tracing.model import TileContext, TracedModel


def find_epilogue(model: TracedModel) -> LossEpilogue:
    """The longest loss epilogue of a model."""
    graph = model.graph
    found: set[int] = set()
    for position in range(len(graph.operators) - 1, -1, -1):
        op = graph.operators[position]
        readers = {reader for out in op.outputs for reader, _ in graph.consumers.get(out.tensor, ())}
        ends = readers <= found if readers else any(out.tensor == graph.loss for out in op.outputs)
        if ends and _adds_numbers(graph, position) and model.is_linear(position):
            found.add(position)
    entering = [o.tensor for position in sorted(found) for o in graph.operators[position].inputs]
    entering = [name for name in dict.fromkeys(entering) if graph.producers[name][0] not in found]
    if not found or any(not {reader for reader, _ in graph.consumers.get(name, ())} <= found for name in entering):
        return no_epilogue(graph)
    return LossEpilogue(frozenset(found), _coefficients(model, sorted(found), entering))


def _adds_numbers(graph: OperatorGraph, position: int) -> bool:
    op = graph.operators[position]
    numbers = [graph.tensors[operand.tensor] for operand in (*op.inputs, *op.outputs)]
    return not op.parameters and all(volume(whole(t.shape)) == 1 and t.kind is TensorKind.ACTIVATION for t in numbers)


def _coefficients(model: TracedModel, operators: list[int], entering: list[str]) -> dict[str, float]:
    """Tensor that enters the epilogue -> the loss's gradient by it, found by running the epilogue on zeros."""
    graph = model.graph
    leaves = {name: torch.zeros(graph.tensors[name].shape, dtype=torch.float64, requires_grad=True) for name in entering}
    values: dict[str, torch.Tensor] = dict(leaves)
    for position in operators:
        op = graph.operators[position]
        (tile,) = tiles_of(graph, position, OpConfig((1,) * len(op.factors), (0,)))
        outputs = model.run_tile(tile, [values[o.tensor] for o in op.inputs], [], TileContext())
        values.update({out.tensor: value for out, value in zip(op.outputs, outputs, strict=True)})
    gradients = torch.autograd.grad(values[graph.loss].sum(), list(leaves.values()))
    return {name: float(gradient) for name, gradient in zip(leaves, gradients, strict=True)}
