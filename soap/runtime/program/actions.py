"""The actions of ranks in a step, and the order in which they can begin. Pure data, no torch.

*Invariant*: an action comes after all those that it waits for. Forward, each tile is followed by what it completes: messages, sums, then
messages with parts of sums. Backward, each segment comes behind what is recomputed for it, and is followed by what it completes: gradients
that are sent back, then sums of gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from soap.plan.plan import Part, Plan
from soap.plan.running.activity import Activity, Carrier, PlanIndex
from soap.plan.running.order import Segment, Turns, part_ready


class ActionKind(Enum):
    """What a rank does. The subject of an action is a position in the tuple named here, of a plan or of its ``program.Program``."""

    TILE = auto()
    """Run the forward pass of ``plan.tiles[subject]``."""
    TRANSFER = auto()
    """Send or receive ``plan.messages[subject]``."""
    EXCHANGE = auto()
    """Take part in ``plan.exchanges[subject]``."""
    REDUCE = auto()
    """Sum the partial results of ``plan.reductions[subject]``."""
    REDUCE_NUMBERS = auto()
    """Sum the partial results of several reductions, ``number_sums[subject]``, at once."""
    LOSS = auto()
    """Broadcast the loss, which is in ``plan.holdings[subject]``, unless every rank knows it already."""
    SEGMENT = auto()
    """Run the backward pass of ``segments[subject]``; if that is in two, for its input gradients."""
    WEIGHTS = auto()
    """Make the weight gradients of ``segments[subject]``, whose backward pass is in two."""
    TRANSFER_AGAIN = auto()
    """Send or receive ``plan.messages[subject]`` a second time, for backward passes."""
    EXCHANGE_AGAIN = auto()
    """Take part in ``plan.exchanges[subject]`` a second time."""
    REDUCE_AGAIN = auto()
    """Sum the partial results of ``plan.reductions[subject]`` a second time, as second runs have made them."""
    RECOMPUTE = auto()
    """Run the tiles of ``segments[subject]`` forward a second time, for its backward pass."""
    RETURN = auto()
    """Receive or send the gradients of ``plan.messages[subject]``."""
    RETURN_EXCHANGE = auto()
    """Take part in the transpose of ``plan.exchanges[subject]``."""
    REDUCE_GRADIENT = auto()
    """Sum the gradients of ``plan.reductions[subject]``."""
    ASK = auto()
    """Send requests for rows to owners, for all of ``plan.syncs`` by rows at once (no subject)."""
    BRING = auto()
    """Send values of ``plan.syncs[subject]`` from owners to leaders, or to all readers."""
    BRING_BACK = auto()
    """Send them to all readers once more, for their backward passes."""
    HAND_ON = auto()
    """Send values of ``plan.syncs[subject]`` from leaders to the other members."""
    COLLECT = auto()
    """Send gradients of ``plan.syncs[subject]`` from members to their leaders, or to those that own parts on their host."""
    SYNC = auto()
    """Send gradients of ``plan.syncs[subject]`` to the owners."""


LEAVING = frozenset((ActionKind.COLLECT, ActionKind.SYNC))
"""Kinds that send gradients of parameters."""


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of the global order. ``devices`` take part; None means all ranks."""

    kind: ActionKind
    subject: int
    devices: tuple[int, ...] | None


def part_of(actions: Iterable[Action], rank: int) -> list[Action]:
    """The actions that a rank takes part in, in order."""
    return [action for action in actions if action.devices is None or rank in action.devices]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Micro-batch ``number``, from 0 on, of the ``count`` in a step.

    Gradients are added up over a step's micro-batches and synchronized with the last one: they belong to the mean of the losses, times
    ``scale``.
    """

    number: int = 0
    count: int = 1
    scale: float = 1.0

    @property
    def share(self) -> float:
        """The gradient of its loss."""
        return self.scale / self.count

    @property
    def first(self) -> bool:
        """Whether it is the step's first: gradients start from nothing."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether it is the step's last: gradients are complete after it."""
        return self.number == self.count - 1


WHOLE_STEP = MicroBatch()


Entry = tuple[tuple[int, ...], Action]
"""(sort key, action). The key begins with the place (forward) or turn (backward)."""

BEFORE = -1
"""Second part of the key of what comes right before the segment whose turn it is."""


def in_order(entries: Iterable[Entry]) -> Iterator[Action]:
    """The actions, sorted by their keys."""
    return (action for _, action in sorted(entries, key=lambda entry: entry[0]))


def interleaved(
    plan: Plan, forward: Iterable[Entry], backward: Iterable[Entry], order: Sequence[int], turns: Sequence[int]
) -> list[Action]:
    """The actions of both passes in the order of ``Plan.order``, keys below 0 first. ``order``: tiles forward. ``turns``: their places."""
    own = [plan.rank(plan.tiles[tile], "F") for tile in order]
    entries = [((own[key[0]] if key[0] >= 0 else key[0], *key), action) for key, action in forward]
    last = max(turns, default=0)
    entries += [((turns[key[0]] if key[0] < len(turns) else last, *key), action) for key, action in backward]
    return list(in_order(entries))


def forward_entries(plan: Plan, places: Sequence[int]) -> Iterator[Entry]:
    """Each tile, then what it sends, then the sums that it completes, then what is sent of these sums."""
    for tile, place in enumerate(places):
        yield (place, 0, 0), Action(ActionKind.TILE, tile, (plan.tiles[tile].device,))
    for number, message in enumerate(plan.messages):
        action = Action(ActionKind.TRANSFER, number, (message.source, message.target))
        yield (part_ready(plan, message.parts[0], places), 1 + _is_sum(plan, message.parts), number), action
    for number, exchange in enumerate(plan.exchanges):
        place = max(part_ready(plan, part, places) for part in exchange.parts)
        yield (place, 2 + _is_sum(plan, exchange.parts), number), Action(ActionKind.EXCHANGE, number, exchange.devices)
    for number, reduction in enumerate(plan.reductions):
        place = max(places[tile] for tile in reduction.tiles)
        yield (place, 3, number), Action(ActionKind.REDUCE, number, reduction.devices)


def backward_entries(
    plan: Plan,
    index: PlanIndex,
    activity: Activity,
    segments: Sequence[Segment],
    segment_of: Mapping[int, int],
    turns: Turns,
) -> Iterator[Entry]:
    """Segments in their turns, each followed by gradients that it completes: those sent back, then sums. Apart weights complete none."""
    for number, segment in enumerate(segments):
        if any(tile in activity.tiles for tile in segment.tiles):
            yield (turns.backward[number], 0, 0), Action(ActionKind.SEGMENT, number, (segment.device,))
            if number in turns.weights:
                yield (turns.weights[number], 0, 0), Action(ActionKind.WEIGHTS, number, (segment.device,))
    complete = {
        number: max(turns.backward[segment_of[tile]] for tile, _ in plan.fetches[number].consumers if tile in activity.tiles)
        for number in activity.fetches
    }
    returned = _returned(index, complete)
    for (kind, number), turn in returned.items():
        if kind == "message":
            message = plan.messages[number]
            yield (turn, 1, number), Action(ActionKind.RETURN, number, (message.source, message.target))
        else:
            yield (turn, 2, number), Action(ActionKind.RETURN_EXCHANGE, number, plan.exchanges[number].devices)
    for number in activity.reductions:
        devices = plan.reductions[number].devices
        holdings = [index.reduced[number, device] for device in devices if (number, device) in index.reduced]
        fetches = [fetch for holding in holdings for fetch in index.fetches_from[holding] if fetch in complete]
        complete_by = [complete[fetch] for fetch in fetches]
        complete_by += [returned[key] for holding in holdings for key in index.carriers_from.get(holding, ()) if key in returned]
        yield (max(complete_by), 3, number), Action(ActionKind.REDUCE_GRADIENT, number, devices)


def _is_sum(plan: Plan, parts: Sequence[Part]) -> int:
    """The number of stages that parts of sums come after parts of tiles."""
    fetch, piece = parts[0]
    return 0 if plan.holdings[plan.fetches[fetch].pieces[piece].holding].reduction is None else 3


def _returned(index: PlanIndex, complete: Mapping[int, int]) -> dict[Carrier, int]:
    """Message or exchange -> turn of the segment that completes its last gradient; those without gradients are left out."""
    found: dict[Carrier, int] = {}
    for key, carrier in index.moves.items():
        turns = [complete[fetch] for fetch, _ in carrier.parts if fetch in complete]
        if turns:
            found[key] = max(turns)
    return found
