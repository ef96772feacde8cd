"""When everything in a played iteration takes place, as arrays next to those of the plan (``plan_arrays``). Times are in nanoseconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from soap.plan.plan import Plan
from soap.plan.tiling import Tile
from soap.simulator.memory.grouped import Bools, Longs, least, most, owners
from soap.simulator.memory.plan_arrays import PlanArrays, Sums
from soap.simulator.memory.played import KINDS, NONE, Played
from soap.simulator.memory.rank_order import RankOrder
from soap.simulator.tasks import TaskKind

NEVER = -1
"""In place of a start and an end: it does not take place."""

Span = tuple[int, int]
"""(start, end) of a task."""


class Spans(NamedTuple):
    """Starts and ends, NEVER where there is none.

    By tile: ``forward``, ``backward`` (not of ``unread_tiles``), ``weights``: of its weight gradients, if its backward pass is in two;
    ``again``: its second run, from when ranks begin it, and ``again_work_end``: when that has computed;
    ``let_go``: when all has gone that it keeps, if its mark says so (``Marked.kept_until``). ``segment``: the first tile of its segment, in
    the order in which ranks run it. ``begun``: when that segment's backward pass begins. ``light``: whether it keeps its outputs though it
    runs again. ``rows_start``, ``rows_end``: of each row of marks, by name. By carrier: ``brought``, ``returned``, ``gathered``: its
    second time. By reduction:
    ``summed``: when devices sum, and of a single device when its last tile runs; ``summed_back_start``: of the sum of gradients,
    ``again_summed``: of the second time.
    ``named``: by name of a task of a synchronization or an update; ``ready``: when all that it waits for is over. ``end``: of the step.
    """

    end: int
    forward_start: Longs
    forward_end: Longs
    backward_start: Longs
    backward_end: Longs
    weights_start: Longs
    weights_end: Longs
    again_start: Longs
    again_end: Longs
    again_work_end: Longs
    let_go: Longs
    rows_start: Mapping[str, Longs]
    rows_end: Mapping[str, Longs]
    segment: Longs
    begun: Longs
    light: Bools
    unread: Bools
    brought_start: Longs
    brought_end: Longs
    returned_start: Longs
    returned_end: Longs
    gathered_start: Longs
    gathered_end: Longs
    summed_start: Longs
    summed_end: Longs
    summed_back_start: Longs
    again_summed_start: Longs
    again_summed_end: Longs
    named: Mapping[str, Span]
    ready: Mapping[str, int]


def spans_of(run: Played, order: RankOrder, plan: Plan, arrays: PlanArrays) -> Spans:
    """When everything takes place. ``run``, ``order``: the iteration as ranks run it. ``arrays``: the plan's."""
    segments, goes_back = order.segments, run.backward != NONE
    begun = least(segments.number[goes_back], run.start[run.backward[goes_back]], len(segments.first), NEVER)
    unread = np.zeros(len(plan.tiles), np.bool_)
    unread[list(unread_tiles(plan))] = True
    light = np.zeros(len(plan.graph.operators), np.bool_)
    light[list(plan.light_operators)] = True
    starts, ends = np.append(run.start, NEVER), np.append(run.end, NEVER)  # the last one is that of NONE
    second = _second_runs(run, segments.number)
    second[:, unread] = NEVER
    let_go = np.full(len(plan.tiles), NEVER)
    for until in {own.kept_until for own in plan.marked.values() if own.kept_until}:
        positions = [position for position, own in plan.marked.items() if own.kept_until == until]
        let_go = np.where(np.isin(arrays.tiles.operator, positions), ends[run.rows[until]], let_go)
    tasks = {
        "forward": run.forward,
        "backward": np.where(unread, NONE, run.backward),
        "weights": np.where(unread, NONE, run.weights),
        "brought": run.brought,
        "returned": run.returned,
        "gathered": run.gathered,
        "again_summed": run.summed_again,
        "summed": np.where(run.summed == NONE, run.forward[_last_members(arrays.sums, run.end[run.forward])], run.summed),
    }
    return Spans(
        end=int(run.end.max(initial=0)),
        **{f"{name}_start": starts[own] for name, own in tasks.items()},
        **{f"{name}_end": ends[own] for name, own in tasks.items()},
        summed_back_start=starts[run.summed_back],
        again_start=second[0],
        again_work_end=second[1],
        again_end=second[2],
        let_go=let_go,
        rows_start={name: starts[own] for name, own in run.rows.items()},
        rows_end={name: ends[own] for name, own in run.rows.items()},
        segment=segments.first[segments.number],
        begun=begun[segments.number],
        light=goes_back & light[arrays.tiles.operator],
        unread=unread,
        named={name: (int(run.start[first]), int(run.end[last])) for name, (first, last) in run.named.items()},
        ready=_ready(run),
    )


def _second_runs(run: Played, segment: Longs) -> Longs:
    """[start, end of the work, end as it was played], by tile: the second runs as the runtime takes them. When a segment's first one
    begins, all follow."""
    found = np.full((3, len(segment)), NEVER)
    own = np.flatnonzero(run.again != NONE)
    own = own[np.lexsort((own, run.start[run.forward[own]], segment[own]))]
    start, end = run.start[run.again[own]], run.end[run.again[own]]
    took, of = end - start, segment[own]
    before = np.cumsum(took) - took
    low, first, step = start - before, np.flatnonzero(np.diff(of, prepend=NEVER)), 1
    low[first] = np.minimum.reduceat(start, first) - before[first]
    while (same := of[step:] == of[:-step]).any():  # until each has the least of those before it in its segment
        low[step:] = np.where(same, np.minimum(low[step:], low[:-step]), low[step:])
        step *= 2
    found[:, own] = low + before, low + before + took, end
    return found


def _last_members(sums: Sums, ends: Longs) -> Longs:
    """By sum, the first of its tiles with the latest of these ends."""
    order = np.lexsort((-ends[sums.member], owners(sums.members)))
    return sums.member[order[sums.members[:-1]]]


def _ready(run: Played) -> dict[str, int]:
    """By name of a synchronization, when all that it waits for is over."""
    own = {name: first for name, (first, _) in run.named.items() if run.kind[first] == KINDS[TaskKind.SYNC]}
    place, other = run.waits_of(np.array(list(own.values()), np.int64))
    return dict(zip(own, most(place, run.end[other], len(own), 0).tolist(), strict=True))


def unread_tiles(plan: Plan) -> Iterator[int]:
    """Tiles that make only sums that nobody reads (``OperatorGraph.sums_of``)."""
    graph, bounds = plan.graph, (*plan.first_tile, len(plan.tiles))
    for sums, source in graph.sums_of.items():
        maker = graph.producers[sums][0]
        readers = {position for position, _ in graph.consumers.get(sums, ())}
        tiles = [tile for position in readers for tile in plan.tiles[bounds[position] : bounds[position + 1]]]
        if len(graph.operators[maker].outputs) == 1 and all(_sees_all_but_channels(plan, tile, source) for tile in tiles):
            yield from range(bounds[maker], bounds[maker + 1])


def _sees_all_but_channels(plan: Plan, tile: Tile, source: str) -> bool:
    regions = [box for o, box in zip(plan.operator(tile).inputs, tile.inputs, strict=True) if o.tensor == source]
    shape = plan.graph.tensors[source].shape
    return any(all(side == (0, size) for i, (side, size) in enumerate(zip(box, shape, strict=True)) if i != 1) for box in regions)
