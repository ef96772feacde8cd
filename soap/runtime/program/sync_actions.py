"""The actions that keep parameters in step, as the rows of ``Plan.syncs`` ask for. Pure data.

All ranks share one order. The second exchanges of a phase wait for its first ones. So all first exchanges come before all second ones, and
no two ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from soap.plan.plan import ASK_NAME, Plan, ShardSync, sync_name
from soap.plan.running.order import Turns
from soap.plan.syncs.gathering import Gather, all_step, gathers
from soap.plan.syncs.seam import How, Phase, Row, method_for
from soap.runtime.program.actions import LEAVING, Action, ActionKind, Entry
from soap.runtime.sync.row_requests import asking_devices

FIRST_STAGE = 4
"""First stage of synchronization after a segment; messages to other segments have lower stages."""
BEHIND_GATHERS = 7
"""First stage of gradients whose values are gathered for their uses."""
BRINGING = ActionKind.BRING, ActionKind.BRING_BACK
"""Gathers for forward passes, and for backward passes."""
BEFORE_ALL, AFTER_ALL = -2, 9
"""Stages of what comes right before a tile, or a segment and what is recomputed for it, and of what comes behind all that follows it."""


def rows_of(plan: Plan, kind: ActionKind, sync: ShardSync) -> Sequence[Row]:
    """The rows that an action begins with, behind what is collected the second one and further; none if nothing moves."""
    back = kind is ActionKind.BRING_BACK
    before = {Phase.BEFORE_FORWARD, Phase.AFTER_UPDATE}
    phases = {Phase.AFTER_BACKWARD} if kind in LEAVING else {Phase.BEFORE_BACKWARD} if back else before
    own = [row for row in method_for(sync).template_of(plan, sync).rows if row.phase in phases]
    return own[kind is ActionKind.SYNC and sync.aggregated and len(own) > 1 :]


def kinds_of(plan: Plan, sync: ShardSync, phase: Phase) -> tuple[ActionKind, ...]:
    """The actions of a synchronization in a phase, one after the other; no values that are gathered for their uses (``gather_entries``).
    Of gradients by rows SYNC even if nothing travels: it also hands them to this rank's own part as an owner."""
    if phase is Phase.AFTER_BACKWARD:
        if not sync.contract.by_rows and (plan.is_frozen(sync) or len(plan.members(sync)) < 2):
            return ()
        return (ActionKind.COLLECT, ActionKind.SYNC)[: 1 + plan.completes(sync)] if sync.aggregated else (ActionKind.SYNC,)
    rows = [] if sync.contract.gathers_values else [row for row in method_for(sync).template_of(plan, sync).rows if row.phase is phase]
    handed = any(flows for row in rows for flows, _ in row.rounds[1:])
    return (ActionKind.BRING, ActionKind.HAND_ON)[: bool(rows) + handed]


def is_last_only(plan: Plan, kind: ActionKind, subject: int) -> bool:
    """Whether only the last of a step's iterations has an action: if gradients leave that do not leave with each micro-batch."""
    if kind not in LEAVING:
        return False
    sync = plan.syncs[subject]
    return sync.part is None or (kind is ActionKind.SYNC and sync.aggregated)


def before_forward(plan: Plan) -> Iterator[Action]:
    """Requests for rows, then values from owners to leaders, then from leaders to members."""
    wanted = [(i, sync, kinds_of(plan, sync, Phase.BEFORE_FORWARD)) for i, sync in enumerate(plan.syncs)]
    if asking := asking_devices(plan):
        yield Action(ActionKind.ASK, 0, asking)
    for kind in (ActionKind.BRING, ActionKind.HAND_ON):
        yield from (Action(kind, i, plan.members(sync)) for i, sync, kinds in wanted if kind in kinds)


@dataclass(frozen=True)
class Gathers:
    """Where values are gathered for their uses: entries of the forward pass (keys as in ``forward_entries``), and of the backward pass."""

    forward: tuple[Entry, ...]
    backward: tuple[Entry, ...]


def gather_entries(
    plan: Plan,
    active: Set[int],
    segment_of: Mapping[int, int],
    turns: Sequence[int],
    places: Sequence[int],
    again: Iterable[Entry],
) -> Gathers:
    """Each gather comes behind the passes that it waits for, if these are before the first pass that needs it, as in every order that a
    simulation has told; else right before that one. Passes wait for it, so it begins before the same segment's gradients of gathered
    values leave (``BEHIND_GATHERS``). ``again``: second runs of segments."""
    forward, backward = list[Entry](), list[Entry]()
    begun = {action.subject: key[0] for key, action in again}
    for order, own in enumerate(gathers(plan)):
        sync = plan.syncs[own.sync]
        uses, action = [tile for tile, _ in sync.uses], Action(BRINGING[own.backward], own.sync, plan.members(sync))
        (ran, behind), (back, ended) = _last_of(plan, own, active, segment_of, turns, places)
        if back >= ran and ended >= 0:
            segments = {segment_of[tile] for tile in uses if tile in active} if own.backward else ()
            needed = min((begun.get(segment, turns[segment]) for segment in segments), default=len(turns))
            backward.append(((ended, BEHIND_GATHERS - 1, order) if ended < needed else (needed, BEFORE_ALL, order), action))
        else:
            first = len(places) if own.backward else min(places[tile] for tile in uses)
            forward.append(((behind, AFTER_ALL, order) if behind < first else (first, BEFORE_ALL, order), action))
    return Gathers(tuple(forward), tuple(backward))


def _last_of(
    plan: Plan, own: Gather, active: Set[int], segment_of: Mapping[int, int], turns: Sequence[int], places: Sequence[int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The last forward and the last backward pass that a gather waits for: (rank in ``Plan.order``, place or turn); -1 if it has none."""
    ran = ((plan.rank(plan.tiles[tile], "F"), places[tile]) for tile in own.after_forward)
    ended = ((plan.rank(plan.tiles[tile], "B"), turns[segment_of[tile]]) for tile in own.after_backward if tile in active)
    return max(ran, default=(-1, -1)), max(ended, default=(-1, -1))


def uses_of_gathered(
    plan: Plan, rank: int, passes: Sequence[tuple[ActionKind, Collection[int]]]
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """For a rank's passes, in their order, given by kind and the tiles of each: (position of a pass -> synchronizations whose gathered
    values it is the first to read, position -> those that it is the last to read): forward, then backward, or of all if the values are for
    all micro-batches."""
    read: dict[int, list[int]] = {}
    for number, sync in enumerate(plan.syncs):
        for tile in {tile for tile, _ in sync.uses if plan.tiles[tile].device == rank} if sync.contract.gathers_values else ():
            read.setdefault(tile, []).append(number)
    first, last = dict[tuple[int, bool], int](), dict[tuple[int, bool], int]()
    for position, (kind, tiles) in enumerate(passes):
        for number in sorted({number for tile in tiles for number in read.get(tile, ())}):
            key = number, kind is ActionKind.TILE or all_step(plan, plan.syncs[number])
            first.setdefault(key, position)
            last[key] = position
    needs, frees = dict[int, list[int]](), dict[int, list[int]]()
    for found, places in ((needs, first), (frees, last)):
        for (number, _), position in places.items():
            found.setdefault(position, []).append(number)
    return needs, frees


def after_update(plan: Plan) -> tuple[Action, ...]:
    """Values from owners to leaders, servers' first, in the order in which gradients are complete; then from leaders to members."""
    wanted = [(i, sync, kinds_of(plan, sync, Phase.AFTER_UPDATE)) for i, sync in enumerate(plan.syncs)]
    wanted.sort(key=lambda own: -min((tile for tile, _ in own[1].uses), default=0) if own[1].contract.has_servers else 1)
    kinds = (ActionKind.BRING, ActionKind.HAND_ON)
    return tuple(Action(kind, i, plan.members(sync)) for kind in kinds for i, sync, own in wanted if kind in own)


def after_backward(
    plan: Plan, active: Set[int], segment_of: Mapping[int, int], turns: Turns, places: Sequence[int]
) -> Iterator[Entry]:
    """Exchanges of gradients, each after the segment that completes its gradient: the last one with an ``active`` tile that uses it."""
    for number, sync in enumerate(plan.syncs):
        tiles = [tile for tile, _ in sync.uses if tile in active]
        turn = max((turns.last(segment_of[tile]) for tile in tiles), default=len(turns.actions))
        first = min((places[tile] for tile in tiles), default=0)
        begin = BEHIND_GATHERS if sync.contract.gathers_values else FIRST_STAGE
        for stage, kind in enumerate(kinds_of(plan, sync, Phase.AFTER_BACKWARD), begin):
            yield (turn, stage, -first, number), Action(kind, number, plan.members(sync))


def groups(plan: Plan) -> set[tuple[int, ...]]:
    """The sets of devices that exchange something to keep parameters in step. Descending, a second group of them: servers' values go back
    while other parameters' gradients are on their way."""
    found = {asking_devices(plan)}
    for sync in plan.syncs:
        template, members = method_for(sync).template_of(plan, sync), plan.members(sync)
        found |= {members, *template.copies, *(group for row in template.rows for group in row.groups)}
        if sync.contract.has_servers and not sync.contract.by_rows:
            found.add(members[::-1])
        elif sync.contract.owner == "readers":
            found.add(sync.peers)
    return found


def task_name(plan: Plan, kind: ActionKind, subject: int) -> str:
    """The name of the task that such an action belongs to."""
    if kind is ActionKind.ASK:
        return ASK_NAME
    verbs = (row.verb for row in rows_of(plan, kind, plan.syncs[subject]) if row.how is not How.WORK)
    return sync_name(plan.syncs[subject], next(verbs, "sync"))
