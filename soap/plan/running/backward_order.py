"""The order in which segments run backward. Pure data, no torch.

A segment can run backward once all gradients from elsewhere have arrived. If several can run, the choice changes only who waits for whom,
not the result. They run in the order in which the simulation began their tiles' backward passes; without a simulation, the segment that
started last goes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from soap.plan.division import is_divided
from soap.plan.plan import Plan
from soap.plan.running.activity import Activity, PlanIndex
from soap.plan.running.segments import Segment


def backward_turns(
    plan: Plan, index: PlanIndex, activity: Activity, segment_of: Mapping[int, int], starts: Sequence[int], order: Sequence[int]
) -> list[int]:
    """Segment -> its turn, from 0 on. ``starts``: segment -> place of its first tile in the forward order. ``order``: tiles by the start of
    their backward passes; empty if unknown."""
    unknown = len(order)
    places = {tile: place for place, tile in enumerate(order)}
    first = [unknown] * len(starts)
    for tile, segment in segment_of.items():
        first[segment] = min(first[segment], places.get(tile, unknown))
    behind: dict[int, set[int]] = {}
    waiting = [0] * (len(starts) + len(index.moves) + len(plan.reductions))
    for before, after in _needs(plan, index, activity, segment_of, len(starts)):
        if before != after and after not in behind.setdefault(before, set()):
            behind[before].add(after)
            waiting[after] += 1

    def entry(node: int) -> tuple[int, int, int]:
        return (first[node], -starts[node], node) if node < len(starts) else (-1, 0, node)

    ready = [entry(node) for node, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    turns, turn = [0] * len(starts), 0
    while ready:
        *_, node = heapq.heappop(ready)
        if node < len(starts):
            turns[node], turn = turn, turn + 1
        for after in behind.get(node, ()):
            waiting[after] -= 1
            if not waiting[after]:
                heapq.heappush(ready, entry(after))
    assert turn == len(starts), "segments wait for each other"  # decreasing start is always a possible order
    return turns


@dataclass(frozen=True)
class Turns:
    """When segments run backward. ``backward``: segment -> its turn, from 0 on. ``weights``: segment whose backward pass is in two -> the
    turn of its weight gradients. ``actions``: turn -> the place in ``Plan.order`` of the action to which it belongs."""

    backward: Sequence[int]
    weights: Mapping[int, int] = field(default_factory=dict)
    actions: Sequence[int] = ()

    def last(self, segment: int) -> int:
        """The turn after which the gradients of a segment's parameters are there."""
        return self.weights.get(segment, self.backward[segment])


def by_action(plan: Plan, segments: Sequence[Segment], turns: Sequence[int]) -> Turns:
    """The turns, if segments follow the actions of ``Plan.order``, and those of one action the turns that are given."""
    first = [plan.tiles[segment.tiles[0]] for segment in segments]
    passes = [(plan.rank(tile, "B"), turns[number], False, number) for number, tile in enumerate(first)]
    divided = (number for number, segment in enumerate(segments) if is_divided(plan, segment.tiles[0]))
    passes += [(plan.rank(first[number], "W"), turns[number], True, number) for number in divided]
    backward, weights = [0] * len(segments), dict[int, int]()
    for turn, (_, _, second, number) in enumerate(sorted(passes)):
        if second:
            weights[number] = turn
        else:
            backward[number] = turn
    return Turns(backward, weights, [action for action, *_ in sorted(passes)])


def _needs(
    plan: Plan, index: PlanIndex, activity: Activity, segment_of: Mapping[int, int], segments: int
) -> Iterator[tuple[int, int]]:
    """(node, node that needs its gradient). Nodes are numbered: segments, then messages and exchanges, then reductions."""
    carried = {part: segments + i for i, carrier in enumerate(index.moves.values()) for part in carrier.parts}
    sums = segments + len(index.moves)

    def source(holding: int) -> int:
        held = plan.holdings[holding]
        return segment_of[held.tile] if held.reduction is None else sums + held.reduction

    for number in activity.fetches:
        fetch = plan.fetches[number]
        readers = {segment_of[tile] for tile, _ in fetch.consumers if tile in activity.tiles}
        for place, piece in enumerate(fetch.pieces):
            carrier = carried.get((number, place))
            if carrier is not None:
                yield carrier, source(piece.holding)
            yield from ((reader, source(piece.holding) if carrier is None else carrier) for reader in readers)
    for number in activity.reductions:
        yield from ((sums + number, segment_of[tile]) for tile in plan.reductions[number].tiles)
