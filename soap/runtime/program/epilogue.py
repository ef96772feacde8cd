"""The loss epilogue in the order of actions. Pure data, no torch.

*Invariant*: no action before the end of the backward pass waits for a number that only the epilogue reads. The epilogue's own tiles and
messages run after the backward pass, in their original order. (``soap.tracing.loss_terms`` finds a model's epilogue.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from soap.model.graph import OperatorGraph
from soap.plan.flows import reduced_tensor
from soap.plan.plan import Plan
from soap.runtime.program.actions import Action, ActionKind


@dataclass(frozen=True)
class LossEpilogue:
    """``operators``: positions of those that run after the backward pass. ``seeds``: tensor -> the loss's gradient by it; the backward pass
    begins at these tensors."""

    operators: frozenset[int]
    seeds: Mapping[str, float]


def no_epilogue(graph: OperatorGraph) -> LossEpilogue:
    """An empty epilogue: the backward pass begins at the loss."""
    return LossEpilogue(frozenset(), {graph.loss: 1.0})


def epilogue_of(graph: OperatorGraph) -> LossEpilogue:
    """The epilogue of a graph's loss; an empty one if the loss is no sum of terms."""
    return LossEpilogue(graph.epilogue, graph.loss_terms) if graph.loss_terms else no_epilogue(graph)


def usable_epilogue(plan: Plan, epilogue: LossEpilogue) -> LossEpilogue:
    """The epilogue, or an empty one if it stays where it is: on a single device, which waits for nobody, or if a message mixes its tensors
    with others. With micro-batches the backward pass begins at the loss's terms even so."""
    closing = closing_tensors(plan, epilogue)
    mixes = any(len({plan.fetches[fetch].tensor in closing for fetch, _ in message.parts}) > 1 for message in plan.messages)
    if plan.order is not None:
        return replace(epilogue, operators=frozenset()) if mixes else epilogue
    return no_epilogue(plan.graph) if mixes or plan.device_count == 1 else epilogue


def closing_tensors(plan: Plan, epilogue: LossEpilogue) -> set[str]:
    """Tensors that the epilogue makes, and those that enter it: only the epilogue reads them."""
    made = {out.tensor for position in epilogue.operators for out in plan.graph.operators[position].outputs}
    return made | (set(epilogue.seeds) if epilogue.operators else set())


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
