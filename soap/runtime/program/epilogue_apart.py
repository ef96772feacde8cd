"""The actions of the loss epilogue (``plan.running.epilogue``) set apart from the others. Pure data, no torch.

*Invariant*: no action before the end of the backward pass waits for a number that only the epilogue reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from soap.plan.flows import reduced_tensor
from soap.plan.plan import Plan
from soap.plan.running.epilogue import LossEpilogue, closing_tensors
from soap.runtime.program.actions import Action, ActionKind


@dataclass(frozen=True)
class Parted:
    """``before``: actions of the forward pass. ``sums``: reductions that only the epilogue reads. ``behind``: the epilogue's own actions,
    which run after the backward pass."""

    before: list[Action]
    sums: list[Action]
    behind: list[Action]


def set_apart(plan: Plan, epilogue: LossEpilogue, actions: Iterable[Action]) -> Parted:
    """Split the actions of the forward pass into these three lists; each keeps its order."""
    closing = closing_tensors(plan, epilogue)
    parted = Parted([], [], [])
    for action in actions:
        if action.kind is ActionKind.REDUCE:
            closes = reduced_tensor(plan, plan.reductions[action.subject]) in closing
            (parted.sums if closes else parted.before).append(action)
            continue
        if action.kind not in (ActionKind.TILE, ActionKind.TRANSFER, ActionKind.EXCHANGE):
            parted.before.append(action)
            continue
        if action.kind is ActionKind.TILE:
            apart = plan.tiles[action.subject].operator in epilogue.operators
        else:
            carrier = plan.messages[action.subject] if action.kind is ActionKind.TRANSFER else plan.exchanges[action.subject]
            apart = plan.fetches[carrier.parts[0][0]].tensor in closing
        (parted.behind if apart else parted.before).append(action)
    return parted
