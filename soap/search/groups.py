"""Repeated layers: operators that are the same computation at another depth of the model."""

from __future__ import annotations

import re
from collections.abc import Hashable

from soap.model.graph import Operator, OperatorGraph

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
