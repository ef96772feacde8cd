"""What becomes of what an operator keeps between its forward and its backward pass: it stays on the device, unless its configuration says
that it is made again (``recompute``) or that its host keeps it (``offload``). Which operators may offload, and how both are edited.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from soap.errors import StrategyError
from soap.model.graph import RECURRENT_KINDS, Operator, OperatorGraph
from soap.strategy import recomputation

if TYPE_CHECKING:
    from soap.strategy.config import OpConfig, Strategy

OFFLOADED = len(recomputation.LEVELS)
"""The mark of what the host keeps. Marks say what becomes of what an operator keeps between its passes; the others are
``recomputation.LEVELS``."""


def mark_of(config: OpConfig) -> int:
    """What becomes of what an operator keeps."""
    return OFFLOADED if config.offload else config.recompute


def with_mark(config: OpConfig, mark: int) -> OpConfig:
    """The configuration with this mark; itself if it has it already."""
    offload = mark == OFFLOADED
    return config if mark_of(config) == mark else replace(config, recompute=recomputation.STAYS if offload else mark, offload=offload)


def with_each_mark(strategy: Strategy, marks: Mapping[str, int]) -> Strategy:
    """The strategy in which these operators have these marks."""
    return strategy.with_changes({name: with_mark(strategy.operators[name], mark) for name, mark in marks.items()})


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


def require_kept(graph: OperatorGraph, op: Operator, config: OpConfig) -> None:
    """StrategyError if an operator is to be recomputed, or to offload, that must not."""
    recomputation.require_repeatable(graph, op, config.recompute)
    why = refusal(graph, op) if config.offload else None
    if why is not None:
        raise StrategyError(f"operator {op.name!r} is marked to offload what it keeps, but {why}; expected offload false")


def away(graph: OperatorGraph, strategy: Strategy, names: Iterable[str] | None = None) -> Strategy:
    """The strategy in which these operators offload what they keep, instead of keeping it or making it again; by default those of all
    ``recomputation.runs_of`` the graph that may."""
    able = offloadable(graph)
    chosen = [name for run in recomputation.runs_of(graph) for name in run if name in able] if names is None else names
    return with_offload(strategy, chosen, True)


def with_offload(strategy: Strategy, names: Iterable[str], offload: bool) -> Strategy:
    """The strategy in which these operators offload what they keep, or do not. Those that do are not recomputed."""
    return with_each_mark(strategy, {name: OFFLOADED if offload else strategy.operators[name].recompute for name in names})
