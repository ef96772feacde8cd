"""Which parameters are sparse: found from how they are used, not from annotations."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from soap.model.graph import OperatorGraph, TensorKind
from soap.model.sparse_access import Lookup, RowAccess, uniform
from soap.tracing.calls import Value
from soap.tracing.compiled import OperatorProgram, ProgramStep


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
