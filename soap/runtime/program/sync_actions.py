"""The actions that keep parameters in step, as the methods of ``Plan.syncs`` ask for. Pure data.

All ranks share one order. The second exchanges of a phase wait for its first ones. So all first exchanges come before all second ones, and
no two ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from soap.plan.plan import ASK_NAME, Plan
from soap.runtime.program.actions import Action, ActionKind
from soap.runtime.sync.row_requests import asking_devices
from soap.runtime.sync.seam import rank_sync

Entry = tuple[tuple[int, ...], Action]
"""(sort key, action)."""
FIRST_STAGE = 4
"""First stage of synchronization after a segment; messages to other segments have lower stages."""


def before_forward(plan: Plan) -> Iterator[Action]:
    """Requests for rows, then values from owners to leaders, then from leaders to members."""
    wanted = [(i, sync, rank_sync(sync.contract).before_forward(sync)) for i, sync in enumerate(plan.syncs)]
    if any(ActionKind.ASK in kinds for *_, kinds in wanted):
        yield Action(ActionKind.ASK, 0, asking_devices(plan))
    for kind in (ActionKind.BRING, ActionKind.HAND_ON):
        yield from (Action(kind, i, plan.members(sync)) for i, sync, kinds in wanted if kind in kinds)


def after_update(plan: Plan) -> tuple[Action, ...]:
    """Values from owners to leaders, then from leaders to members."""
    wanted = [(i, sync, rank_sync(sync.contract).after_update(sync)) for i, sync in enumerate(plan.syncs)]
    kinds = (ActionKind.BRING, ActionKind.HAND_ON)
    return tuple(Action(kind, i, plan.members(sync)) for kind in kinds for i, sync, own in wanted if kind in own)


def after_backward(
    plan: Plan, active: Set[int], segment_of: Mapping[int, int], turns: Sequence[int], places: Sequence[int]
) -> Iterator[Entry]:
    """Exchanges of gradients, each after the segment that completes its gradient: the last one with an ``active`` tile that uses it."""
    for number, sync in enumerate(plan.syncs):
        tiles = [tile for tile, _ in sync.uses if tile in active]
        turn = max((turns[segment_of[tile]] for tile in tiles), default=len(turns))
        first = min((places[tile] for tile in tiles), default=0)
        for stage, kind in enumerate(rank_sync(sync.contract).after_backward(plan, sync)):
            yield (turn, FIRST_STAGE + stage, -first, number), Action(kind, number, plan.members(sync))


def groups(plan: Plan) -> set[tuple[int, ...]]:
    """The sets of devices that exchange something to keep parameters in step."""
    peers = (sync.peers for sync in plan.syncs if sync.contract.compresses)
    return {asking_devices(plan), *(plan.members(sync) for sync in plan.syncs), *peers}


def task_name(plan: Plan, kind: ActionKind, subject: int) -> str:
    """The name of the task that such an action belongs to."""
    if kind is ActionKind.ASK:
        return ASK_NAME
    sync = plan.syncs[subject]
    return rank_sync(sync.contract).task_name(sync, kind)
