"""The actions of ranks in a step. Pure data, no torch. Subjects are positions in a plan or in its ``program.Program``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto


class ActionKind(Enum):
    """What a rank does. The subject of an action is a position in the tuple named here."""

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


LAST_ONLY = frozenset((ActionKind.COLLECT, ActionKind.SYNC))
"""Kinds that only a step's last micro-batch runs."""


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of the global order. ``devices`` take part; None means all ranks."""

    kind: ActionKind
    subject: int
    devices: tuple[int, ...] | None


def part_of(actions: Iterable[Action], rank: int) -> list[Action]:
    """The actions that a rank takes part in, in order."""
    return [action for action in actions if action.devices is None or rank in action.devices]
