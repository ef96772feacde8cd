"""What ranks do in a step. Pure data, no torch. Positions are those in a plan and in its ``program.Program``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto


class ActionKind(Enum):
    """What a rank does; the subject of an action is a position in the tuple named here."""

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
    """Tell the loss to every rank, if some can not know it; it is in ``plan.holdings[subject]``."""
    SEGMENT = auto()
    """Run the backward pass of ``segments[subject]``."""
    RETURN = auto()
    """Receive or send the gradients of ``plan.messages[subject]``."""
    RETURN_EXCHANGE = auto()
    """Take part in the transpose of ``plan.exchanges[subject]``."""
    REDUCE_GRADIENT = auto()
    """Sum the gradients of ``plan.reductions[subject]``."""
    SYNC = auto()
    """Sum the gradients of ``buckets[subject]`` over its devices."""
    ASK = auto()
    """Tell keepers which rows of all ``tables`` are wanted (no subject)."""
    PULL = auto()
    """Send or receive the rows of ``tables[subject]`` that were asked for."""
    HAND_ON = auto()
    """Send or receive, within hosts, the rows of ``tables[subject]`` that came for several readers."""
    COLLECT_ROWS = auto()
    """Add up the gradients of rows of ``tables[subject]`` within hosts."""
    PUSH_ROWS = auto()
    """Send or receive the gradients of rows of ``tables[subject]``."""
    COLLECT = auto()
    """Add up the gradients of ``plan.served[subject]`` within hosts."""
    PUSH = auto()
    """Send or receive the gradients of ``plan.served[subject]``."""


LAST_ONLY = frozenset(
    (ActionKind.SYNC, ActionKind.COLLECT_ROWS, ActionKind.PUSH_ROWS, ActionKind.COLLECT, ActionKind.PUSH)
)
"""Actions of a step's last micro-batch alone."""


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of the global order. ``devices`` take part; None means all ranks."""

    kind: ActionKind
    subject: int
    devices: tuple[int, ...] | None


def part_of(actions: Iterable[Action], rank: int) -> list[Action]:
    """The actions in which a rank takes part, in order."""
    return [action for action in actions if action.devices is None or rank in action.devices]
