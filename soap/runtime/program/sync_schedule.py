"""Which exchanges of gradients may start while the backward pass of a segment still runs (``step.early_start``). Pure data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from soap.plan.plan import Pattern, Plan, ShardSync
from soap.runtime.program.actions import LAST_ONLY, Action, ActionKind, part_of
from soap.runtime.program.program import Program
from soap.runtime.step.early_start import Key, SyncSchedule
from soap.runtime.sync.seam import rank_sync


def sync_schedule(program: Program, rank: int, early: bool = True, *, messages_apart: bool = False) -> SyncSchedule:
    """When a rank's gradients are complete in one program. ``early`` False: every exchange waits for its own action. ``messages_apart``:
    see ``Communicator``."""
    actions = part_of(program.interleaved or program.backward, rank)
    waiting = {action.subject for action in actions if action.kind in LAST_ONLY}
    contributions = {number: _contributions(program, rank, program.plan.syncs[number]) for number in waiting}
    return SyncSchedule(contributions, _followers(program.plan, actions, messages_apart) if early else {})


def _contributions(program: Program, rank: int, sync: ShardSync) -> int:
    """How many gradients this rank's segments contribute to a synchronization: one per segment and leaf. Each region is a leaf."""
    return sum(len({program.segment_of[tile] for tile in _active(program, rank, region.uses)}) for region in sync.regions)


def _active(program: Program, rank: int, uses: Sequence[tuple[int, int]]) -> Iterator[int]:
    return (tile for tile, _ in uses if tile in program.activity.tiles and program.plan.tiles[tile].device == rank)


def _followers(plan: Plan, actions: Sequence[Action], messages_apart: bool) -> dict[int, tuple[Key, ...]]:
    """Segment -> the exchanges that a rank may start right after it, because they wait for nothing else and overtake nothing that must come
    first."""
    collected = {action.subject for action in actions if action.kind is ActionKind.COLLECT}

    def starts(action: Action) -> bool:
        return action.kind is ActionKind.COLLECT or (action.kind is ActionKind.SYNC and action.subject not in collected)

    def behind(following: Iterable[Action]) -> Iterator[Key]:
        passed = False
        for action in following:
            if starts(action) and (not passed or _is_collective(plan, action)):
                yield action.kind, action.subject
            elif messages_apart and _is_of_messages(plan, action):
                passed = True
            else:
                return

    passes = (ActionKind.SEGMENT, ActionKind.WEIGHTS)  # of a segment in two the second one counts
    segments = {action.subject: place for place, action in enumerate(actions) if action.kind in passes}
    return {number: tuple(behind(actions[place + 1 :])) for number, place in segments.items()}


def _is_collective(plan: Plan, action: Action) -> bool:
    """Whether an action may overtake messages."""
    return action.kind is ActionKind.SYNC and rank_sync(plan.syncs[action.subject].contract).collective


def _is_of_messages(plan: Plan, action: Action) -> bool:
    """Whether an action returns gradients of activations by point-to-point messages alone."""
    match action.kind:
        case ActionKind.RETURN:
            return True
        case ActionKind.RETURN_EXCHANGE:
            return plan.exchanges[action.subject].pattern is not Pattern.BROADCAST
        case ActionKind.REDUCE_GRADIENT:
            return bool(plan.reductions[action.subject].cells)
    return False
