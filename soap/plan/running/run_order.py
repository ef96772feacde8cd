"""In which order ranks run all passes of a plan: what the runtime's program and predicted memory follow. Pure data, no torch.

Each of these modules decides on one part of the order, and states its invariant: ``epilogue`` (what runs after the backward pass),
``forward_order`` (tiles), ``segments``, ``backward_order`` (turns of segments).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from soap.plan.plan import Plan
from soap.plan.recomputation import Recomputation, find_recomputation
from soap.plan.running.activity import Activity, PlanIndex, answered_from_afar, find_activity
from soap.plan.running.backward_order import Turns, backward_turns, by_action
from soap.plan.running.epilogue import LossEpilogue, epilogue_of, no_epilogue, usable_epilogue
from soap.plan.running.forward_order import ExecutionOrder, forward_order
from soap.plan.running.segments import Segment, cut_segments


@dataclass(frozen=True)
class RunOrder:
    """``order``: tiles forward, as ranks run them, and backward, as they were given. ``segment_of``: tile -> its segment. ``turns``: when
    segments run backward. ``recomputation``: what runs forward twice."""

    plan: Plan
    index: PlanIndex
    epilogue: LossEpilogue
    order: ExecutionOrder
    activity: Activity
    segments: tuple[Segment, ...]
    segment_of: Mapping[int, int]
    turns: Turns
    recomputation: Recomputation

    @cached_property
    def second_turns(self) -> Sequence[tuple[int, int]]:
        """(turn, segment that runs forward a second time right before it), in their order."""
        return sorted(self._second_turns(), key=lambda own: (own[0], self.segments[own[1]].start))

    def _second_turns(self) -> Iterator[tuple[int, int]]:
        """A segment's second run comes right before the first backward pass that needs it, its own or that of a segment that reads what it
        makes again; and after the second runs that it reads from. So as little as possible is there at a time."""
        turns, segment_of = self.turns.backward, self.segment_of
        own = sorted({segment_of[tile] for tile in self.recomputation.tiles}, key=turns.__getitem__)
        makers: dict[int, set[int]] = {segment: set() for segment in own}
        for tile, linked in self.recomputation.links.items():
            makers[segment_of[tile]].update(segment_of[maker] for maker in linked)
        done: set[int] = set()
        for segment in own:
            needed, todo = set[int](), [segment]
            while todo:
                number = todo.pop()
                if number not in needed | done:
                    needed.add(number)
                    todo.extend(makers[number])
            yield from ((turns[segment], number) for number in needed)
            done |= needed


def run_order(plan: Plan, order: ExecutionOrder, *, single_tiles: bool = False) -> RunOrder:
    """The order in which ranks run a plan's passes. RuntimeFailure if ``order.forward`` is no topological order of all tiles.

    ``order``: as it was simulated; if it says nothing of the backward pass, that runs in reverse. ``single_tiles``: make every tile a
    segment of its own, so that each task can be timed: the tasks of a simulation, where without micro-batches the loss's epilogue has both
    passes.
    """
    apart = not single_tiles or plan.order is not None
    index, epilogue = PlanIndex(plan), usable_epilogue(plan, epilogue_of(plan.graph) if apart else no_epilogue(plan.graph))
    order = forward_order(plan, index, order, epilogue)
    activity = find_activity(plan, index, epilogue.seeds)
    answered = answered_from_afar(plan, activity.fetches, activity.reductions)
    again = find_recomputation(plan, activity.tiles)
    segments = cut_segments(
        plan, index, order.forward, single_tiles=single_tiles, epilogue=epilogue.operators, answered=answered, run=again.run
    )
    segment_of = {tile: i for i, segment in enumerate(segments) for tile in segment.tiles}
    possible = backward_turns(plan, index, activity, segment_of, [segment.start for segment in segments], order.backward)
    turns = by_action(plan, segments, possible)
    return RunOrder(plan, index, epilogue, order, activity, segments, segment_of, turns, again)
