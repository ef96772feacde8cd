"""The program: what every rank does, in one global order that is the same everywhere. Pure data, no torch.

``compile_program`` turns a plan and an order of its tiles into two lists of actions, forward and backward. Each rank executes its own
part of both lists; an action waits only for actions before it in the list, so that no two ranks can wait for each other in a
cycle, whatever the backend.

*Segments.* Consecutive tiles of a rank form one autograd graph as long as nothing has to be received or summed for them, nor a gradient
received. Segments can run backward by decreasing start.

What decides on the order, each in a module of its own with what it holds to: ``epilogue`` (what runs behind the backward pass),
``forward_order`` (tiles), ``segments``, ``backward_order`` (their turns), ``action_order`` (what follows on tiles and segments) and
``number_sums``. What synchronizes parameters stands here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from soap.plan.plan import Plan
from soap.plan.syncs.buckets import idle_shards
from soap.runtime.program.action_order import backward_entries, forward_entries, in_order
from soap.runtime.program.actions import Action, ActionKind
from soap.runtime.program.activity import Activity, PlanIndex, ValueKey, count_readers, count_takers, find_activity
from soap.runtime.program.backward_order import backward_turns
from soap.runtime.program.epilogue import LossEpilogue, set_apart, usable_epilogue
from soap.runtime.program.forward_order import forward_order, places_of
from soap.runtime.program.number_sums import NumberSums, everyone_knows, sum_together
from soap.runtime.program.segments import Segment, answered_elsewhere, cut_segments, read_elsewhere
from soap.runtime.program.sync_actions import after_backward, after_update, before_forward, groups
from soap.simulator.memory.transit import answered_from_afar
from soap.simulator.tasks import ExecutionOrder


@dataclass(frozen=True)
class Program:
    """A plan together with the order of everything. Positions in the tuples are the subjects of actions."""

    plan: Plan
    index: PlanIndex
    activity: Activity
    order: ExecutionOrder
    segments: tuple[Segment, ...]
    segment_of: dict[int, int]
    """Tile -> its segment."""
    kept: frozenset[int]
    """Holdings that a tile of another segment or device reads, and the loss: their values outlive their segment."""
    answered: frozenset[int]
    """Holdings to which a gradient comes from another segment or device."""
    idle_shards: tuple[int, ...]
    """Shards whose gradient is zero."""
    losses: dict[int, int]
    """Device -> the holding in which it has the loss, if it has it: that of replica 0."""
    seeds: Mapping[str, float]
    """Tensor -> the loss's gradient by it, where the backward pass begins."""
    number_sums: NumberSums
    """Reductions that are summed together, as the forward pass ends."""
    known: bool
    """Whether every rank knows the loss from the first of ``number_sums``, by ``seeds``. Then the loss epilogue is not run."""
    forward: tuple[Action, ...]
    backward: tuple[Action, ...]
    after_update: tuple[Action, ...]
    """Behind the optimizer's update, and whenever values were loaded."""

    @cached_property
    def looking_up(self) -> frozenset[int]:
        """Tiles that read rows of sparse parameters."""
        return frozenset(tile for sync in self.plan.syncs if sync.contract.by_rows for tile, _ in sync.uses)

    def readers(self, rank: int) -> dict[ValueKey, int]:
        """How often the forward pass of a rank reads each value that it keeps, in the sense of ``count_readers``; the loss once more."""
        counts = count_readers(self.plan, self.index, rank)
        if rank in self.losses:
            counts["holding", self.losses[rank]] = counts.get(("holding", self.losses[rank]), 0) + 1
        return counts

    def takers(self, rank: int) -> dict[ValueKey, int]:
        """How many take parts of the gradients on a rank's fetches, in the sense of ``count_takers``."""
        return count_takers(self.plan, self.index, rank)

    def device_groups(self) -> list[tuple[int, ...]]:
        """Distinct sets of devices that sum or exchange something together, in one order for all ranks."""
        sets = {r.devices for r in self.plan.reductions} | {s.devices for s in self.plan.shards} | {e.devices for e in self.plan.exchanges}
        return sorted(devices for devices in sets | groups(self.plan) if len(devices) > 1)


def compile_program(
    plan: Plan,
    order: ExecutionOrder | Sequence[int] | None = None,
    *,
    single_tiles: bool = False,
    epilogue: LossEpilogue | None = None,
) -> Program:
    """The program of a plan. ``order``: all tiles, topologically; the plan's own order if None. Backward they go the other way round if it
    does not say how.

    ``single_tiles`` makes every tile a segment of its own, so that each task can be timed.
    ``epilogue``: what may run when the backward pass is over; left where it is if nothing has to be summed or sent for it.
    """
    if not isinstance(order, ExecutionOrder):
        order = ExecutionOrder(tuple(range(len(plan.tiles)) if order is None else order))
    index, epilogue = PlanIndex(plan), usable_epilogue(plan, epilogue)
    order = forward_order(plan, index, order, epilogue)
    places = places_of(order.forward)
    activity = find_activity(plan, index, epilogue.seeds)
    answered = answered_from_afar(plan, activity.fetches, activity.reductions)
    segments = cut_segments(
        plan, index, order.forward, single_tiles=single_tiles, epilogue=epilogue.operators, answered=answered
    )
    segment_of = {tile: i for i, segment in enumerate(segments) for tile in segment.tiles}
    turns = backward_turns(plan, index, activity, segment_of, [segment.start for segment in segments], order.backward)
    forward = set_apart(plan, epilogue, in_order(forward_entries(plan, places)))
    number_sums, summing = sum_together(plan, forward.sums)
    backward = [
        *backward_entries(plan, index, activity, segments, segment_of, turns),
        *after_backward(plan, activity.tiles, segment_of, turns, places),
    ]
    losses = _losses(plan)
    known = everyone_knows(plan, epilogue, number_sums)
    told = Action(ActionKind.LOSS, min(losses.values()), None)  # last of all: no rank needs it before
    return Program(
        plan,
        index,
        activity,
        order,
        segments,
        segment_of,
        frozenset(read_elsewhere(plan, segment_of)) | {i for i, held in enumerate(plan.holdings) if held.tensor == plan.graph.loss},
        frozenset(answered_elsewhere(plan, segment_of, activity)),
        idle_shards(plan),
        losses,
        epilogue.seeds,
        number_sums,
        known,
        (*before_forward(plan), *forward.before, *summing),
        (*in_order(backward), *(() if known else forward.behind), told),
        after_update(plan),
    )


def _losses(plan: Plan) -> dict[int, int]:
    """Device -> the first holding in which it has the loss of replica 0."""
    made = [(i, h) for i, h in enumerate(plan.holdings) if h.tensor == plan.graph.loss and plan.tiles[h.tile].replica == 0]
    return {held.device: i for i, held in reversed(made)}
