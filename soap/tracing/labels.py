"""Facts about a program's values, found by following them through its calls: which carry a gradient, which parameters are also read
without one or are sparse, and which dimension is the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod

import torch

from soap.errors import ModelError
from soap.model.dtypes import is_differentiable
from soap.model.graph import NEXT_STATE, OperatorGraph, TensorKind
from soap.model.sparse_access import Lookup, RowAccess, uniform
from soap.tracing.aliasing import may_alias
from soap.tracing.calls import Call, Program, Value
from soap.tracing.compiled import OperatorProgram, ProgramStep
from soap.tracing.fuse import Group


def gradients(program: Program, trainable: Mapping[str, bool]) -> set[str]:
    """Values that carry a gradient. ``trainable``: by canonical parameter name."""
    result = {value for value, name in program.parameters.items() if trainable[name]}
    for call in program.calls:
        if any(name in result for name in call.operands):
            result.update(_carrying(call, program))
    return result


def read_apart(program: Program) -> frozenset[str]:
    """Parameters of which a call reads the values, or a view of them, without passing a gradient back. So they may still be read when
    their gradients are complete: a backward pass may keep a detached view."""
    origins = {value: {name} for value, name in program.parameters.items()}
    found: set[str] = set()
    for call in program.calls:
        own = set[str]().union(*(origins[name] for name in call.operands if name in origins))
        if not own:
            continue
        if not _carrying(call, program):
            found |= own
        elif len(call.operands) == 1 and (not isinstance(call.target, torch._ops.OpOverload) or may_alias(call.target)):
            origins.update(dict.fromkeys(call.outputs, own))
    return frozenset(found)


def _carrying(call: Call, program: Program) -> list[str]:
    """The outputs that carry a gradient if an operand does."""
    if call.kind in ("detach", NEXT_STATE):
        return []
    return [name for name in call.outputs if is_differentiable(program.values[name].dtype)]


def batch_dimensions(program: Program, groups: Sequence[Group], given: Mapping[str, int]) -> dict[str, int]:
    """Value -> the dimension that carries the batch (as its major part), followed from the inputs through the groups. ``given``: input
    name -> batch dimension, -1 for none. By default it is dimension 0 of the inputs in which that has the most common size."""
    labels = _input_dimensions(program, given)
    for group in groups:
        for step in group.steps:
            operands = zip(step.call.operands, step.rule.operands, strict=True)  # not the group's: there it may be whole
            marked = {maps[labels[v]].factor for v, maps in operands if v in labels and maps} - {None}
            for value, maps in zip(step.call.outputs, step.rule.outputs, strict=True):
                for dim, m in enumerate(maps):
                    if m.factor in marked:
                        labels.setdefault(value, dim)
    return labels


def _input_dimensions(program: Program, given: Mapping[str, int]) -> dict[str, int]:
    shapes = {value: program.values[value].shape for value in program.inputs}
    for value, dim in given.items():
        if value not in shapes:
            raise ModelError(f"batch dimension given for {value!r}; the model's inputs are {', '.join(program.inputs)}")
        if not -1 <= dim < len(shapes[value]):
            raise ModelError(
                f"batch dimension {dim} of input {value!r} does not exist; its shape is {list(shapes[value])}: "
                "give 0 or more, or -1 if it has none"
            )
    labels = {value: dim for value, dim in given.items() if dim >= 0}
    others = [value for value, shape in shapes.items() if value not in given and shape]
    counted = Counter([shapes[v][d] for v, d in labels.items()] or [shapes[v][0] for v in others])
    if counted:
        batch = counted.most_common(1)[0][0]
        labels.update({value: 0 for value in others if shapes[value][0] == batch})
    return labels


def find_sparse(graph: OperatorGraph, programs: Mapping[str, OperatorProgram], values: Mapping[str, Value]) -> dict[str, RowAccess]:
    """Trainable parameters of which every use looks up rows by indices from the model's inputs, with all rows assumed equally likely.

    A parameter that is also used otherwise (an output layer tied to an embedding) has a dense gradient. Indices that operators compute
    do not exist when a step begins, so rows could not be brought in time: such parameters count as dense as well. So do those of which
    every step reads the same rows (position embeddings).
    """
    found = {}
    for tensor in graph.parameters:
        uses = graph.parameter_users.get(tensor.name, ()) if tensor.requires_grad and tensor.shape and tensor.shape[0] else ()
        lookups = [_lookup(graph, programs, values, position, place) for position, place in uses]
        known = [lookup for lookup in lookups if lookup is not None]
        if known and len(known) == len(lookups):
            found[tensor.name] = uniform(tensor.shape[0], known)
    return found


def _lookup(
    graph: OperatorGraph, programs: Mapping[str, OperatorProgram], values: Mapping[str, Value], position: int, place: int
) -> Lookup | None:
    """A use as a lookup; None if it is something else."""
    op = graph.operators[position]
    program = programs[op.name]
    value, maps = program.parameters[place]
    readers = [step for step in program.steps if any(read == (value, maps) for read in _reads(step))]
    if len(readers) != 1 or not readers[0].rule.looks_up or readers[0].call.operands[0] != value:
        return None
    if sum(name == value for name in readers[0].call.operands) > 1:
        return None
    indices = readers[0].call.operands[1]
    inputs = _inputs_behind(program, readers[0].operands[1], indices)
    kinds = {graph.tensors[op.inputs[k].tensor].kind for k in inputs}
    if TensorKind.INPUT not in kinds or TensorKind.ACTIVATION in kinds:
        return None
    return Lookup(position, place, inputs, prod(values[indices].shape))


def _reads(step: ProgramStep) -> list[tuple[str, object]]:
    return list(zip(step.call.operands, step.operands, strict=True))


def _inputs_behind(program: OperatorProgram, maps: object, value: str) -> tuple[int, ...]:
    """The operator's inputs (their places) from which a value is made."""
    made_by = {name: step for step in program.steps for name in step.call.outputs}
    wanted, seen, found = [(value, maps)], set[str](), set[int]()
    while wanted:
        name, own = wanted.pop()
        step = made_by.get(name)
        if step is None:
            found.update(k for k, read in enumerate(program.inputs) if read == (name, own))
        elif name not in seen:
            seen.add(name)
            wanted.extend(_reads(step))
    return tuple(sorted(found))
