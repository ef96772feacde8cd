"""Which operators are alike: those that differ only in names, those of repeated layers, and by their names those of one layer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping

from soap.model.graph import Operator, OperatorGraph


def alike_operators(graph: OperatorGraph, *, footprints: bool = True) -> list[int]:
    """[position]: the position of the first operator that differs from this one only in names; without ``footprints``, which are found when
    they are first asked for, perhaps in the memory that it takes as well."""
    if footprints not in graph.alike:
        numbers, classes = {tensor.name: i for i, tensor in enumerate(graph.parameters)}, dict[Hashable, int]()
        found: Iterable[Hashable] = (_likeness(graph, op, numbers) for op in graph.operators)
        if footprints:
            found = zip(graph.alike_footprints, alike_operators(graph, footprints=False), strict=True)
        graph.alike[footprints] = [classes.setdefault(own, i) for i, own in enumerate(found)]
    return graph.alike[footprints]


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
    computed = op.arithmetic, op.narrowing_bytes
    figures = (op.flops, op.saved_bytes, calls, op.partitionable, computed, op.skipped_share, op.fused_bytes, op.drawn)
    return repr((backward, rows, touched, order, alone, op.kind, op.factors, operands, same, figures))


_NUMBER = re.compile(r"\d+")


def repeated_groups(graph: OperatorGraph) -> tuple[tuple[int, ...], ...]:
    """Disjoint groups (two or more positions, ascending) of operators that differ in nothing but a number in their name.

    Operators of a group have equal kind, factors, operand maps and tensor shapes. Names that differ in one number come first
    (the larger group wins); what is left is grouped by names that are equal once all numbers are masked.
    """
    candidates: dict[Hashable, list[int]] = {}
    for i, op in enumerate(graph.operators):
        signature = _signature(graph, op)
        for masked in _masked_names(op.name):
            candidates.setdefault((masked, signature), []).append(i)
    fallback: dict[Hashable, list[int]] = {}
    for i, op in enumerate(graph.operators):
        fallback.setdefault((_NUMBER.sub("#", op.name), _signature(graph, op)), []).append(i)
    taken: set[int] = set()
    groups: list[tuple[int, ...]] = []
    for pool in (candidates, fallback):
        for members in sorted(pool.values(), key=lambda m: (-len(m), m)):
            left = tuple(i for i in members if i not in taken)
            if len(left) > 1:
                groups.append(left)
                taken.update(left)
    return tuple(sorted(groups))


def _masked_names(name: str) -> list[str]:
    """The name with one of its numbers masked, once for each number."""
    return [f"{name[: m.start()]}#{name[m.end() :]}" for m in _NUMBER.finditer(name)]


def _signature(graph: OperatorGraph, op: Operator) -> Hashable:
    """All properties that must be equal for two operators to be the same computation."""
    operands = tuple(
        tuple((operand.dims, graph.tensors[operand.tensor].shape, graph.tensors[operand.tensor].dtype) for operand in group)
        for group in (op.inputs, op.parameters, op.outputs)
    )
    return (op.kind, op.factors, operands, op.flops, op.partitionable)


_LAYER = re.compile(r"(?P<prefix>(?:[^.]+\.)*?)(?P<number>\d+)(?:\.|$)")


def layer_of(name: str) -> tuple[str, int] | None:
    """The layer that an operator or parameter may be in, as what stands before the first number in its name, and that number."""
    found = _LAYER.match(name)
    return None if found is None else (found["prefix"], int(found["number"]))


def layers_of(graph: OperatorGraph) -> tuple[str | None, ...]:
    """By operator, the name of its layer, such as ``blocks.0``; None if it is in none of several."""
    found = [layer_of(op.name) for op in graph.operators]
    repeated = {prefix for prefix, count in Counter(prefix for prefix, _ in set(filter(None, found))).items() if count > 1}
    return tuple(None if one is None or one[0] not in repeated else f"{one[0]}{one[1]}" for one in found)
