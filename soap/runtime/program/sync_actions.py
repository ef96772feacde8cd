"""What ranks do to keep parameters in step, as the methods of ``Plan.syncs`` say. Pure data.

All ranks have one order. Second exchanges of a phase come behind all first ones of it: they wait for these, so that no two ranks wait for
each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from soap.plan.plan import ASK_NAME, Plan
from soap.runtime.program.actions import Action, ActionKind
from soap.runtime.sync.row_requests import asking_devices
from soap.runtime.sync.seam import rank_sync

Entry = tuple[tuple[int, ...], Action]
"""An action and its place in the order."""
FIRST_STAGE = 4
"""Behind a segment, what goes to other segments has stages below this."""


def before_forward(plan: Plan) -> Iterator[Action]:
    """Which rows are wanted, then values from owners, then what hosts hand on."""
    wanted = [(i, sync, rank_sync(sync.contract).before_forward(sync)) for i, sync in enumerate(plan.syncs)]
    if any(ActionKind.ASK in kinds for *_, kinds in wanted):
        yield Action(ActionKind.ASK, 0, asking_devices(plan))
    for kind in (ActionKind.BRING, ActionKind.HAND_ON):
        yield from (Action(kind, i, plan.members(sync)) for i, sync, kinds in wanted if kind in kinds)


def after_update(plan: Plan) -> tuple[Action, ...]:
    """Values from owners, then what hosts hand on."""
    wanted = [(i, sync, rank_sync(sync.contract).after_update(sync)) for i, sync in enumerate(plan.syncs)]
    kinds = (ActionKind.BRING, ActionKind.HAND_ON)
    return tuple(Action(kind, i, plan.members(sync)) for kind in kinds for i, sync, own in wanted if kind in own)


def after_backward(
    plan: Plan, active: Set[int], segment_of: Mapping[int, int], turns: Sequence[int], places: Sequence[int]
) -> Iterator[Entry]:
    """Behind the segment with which all ``active`` tiles that use it have had their backward pass."""
    for number, sync in enumerate(plan.syncs):
        tiles = [tile for tile, _ in sync.uses if tile in active]
        turn = max((turns[segment_of[tile]] for tile in tiles), default=len(turns))
        first = min((places[tile] for tile in tiles), default=0)
        for stage, kind in enumerate(rank_sync(sync.contract).after_backward(plan, sync)):
            yield (turn, FIRST_STAGE + stage, -first, number), Action(kind, number, plan.members(sync))


def groups(plan: Plan) -> set[tuple[int, ...]]:
    """Sets of devices that exchange something for it."""
    return {asking_devices(plan), *(plan.members(sync) for sync in plan.syncs)}


def task_name(plan: Plan, kind: ActionKind, subject: int) -> str:
    """The task that such an action is a part of."""
    if kind is ActionKind.ASK:
        return ASK_NAME
    sync = plan.syncs[subject]
    return rank_sync(sync.contract).task_name(sync, kind)
