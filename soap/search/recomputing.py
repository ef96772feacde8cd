"""Recomputation as a choice of the search: which operators may be marked, alone or by runs, and starts that do with little memory.

A plan that fits never gains time by recomputing, so this is a part of the space only where memory binds, or if the user asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple, cast

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.tiling import made_bytes, tiles_of
from soap.search.metropolis import Evaluator
from soap.search.space import Marked, Space
from soap.search.starts import Start, are_allowed
from soap.simulator.costs import CostModel, light_ns
from soap.simulator.memory.footprint import kept_share, product_share
from soap.strategy.classical import RECOMPUTED
from soap.strategy.config import Strategy
from soap.strategy.named import MOST_SAVING, SAVING_MOST_FOR_LITTLE, named
from soap.strategy.recomputation import ALL, LIGHT, level_at, refusal, run_levels, with_repeatable_levels

MOST_BASES = 3
"""So many of the starts that do not fit, the fastest ones, are recomputed until they do."""


def with_recomputation(space: Space) -> Space:
    """The space in which operators may be recomputed: each that the user has not pinned by itself, and each of ``runs_of`` as a whole."""
    graph = space.graph
    pinned = {i for i, own in enumerate(space.allowed) if own is not None and (own.recompute is not None or own.offload)}
    single = [[(op, ALL, level_at(op, LIGHT))] for op in graph.operators if refusal(graph, op) is None]
    levels = zip(*(run_levels(graph, extent) for extent in (ALL, LIGHT)), strict=True)
    runs = [[(graph.operators[graph.index[name]], whole[name], light[name]) for name in whole] for whole, light in levels]
    found = (tuple(Marked(graph.index[op.name], *extents) for op, *extents in own) for own in (*single, *runs))
    chosen = (tuple(each for each in own if each.position not in pinned) for own in found)
    return replace(space, recompute=tuple(dict.fromkeys(own for own in chosen if own)))


@dataclass(frozen=True)
class Budgeted:
    """A strategy that recomputes as little as it takes to fit, run by run: all of a run, or all but its products. ``runs``: how many it
    recomputes; ``selective``: of these, how many but for their products. ``added_ns``: what their second forward passes take on the busiest
    device. ``least_ns``: what is too little takes: if a run saves as many bytes and costs as much whatever others do, no choice that fits
    takes less (the linear relaxation of the knapsack, whose best fractional answer goes by bytes per time)."""

    strategy: Strategy
    runs: int
    selective: int
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
    """``base`` with as much recomputed as it takes to fit: first what saves most bytes for its time, the earliest among equals, because
    those hold theirs the longest. All of it if that is not enough. ``overflow_bytes``: what a strategy lacks, asked about log2(number of
    steps) times."""
    levels = {extent: run_levels(graph, extent) for extent in (ALL, LIGHT)}
    pairs = enumerate(zip(levels[LIGHT], levels[ALL], strict=True))
    steps = [step for number, (light, whole) in pairs for step in _steps(graph, topology, base, number, light, whole, costs)]
    order = sorted(steps, key=lambda step: (-step.saved_bytes / max(1, step.added_ns), step.run, step.extent))

    def first(count: int) -> dict[int, int]:
        return {step.run: step.extent for step in order[:count]}

    def made(count: int) -> Strategy:
        chosen = (levels[extent][run] for run, extent in first(count).items())
        return with_repeatable_levels(graph, base, {name: level for own in chosen for name, level in own.items()})

    low, high = 0, len(order)  # ``high`` steps fit, or all do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if overflow_bytes(made(middle)) == 0 else (middle, high)
    added_ns = [step.added_ns for step in order]
    extents = first(high)
    selective = sum(extent == LIGHT for extent in extents.values())
    return Budgeted(made(high), len(extents), selective, len(levels[ALL]), sum(added_ns[:high]), sum(added_ns[: max(0, high - 1)]))


class _Step(NamedTuple):
    """A run is recomputed to this extent: what that saves and costs beyond the step before it, on the device where it is most."""

    run: int
    extent: int
    saved_bytes: int
    added_ns: int


def _steps(
    graph: OperatorGraph,
    topology: Topology,
    strategy: Strategy,
    number: int,
    light: Mapping[str, int],
    whole: Mapping[str, int],
    costs: CostModel,
) -> Iterator[_Step]:
    """The steps of a run: but for its products, then all of it; or all of it at once, if a fraction of that would be the better first step
    (then the way between both is no corner of what bytes cost)."""
    first, both = (_figures(graph, topology, strategy, levels, costs) for levels in (light, whole))
    more_bytes, more_ns = both[0] - first[0], both[1] - first[1]
    if more_bytes <= 0 or first[0] * max(1, more_ns) <= more_bytes * max(1, first[1]):
        yield _Step(number, ALL, *both)
    else:
        yield _Step(number, LIGHT, *first)
        yield _Step(number, ALL, more_bytes, max(0, more_ns))


def _figures(
    graph: OperatorGraph, topology: Topology, strategy: Strategy, levels: Mapping[str, int], costs: CostModel
) -> tuple[int, int]:
    """(bytes that operators make and do not keep, nanoseconds of their second forward passes), each on the device where it is most."""
    kept, times = [0] * topology.device_count, [0] * topology.device_count
    for name, level in levels.items():
        position = graph.index[name]
        op = graph.operators[position]
        for tile in tiles_of(graph, position, strategy.operators[name]):
            own = kept_share(graph, op, tile.intervals)
            kind = topology.devices[tile.device].type
            if level == LIGHT:
                kept[tile.device] += max(0, own - product_share(graph, op, tile.intervals))
                times[tile.device] += light_ns(costs, graph, tile, kind)
            else:
                kept[tile.device] += own + sum(made_bytes(graph, op, tile, k) for k in range(len(op.outputs)))
                times[tile.device] += costs.forward_ns(graph, tile, kind)
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
    for name in (SAVING_MOST_FOR_LITTLE, MOST_SAVING):  # the last resorts of those that leave operators where they are
        saving = named(name, graph, topology)
        if are_allowed(saving.parameters, space.syncs):
            found[name] = saving
    lacking = sorted((start for start in starts if not start.fits), key=lambda start: start.cost_ns)[:MOST_BASES]
    for start in lacking:
        if costs is None:
            break
        made = recompute_to_fit(graph, topology, start.strategy, costs, overflow_of(evaluator))
        found[f"{start.name}, recompute"] = made.strategy
        budgeted[f"{start.name}, recompute"] = made
    return found, budgeted


def overflow_of(evaluator: Evaluator) -> Callable[[Strategy], int]:
    """What strategies lack, for ``recompute_to_fit``."""

    def overflow_bytes(strategy: Strategy) -> int:
        evaluator.makespan_ns(strategy)  # then bounds know the strategy, and mostly decide
        return evaluator.overflow_bytes(strategy)

    return overflow_bytes
