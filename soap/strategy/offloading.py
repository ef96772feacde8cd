"""Which operators may offload what they keep between their forward and their backward pass: their hosts keep it (``OpConfig.offload``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from soap.model.graph import RECURRENT_KINDS, Operator, OperatorGraph
from soap.strategy.recomputation import runs_of

if TYPE_CHECKING:
    from soap.strategy.config import Strategy


def refusal(graph: OperatorGraph, op: Operator) -> str | None:
    """Why an operator must not offload what it keeps; None if it may."""
    if graph.index[op.name] not in graph.backward_operators:
        return "it has no backward pass, and keeps nothing"
    if not op.partitionable:
        return "it has no rule, so that nobody knows what it keeps"
    if op.kind in RECURRENT_KINDS:
        return "its library keeps a workspace that cannot be taken away"
    rows = [operand.tensor for operand in op.parameters if operand.tensor in graph.sparse]
    return f"it looks rows up in the sparse parameter {rows[0]!r}" if rows else None


def offloadable(graph: OperatorGraph) -> frozenset[str]:
    """The names of the operators that may offload what they keep."""
    return frozenset(op.name for op in graph.operators if refusal(graph, op) is None)


def away(graph: OperatorGraph, strategy: Strategy, names: Iterable[str] | None = None) -> Strategy:
    """The strategy in which these operators offload what they keep, instead of keeping it or making it again; by default those of all
    ``recomputation.runs_of`` the graph that may."""
    able = offloadable(graph)
    chosen = [name for run in runs_of(graph) for name in run if name in able] if names is None else names
    return with_offload(strategy, chosen, True)


def with_offload(strategy: Strategy, names: Iterable[str], offload: bool) -> Strategy:
    """The strategy in which these operators offload what they keep, or do not. Those that do have no other mark."""
    return strategy.with_changes({name: strategy.operators[name].marked("offload", offload) for name in names})
