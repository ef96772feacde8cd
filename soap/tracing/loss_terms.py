"""The numbers of which a model's loss is a sum, each scaled by a constant: the losses of parts of a sequence, auxiliary losses.

The gradient by each is constant, so that the backward pass can begin there, before these numbers have been summed over devices or
micro-batches. What adds them up is the loss's epilogue (``OperatorGraph.epilogue``). A mean over labels may be told its own labels alone:
what a tile then needs of the inputs follows from the call backwards, factor by factor of each rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from soap.model.graph import DimMap, OperatorGraph, TensorKind
from soap.model.regions import volume, whole
from soap.tracing.calls import Call, Ref, Value, results_of
from soap.tracing.compiled import OperatorProgram, ProgramStep
from soap.tracing.execute import TracedModel
from soap.tracing.fuse import compose_all, simplified, unsplit
from soap.tracing.rules.notation import Maps


def own_labels(
    program: OperatorProgram, mean: Call, factors: Mapping[int, DimMap], values: Mapping[str, Value], given: Collection[str], count: int
) -> OperatorProgram | None:
    """An operator's calls as tiles run them that are told what ``mean`` divides by; None if they have no labels of their own.

    ``factors``: factor of the mean's rule -> which part of it a tile of the operator has. ``given``: values that every device has, of
    which labels must be made. ``count``: number of the operator's factors; the tiles of all of them together must have each label once.
    """
    place = next(number for number, step in enumerate(program.steps) if step.call is mean)
    needed = [
        simplified(compose_all(maps, factors), values[name].shape)
        for name, maps in zip(mean.operands, program.steps[place].rule.own_operands, strict=True)
    ]
    if len(program.outputs) != 1 or not _each_once(needed[1], count):
        return None
    steps = [*program.steps]
    steps[place] = replace(steps[place], operands=(steps[place].operands[0], *needed[1:]))
    readers = Counter(value for step in steps for value in step.call.operands)
    wanted: dict[str, list[Maps]] = {}
    _want(wanted, mean.operands[1:], needed[1:])
    for number in range(place - 1, -1, -1):
        if wanted.keys().isdisjoint(made := steps[number].call.outputs):
            continue
        regions = wanted.pop(made[0], [])
        if len(made) > 1 or len({*regions}) > 1 or len(regions) < readers[made[0]]:  # one region cannot serve all readers
            return None
        steps[number] = found = _reading(steps[number], regions[0], values)
        _want(wanted, found.call.operands, found.operands)
    if not wanted.keys() <= {*given}:
        return None
    inputs = _inputs(program, steps)
    return None if inputs is None else replace(program, steps=tuple(steps), inputs=inputs)


def _want(wanted: dict[str, list[Maps]], names: Sequence[str], maps: Sequence[Maps]) -> None:
    for name, own in zip(names, maps, strict=True):
        wanted.setdefault(name, []).append(own)


def _each_once(labels: Maps, count: int) -> bool:
    """Whether tiles of these factors share labels out: each factor cuts one dimension, exactly."""
    cutting = [dim for dim in labels if dim.factor is not None]
    return all(dim.exact for dim in cutting) and sorted(dim.factor or 0 for dim in cutting) == [*range(count)]


def _reading(step: ProgramStep, needed: Maps, values: Mapping[str, Value]) -> ProgramStep:
    """The call as it makes a region of its only output that holds what is needed, and little more."""
    rule = step.rule
    parts = dict[int, DimMap]()
    for own, wanted in zip(rule.outputs[0], needed, strict=True):
        if own.factor is not None:
            size = rule.factors[own.factor][1]
            found = _part(own, wanted, size)
            parts[own.factor] = found if parts.get(own.factor, found) == found else unsplit(size)
    change = {factor: parts.get(factor, unsplit(size)) for factor, (_, size) in enumerate(rule.factors)}

    def over(names: Sequence[str], maps: Sequence[Maps]) -> tuple[Maps, ...]:
        return tuple(simplified(compose_all(own, change), values[name].shape) for name, own in zip(names, maps, strict=True))

    return replace(step, operands=over(step.call.operands, rule.operands), outputs=over(step.call.outputs, rule.outputs))


def _part(made: DimMap, needed: DimMap, size: int) -> DimMap:
    """Which part of a factor of a rule has to be computed, so that the dimension that it makes holds what is needed of it."""
    if not made.exact or (needed.factor is None and needed.scale) or needed.scale % made.scale:
        return unsplit(size)
    return DimMap(needed.factor, needed.scale // made.scale, needed.lo // made.scale, -(-needed.hi // made.scale))


def _inputs(program: OperatorProgram, steps: Sequence[ProgramStep]) -> tuple[tuple[str, Maps], ...] | None:
    """The inputs as changed calls read them, in the operator's order; None if one is read in two ways, or a parameter otherwise."""
    changed: dict[tuple[str, Maps], Maps] = {}
    for before, after in zip(program.steps, steps, strict=True):
        for name, old, new in zip(before.call.operands, before.operands, after.operands, strict=True):
            if changed.setdefault((name, old), new) != new:
                return None
    if any(changed[key] != key[1] for key in program.parameters):
        return None
    return tuple([(name, changed[name, maps]) for name, maps in program.inputs])


def find_loss_terms(model: TracedModel) -> Mapping[str, float]:
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


def _coefficients(model: TracedModel, operators: Sequence[int], entering: Sequence[str]) -> dict[str, float]:
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
