"""Every strategy of a tiny space, evaluated: the oracle for the search's optimality.

The space is all degrees (every number from 1 to the size) and replicas with at most as many tiles as devices, on the structured
placements of ``soap.search.space.placements``: aligned blocks and even strides of devices, with the split axes in every order, and
single tiles on any device. Synchronization methods stay at their default.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from soap.errors import InfeasibleError, StrategyError
from soap.graph import OperatorGraph
from soap.search.metropolis import Evaluator
from soap.search.space import MAX_GRIDS, Space, build_space
from soap.strategy import Strategy

MAX_STRATEGIES = 200_000


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best strategy that fits (the first one in the order of enumeration among equals), of how many."""

    strategy: Strategy
    cost_ns: int
    evaluations: int


def strategy_count(space: Space) -> int:
    """Number of strategies made of structured configurations."""
    return prod(operator.structured_count for operator in space.operators)


def all_strategies(space: Space) -> Iterator[Strategy]:
    """All strategies made of structured configurations, in a fixed order."""
    names = [op.name for op in space.graph.operators]
    for configs in product(*(operator.structured() for operator in space.operators)):
        yield Strategy(dict(zip(names, configs, strict=True)))


def exhaustive_search(graph: OperatorGraph, device_count: int, evaluator: Evaluator, *, limit: int = MAX_STRATEGIES) -> Optimum:
    """The optimum by evaluating everything. StrategyError if that would be more than ``limit`` strategies."""
    space = build_space(graph, device_count, every_degree=True)
    count = strategy_count(space)
    if count > limit or any(len(operator.grids) >= MAX_GRIDS for operator in space.operators):
        raise StrategyError(
            f"model {graph.name!r} on {device_count} devices has {count} strategies or more; expected at most {limit} to try them all: "
            "use the search, or fewer operators or devices"
        )
    best: tuple[int, int] | None = None
    found: Strategy | None = None
    for strategy in all_strategies(space):
        cost_ns, overflow_bytes = evaluator.makespan_ns(strategy), evaluator.overflow_bytes(strategy)
        if best is None or (overflow_bytes, cost_ns) < best:
            best, found = (overflow_bytes, cost_ns), strategy
    assert best is not None and found is not None
    if best[0] > 0:
        raise InfeasibleError(
            f"none of {count} strategies of model {graph.name!r} fits into memory: the closest lacks {best[0]} bytes; "
            "take devices with more memory or a smaller batch"
        )
    return Optimum(found, best[1], count)
