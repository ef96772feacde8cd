"""The numbers of which a model's loss is a sum, each scaled by a constant: the losses of parts of a sequence, auxiliary losses.

The gradient by each is constant, so that the backward pass can begin there, before these numbers have been summed over devices or
micro-batches. What adds them up is the loss's epilogue (``OperatorGraph.epilogue``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from soap.model.graph import OperatorGraph, TensorKind
from soap.model.regions import volume, whole
from soap.tracing.calls import Call, Ref, results_of
from soap.tracing.execute import ExecutableModel


def find_loss_terms(model: ExecutableModel) -> Mapping[str, float]:
    """Number -> the loss's gradient by it, for the longest epilogue of a model; nothing if the loss is no such sum."""
    graph = model.graph
    found: set[int] = set()
    for position in range(len(graph.operators) - 1, -1, -1):
        op = graph.operators[position]
        readers = {reader for out in op.outputs for reader, _ in graph.consumers.get(out.tensor, ())}
        ends = readers <= found if readers else any(out.tensor == graph.loss for out in op.outputs)
        if ends and _adds_numbers(graph, position) and all(_is_linear(step.call) for step in model.programs[op.name].steps):
            found.add(position)
    entering = [o.tensor for position in sorted(found) for o in graph.operators[position].inputs]
    entering = [name for name in dict.fromkeys(entering) if graph.producers[name][0] not in found]
    if not found or any(not {reader for reader, _ in graph.consumers.get(name, ())} <= found for name in entering):
        return {}
    return _coefficients(model, sorted(found), entering)


def _adds_numbers(graph: OperatorGraph, position: int) -> bool:
    op = graph.operators[position]
    numbers = [graph.tensors[operand.tensor] for operand in (*op.inputs, *op.outputs)]
    return not op.parameters and all(volume(whole(t.shape)) == 1 and t.kind is TensorKind.ACTIVATION for t in numbers)


def _is_linear(call: Call) -> bool:
    """Sums and differences of any tensors, and of zero; products and quotients of one tensor and a number."""
    if call.kind in ("add", "sub", "neg"):
        return all(isinstance(arg, Ref) or arg == 0 for arg in call.args)
    scaled = call.kind in ("mul", "div") and isinstance(call.args[0], Ref) and not any(isinstance(arg, Ref) for arg in call.args[1:])
    return scaled and "rounding_mode" not in call.kwargs


def _coefficients(model: ExecutableModel, operators: Sequence[int], entering: Sequence[str]) -> dict[str, float]:
    """Tensor that enters the epilogue -> the loss's gradient by it, found by running the epilogue on zeros."""
    graph = model.graph
    leaves = {name: torch.zeros(graph.tensors[name].shape, dtype=torch.float64, requires_grad=True) for name in entering}
    values: dict[str, torch.Tensor] = {}
    for op in (graph.operators[position] for position in operators):
        program = model.programs[op.name]
        own = zip(op.inputs, program.inputs, strict=True)
        values.update({value: leaves[operand.tensor] for operand, (value, _) in own if operand.tensor in leaves})
        for step in program.steps:
            (values[step.call.outputs[0]],) = results_of(step.call, values)
    gradients = torch.autograd.grad(values[model.program.loss].sum(), list(leaves.values()))
    return {name: float(gradient) for name, gradient in zip(leaves, gradients, strict=True)}
