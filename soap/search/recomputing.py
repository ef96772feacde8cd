"""Recomputation as a choice of the search: which operators may be marked, alone or by runs, and starts that do with little memory.

A plan that fits never gains time by recomputing, so this is a part of the space only where memory binds, or if the user asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from soap.cluster.topology import DeviceType, Topology
from soap.model.graph import OperatorGraph
from soap.plan.tiling import Tile, made_bytes, tiles_of
from soap.search.space import Marked, Space
from soap.search.starts import Start, are_allowed, memory_binds
from soap.search.to_fit import Budgeted, Step, bases_of, fewest
from soap.simulator.costs import CostModel, light_ns
from soap.simulator.memory.footprint import kept_share, product_share
from soap.strategy.classical import RECOMPUTED as STARTS
from soap.strategy.config import Strategy
from soap.strategy.named import MOST_SAVING, SAVING_MOST_FOR_LITTLE, named
from soap.strategy.recomputation import LIGHT, RECOMPUTED, level_at, recomputed, refusal, run_levels, with_repeatable_levels

if TYPE_CHECKING:
    from soap.simulator.incremental import IncrementalSimulator


def with_recomputation(space: Space) -> Space:
    """The space in which operators may be recomputed: each that the user has not pinned by itself, and each of ``runs_of`` as a whole."""
    graph = space.graph
    single = [[(op, RECOMPUTED, level_at(op, LIGHT))] for op in graph.operators if refusal(graph, op) is None]
    levels = zip(*(run_levels(graph, extent) for extent in (RECOMPUTED, LIGHT)), strict=True)
    runs = [[(graph.operators[graph.index[name]], whole[name], light[name]) for name in whole] for whole, light in levels]
    return space.with_sets("recompute", ([Marked(graph.index[op.name], *extents) for op, *extents in own] for own in (*single, *runs)))


def recompute_to_fit(
    graph: OperatorGraph, topology: Topology, base: Strategy, costs: CostModel, share: Callable[[Strategy], float]
) -> Budgeted:
    """``base`` with as much recomputed as it takes to fit, run by run: all of a run, or all but its products (``to_fit.fewest``)."""
    levels = {extent: run_levels(graph, extent) for extent in (RECOMPUTED, LIGHT)}
    pairs = enumerate(zip(levels[LIGHT], levels[RECOMPUTED], strict=True))
    steps = [step for number, (light, whole) in pairs for step in _steps(graph, topology, base, number, light, whole, costs)]

    def made(extents: Mapping[int, int]) -> Strategy:
        chosen = (levels[extent][run] for run, extent in extents.items())
        return with_repeatable_levels(graph, base, {name: level for own in chosen for name, level in own.items()})

    return fewest(steps, len(levels[RECOMPUTED]), made, share)


def _steps(
    graph: OperatorGraph,
    topology: Topology,
    strategy: Strategy,
    number: int,
    light: Mapping[str, int],
    whole: Mapping[str, int],
    costs: CostModel,
) -> Iterator[Step]:
    """The steps of a run: but for its products, then all of it; or all of it at once, if a fraction of that would be the better first step
    (then the way between both is no corner of what bytes cost)."""
    first, both = (_figures(graph, topology, strategy, levels, costs) for levels in (light, whole))
    more_bytes, more_ns = both[0] - first[0], both[1] - first[1]
    if more_bytes <= 0 or first[0] * max(1, more_ns) <= more_bytes * max(1, first[1]):
        yield Step(number, RECOMPUTED, *both)
    else:
        yield Step(number, LIGHT, *first)
        yield Step(number, RECOMPUTED, more_bytes, max(0, more_ns))


def _figures(graph: OperatorGraph, topology: Topology, strategy: Strategy, levels: Mapping[str, int], costs: CostModel) -> tuple[int, int]:
    """(bytes that operators make and do not keep, nanoseconds of their second forward passes), each on the device where it is most."""
    kept, times = [0] * topology.device_count, [0] * topology.device_count
    for name, level in levels.items():
        position = graph.index[name]
        known: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}  # of tiles of equal lengths on devices of a type
        for tile in tiles_of(graph, position, strategy.operators[name]):
            kind = topology.devices[tile.device].type
            key = kind.name, tuple([stop - start for start, stop in tile.intervals])
            if key not in known:
                known[key] = _tile_figures(graph, tile, kind, level, costs)
            kept[tile.device] += known[key][0]
            times[tile.device] += known[key][1]
    return max(kept), max(times)


def _tile_figures(graph: OperatorGraph, tile: Tile, kind: DeviceType, level: int, costs: CostModel) -> tuple[int, int]:
    """``_figures`` of one tile."""
    op = graph.operators[tile.operator]
    own = kept_share(graph, op, tile.intervals)
    if level == LIGHT:
        return max(0, own - product_share(graph, op, tile.intervals)), light_ns(costs, graph, tile, kind)
    return own + sum(made_bytes(graph, op, tile, k) for k in range(len(op.outputs))), costs.forward_ns(graph, tile, kind)


def recomputing_starts(
    space: Space, topology: Topology, evaluator: IncrementalSimulator, starts: Sequence[Start], *, wanted: bool | None
) -> tuple[Mapping[str, Strategy], Mapping[str, Budgeted]] | None:
    """(further starts that recompute, those among them that recompute as few runs as fit); None if the search is to leave recomputation
    alone. ``wanted``: True: in any case; None: if memory binds; False: never. ``starts``: those that are evaluated."""
    if wanted is False or not (wanted or memory_binds(starts)):
        return None
    graph = space.graph
    found = {name: make(graph, topology) for name, make in STARTS.items()}
    budgeted: dict[str, Budgeted] = {}
    for name in (SAVING_MOST_FOR_LITTLE, MOST_SAVING):  # the last resorts of those that leave operators where they are
        if name not in {start.name for start in starts} and are_allowed((saving := named(name, graph, topology)).parameters, space.syncs):
            found[name] = saving
    for start in bases_of(starts, evaluator.peak_share, lambda strategy: recomputed(graph, strategy)):
        made = recompute_to_fit(graph, topology, start.strategy, evaluator.shared.costs, evaluator.peak_share)
        found[f"{start.name}, recompute"] = made.strategy
        budgeted[f"{start.name}, recompute"] = made
    return found, budgeted
