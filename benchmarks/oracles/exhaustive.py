"""The best of all strategies of a small space: the oracle for the search's optimality.

``exhaustive_search`` evaluates every strategy. ``branch_and_bound`` decides operator by operator, those with most to compute and to update
first, leaves out what ``partial`` shows not to be better than the best so far, and evaluates the rest: the same optimum, for
larger spaces. ``best_neighbour`` looks only at what differs in one thing.

The space is all degrees (every number from 1 to the size) and replicas with at most as many tiles as devices, on the structured
placements of ``soap.search.space.placements``: aligned blocks and even strides of devices, with the split axes in every order, and
single tiles on any device. Synchronization methods stay at their default.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from benchmarks.oracles.partial import UNDECIDED, PartialBound
from soap.cluster.topology import Topology
from soap.errors import InfeasibleError, StrategyError
from soap.model.graph import OperatorGraph
from soap.search.metropolis import Evaluator
from soap.search.space import MAX_GRIDS, Space, build_space
from soap.simulator.costs import CostModel
from soap.strategy.config import OpConfig, Strategy, SyncConfig

MAX_STRATEGIES = 200_000
MAX_NODES = 5_000_000
"""Branch and bound looks at most at so many partial strategies."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best strategy that fits, and among how many. Among equals it is the first one in the order of enumeration."""

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
    """The optimum by evaluating everything. StrategyError if there are more than ``limit`` strategies."""
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


def branch_and_bound(
    space: Space,
    topology: Topology,
    costs: CostModel,
    evaluator: Evaluator,
    *,
    incumbent: Strategy | None = None,
    limit: int = MAX_NODES,
) -> Optimum:
    """The optimum of the structured configurations of ``space``. ``evaluator`` simulates with these costs on this cluster.
    ``incumbent``: a good strategy of the space that fits, so that much can be left out from the beginning; the optimum is at most as
    slow. ``Optimum.evaluations`` counts simulations. StrategyError if it would have to look at more than ``limit`` partial strategies,
    InfeasibleError if nothing fits into memory."""
    search = _Branching(PartialBound(space, topology, costs), evaluator, limit)
    if incumbent is not None:
        search.compare(incumbent)
    search.decide(0, [UNDECIDED] * len(space.operators))
    if search.best is None:
        name = space.graph.name
        raise InfeasibleError(f"no strategy of model {name!r} fits into memory: take devices with more memory or a smaller batch")
    return Optimum(search.best, search.best_ns, search.evaluations)


class _Branching:
    """One search by branch and bound, depth first, the most promising configuration first."""

    def __init__(self, bound: PartialBound, evaluator: Evaluator, limit: int) -> None:
        self.bound, self.evaluator, self.limit = bound, evaluator, limit
        self.graph, self.choices, self.order = bound.choices.graph, bound.choices.of, bound.order()
        self.best: Strategy | None = None
        self.best_ns, self.evaluations, self.nodes = 0, 0, 0

    def compare(self, strategy: Strategy) -> None:
        """Evaluate a strategy, and keep it if it is the best."""
        cost_ns = self.evaluator.makespan_ns(strategy)
        self.evaluations += 1
        if self._may_win(cost_ns) and self.evaluator.overflow_bytes(strategy) == 0:
            self.best, self.best_ns = strategy, cost_ns

    def decide(self, depth: int, chosen: list[int]) -> None:
        """Try all configurations of the next operator, beside those that are chosen already."""
        if depth == len(self.order):
            configs = zip(self.graph.operators, self.choices, chosen, strict=True)
            self.compare(Strategy({op.name: own[choice].config for op, own, choice in configs}))
            return
        position = self.order[depth]
        options: list[tuple[int, int]] = []
        for choice in range(len(self.choices[position])):
            chosen[position] = choice
            options.append((self.bound.bound_ns(chosen), choice))
        self.nodes += len(options)
        if self.nodes > self.limit:
            raise StrategyError(
                f"model {self.graph.name!r}: more than {self.limit} partial strategies to look at; "
                "use the search, or fewer operators or devices"
            )
        for bound_ns, choice in sorted(options):
            if not self._may_win(bound_ns):
                break
            chosen[position] = choice
            self.decide(depth + 1, chosen)
        chosen[position] = UNDECIDED

    def _may_win(self, cost_ns: int) -> bool:
        return self.best is None or cost_ns < self.best_ns


class Neighbour(NamedTuple):
    """A strategy that differs in one operator's configuration, or one parameter's synchronization."""

    name: str
    config: OpConfig | SyncConfig
    cost_ns: int


def best_neighbour(evaluator: Evaluator, space: Space, strategy: Strategy) -> Neighbour | None:
    """The quickest strategy that fits, beats this one, and differs from it in one operator's structured configuration or one
    parameter's synchronization; None if there is none. Among equals the first one in the order of the graph. A locally optimal strategy
    has none."""
    best_ns, best = evaluator.makespan_ns(strategy), None
    for name, choice, neighbour in _neighbours(space, strategy):
        cost_ns = evaluator.makespan_ns(neighbour)
        if cost_ns < best_ns and evaluator.overflow_bytes(neighbour) == 0:
            best_ns, best = cost_ns, Neighbour(name, choice, cost_ns)
    return best


def _neighbours(space: Space, strategy: Strategy) -> Iterator[tuple[str, OpConfig | SyncConfig, Strategy]]:
    """All that differ in one thing, which may be as it was: operators first, then parameters."""
    for op, own in zip(space.graph.operators, space.operators, strict=True):
        for structured in own.structured():
            config = strategy.operators[op.name].placed_like(structured)
            yield op.name, config, strategy.with_operator(op.name, config)
    for name, syncs in space.syncs.items():
        yield from ((name, sync, strategy.with_parameter(name, sync)) for sync in syncs)
