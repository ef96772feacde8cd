"""In which order ranks run all passes of a plan (``simulator.memory.rank_order``), as the program takes it. Pure data, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from soap.plan.plan import Plan
from soap.plan.running.activity import Activity, PlanIndex
from soap.plan.running.epilogue import LossEpilogue
from soap.plan.running.order import ExecutionOrder, Segment, Turns, by_action, require_topological
from soap.simulator.memory.plan_arrays import PlanArrays, plan_arrays
from soap.simulator.memory.rank_order import Active, rank_order


@dataclass(frozen=True)
class RunOrder:
    """``order``: tiles forward, as ranks run them, and backward, as they were given. ``segment_of``: tile -> its segment. ``turns``: when
    segments run backward. ``recomputed``: tiles that run forward twice. ``second_turns``: (turn, segment that runs forward a second time
    right before it), in their order."""

    index: PlanIndex
    epilogue: LossEpilogue
    order: ExecutionOrder
    activity: Activity
    segments: tuple[Segment, ...]
    segment_of: Mapping[int, int]
    turns: Turns
    recomputed: frozenset[int]
    second_turns: Sequence[tuple[int, int]]


def run_order(plan: Plan, order: ExecutionOrder, *, single_tiles: bool = False) -> RunOrder:
    """The order in which ranks run a plan's passes. RuntimeFailure if ``order.forward`` is no topological order of all tiles.

    ``order``: as it was simulated; if it says nothing of the backward pass, that runs in reverse. ``single_tiles``: make every tile a
    segment of its own, so that each task can be timed: the tasks of a simulation, where without micro-batches the loss's epilogue has both
    passes.
    """
    index = PlanIndex(plan)
    require_topological(plan, index, order.forward)
    arrays, given = plan_arrays(plan, footprints=False), (np.array(own, np.int64) for own in (order.forward, order.backward))
    found = rank_order(plan, arrays, *given, single_tiles=single_tiles)
    forward, number = found.forward.tolist(), found.segments.number.tolist()
    tiles: list[list[int]] = [[] for _ in found.segments.first]
    for tile in forward:
        tiles[number[tile]].append(tile)
    starts = found.segments.start.tolist()
    segments = tuple([Segment(plan.tiles[own[0]].device, start, tuple(own)) for start, own in zip(starts, tiles, strict=True)])
    turns = by_action(plan, segments, found.turns.tolist())
    second_turns = [(turn, segment) for turn, segment in found.second_turns(np.array(turns.backward, np.int64)).tolist()]
    return RunOrder(
        index, found.epilogue, ExecutionOrder(tuple(forward), tuple(found.backward.tolist())), _activity(arrays, found.active), segments,
        dict(enumerate(number)), turns, frozenset(np.flatnonzero(found.again.tiles).tolist()), second_turns,
    )  # fmt: skip


def _activity(arrays: PlanArrays, active: Active) -> Activity:
    holdings = arrays.pieces.holding[active.fetches[arrays.pieces.fetch]]
    numbers = (np.flatnonzero(active.tiles), np.flatnonzero(active.fetches), holdings, np.flatnonzero(active.sums), active.seeds)
    return Activity(*(set(own.tolist()) for own in numbers))
