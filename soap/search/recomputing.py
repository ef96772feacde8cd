"""Recomputation as a choice of the search: which operators may be marked, alone or by runs, and starts that do with little memory.

A plan that fits never gains time by recomputing, so this is a part of the space only where memory binds, or if the user asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import cast

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.tiling import made_bytes, tiles_of
from soap.search.metropolis import Evaluator
from soap.search.space import Space
from soap.search.starts import Start, are_allowed
from soap.simulator.costs import CostModel
from soap.simulator.memory.footprint import kept_share
from soap.strategy.classical import RECOMPUTED
from soap.strategy.config import Strategy
from soap.strategy.named import MOST_SAVING, named
from soap.strategy.recomputation import recomputed, repeatable, runs_of

MOST_BASES = 3
"""So many of the starts that do not fit, the fastest ones, are recomputed until they do."""


def with_recomputation(space: Space) -> Space:
    """The space in which operators may be recomputed: each that the user has not pinned by itself, and each of ``runs_of`` as a whole."""
    graph = space.graph
    pinned = {i for i, own in enumerate(space.allowed) if own is not None and (own.recompute is not None or own.offload)}
    single = [(graph.index[name],) for name in sorted(repeatable(graph), key=graph.index.__getitem__)]
    runs = [tuple(graph.index[name] for name in run) for run in runs_of(graph)]
    chosen = (tuple(i for i in own if i not in pinned) for own in (*single, *runs))
    return replace(space, recompute=tuple(dict.fromkeys(own for own in chosen if own)))


@dataclass(frozen=True)
class Budgeted:
    """A strategy that recomputes as few runs as it takes to fit. ``added_ns``: what their second forward passes take on the busiest device.
    ``least_ns``: what the runs take that are too few: if a run saves as many bytes and costs as much whatever others do, no choice of runs
    that fits takes less (the linear relaxation of the knapsack, whose best fractional answer goes by bytes per time)."""

    strategy: Strategy
    runs: int
    of_runs: int
    added_ns: int
    least_ns: int

    @property
    def gap(self) -> float:
        """By what share ``added_ns`` may exceed the least of this kind; infinite if nothing is known of that."""
        return self.added_ns / self.least_ns - 1 if self.least_ns else inf


def recompute_to_fit(
    graph: OperatorGraph, topology: Topology, base: Strategy, costs: CostModel, overflow_bytes: Callable[[Strategy], int]
) -> Budgeted:
    """``base`` with as many runs recomputed as it takes to fit: those first that save most bytes for their time, the earliest among equals,
    because they hold theirs the longest. All of them if that is not enough. ``overflow_bytes``: what a strategy lacks, asked about
    log2(number of runs) times."""
    runs = runs_of(graph)
    figures = [_figures(graph, topology, base, run, costs) for run in runs]
    order = sorted(range(len(runs)), key=lambda i: (-figures[i][0] / max(1, figures[i][1]), i))

    def first(count: int) -> Strategy:
        return recomputed(graph, base, [name for i in order[:count] for name in runs[i]])

    low, high = 0, len(runs)  # ``high`` runs fit, or all do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if overflow_bytes(first(middle)) == 0 else (middle, high)
    added = [figures[i][1] for i in order]
    return Budgeted(first(high), high, len(runs), sum(added[:high]), sum(added[: max(0, high - 1)]))


def _figures(graph: OperatorGraph, topology: Topology, strategy: Strategy, run: Sequence[str], costs: CostModel) -> tuple[int, int]:
    """(bytes that a run makes and keeps, nanoseconds of its forward pass), each on the device where it is most."""
    kept, times = [0] * topology.device_count, [0] * topology.device_count
    for name in run:
        position = graph.index[name]
        op = graph.operators[position]
        for tile in tiles_of(graph, position, strategy.operators[name]):
            size = kept_share(graph, op, tile.intervals)
            kept[tile.device] += size + sum(made_bytes(graph, op, tile, k) for k in range(len(op.outputs)))
            times[tile.device] += costs.forward_ns(graph, tile, topology.devices[tile.device].type)
    return max(kept), max(times)


def memory_binds(starts: Sequence[Start]) -> bool:
    """Whether a start that does not fit is faster than all that do."""
    best_ns = min((start.cost_ns for start in starts if start.fits), default=inf)
    return any(not start.fits and start.cost_ns < best_ns for start in starts)


def recomputing_starts(
    space: Space, topology: Topology, evaluator: Evaluator, starts: Sequence[Start], *, wanted: bool | None
) -> tuple[Mapping[str, Strategy], Mapping[str, Budgeted]] | None:
    """(further starts that recompute, those among them that recompute as few runs as fit); None if the search is to leave recomputation
    alone. ``wanted``: True: in any case; None: if memory binds; False: never. ``starts``: those that are evaluated."""
    if wanted is False or not (wanted or memory_binds(starts)):
        return None
    graph, costs = space.graph, cast("CostModel | None", getattr(evaluator, "engine_costs", None))
    found = {name: make(graph, topology) for name, make in RECOMPUTED.items()}
    budgeted: dict[str, Budgeted] = {}
    most_saving = named(MOST_SAVING, graph, topology)
    if are_allowed(most_saving.parameters, space.syncs):  # the last resort of those that leave operators where they are
        found[MOST_SAVING] = most_saving

    def overflow_bytes(strategy: Strategy) -> int:
        evaluator.makespan_ns(strategy)  # then bounds know the strategy, and mostly decide
        return evaluator.overflow_bytes(strategy)

    lacking = sorted((start for start in starts if not start.fits), key=lambda start: start.cost_ns)[:MOST_BASES]
    for start in lacking:
        if costs is None:
            break
        made = recompute_to_fit(graph, topology, start.strategy, costs, overflow_bytes)
        found[f"{start.name}, recompute"] = made.strategy
        budgeted[f"{start.name}, recompute"] = made
    return found, budgeted
