"""Operators that differ only in names, such as those of repeated layers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from soap.model.graph import Operator, OperatorGraph


def alike_operators(graph: OperatorGraph, *, footprints: bool = True) -> list[int]:
    """[position]: the position of the first operator that differs from this one only in names; without ``footprints``, which are found when
    they are first asked for, perhaps in the memory that it takes as well."""
    numbers = {tensor.name: i for i, tensor in enumerate(graph.parameters)}
    takes = graph.alike_footprints if footprints else [0] * len(graph.operators)
    classes: dict[Hashable, int] = {}
    return [classes.setdefault((takes[i], _likeness(graph, op, numbers)), i) for i, op in enumerate(graph.operators)]


def _likeness(graph: OperatorGraph, op: Operator, numbers: Mapping[str, int]) -> Hashable:
    """A value that is equal for operators that differ only in names and footprints."""
    operands = [
        [(o.dims, t.shape, t.dtype, t.itemsize, t.kind, t.requires_grad) for o in own for t in (graph.tensors[o.tensor],)]
        for own in (op.inputs, op.parameters, op.outputs)
    ]
    same = [[own.index(o) for o in own] for own in (op.inputs, op.parameters)]  # an operand that is there twice
    order = sorted(range(len(op.parameters)), key=lambda k: numbers[op.parameters[k].tensor])
    alone = [len({user for user, _ in graph.parameter_users[o.tensor]}) == 1 for o in op.parameters]
    backward = graph.needs_backward(op)
    position = graph.index[op.name]
    lookups = (own for o in op.parameters if o.tensor in graph.sparse for own in graph.sparse[o.tensor].lookups)
    rows = [(own.parameter, own.indices, own.weighed) for own in lookups if own.operator == position]
    touched = [(graph.sparse[o.tensor].weighed, graph.sparse[o.tensor].touched) for o in op.parameters if o.tensor in graph.sparse]
    calls = len(op.calls), op.views
    figures = (op.flops, op.saved_bytes, calls, op.partitionable, op.arithmetic, op.skipped_share, op.fused_bytes, op.drawn)
    return repr((backward, rows, touched, order, alone, op.kind, op.factors, operands, same, figures))
