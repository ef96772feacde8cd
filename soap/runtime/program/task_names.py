"""The simulator's task names for the actions of a step. They are for error messages: nothing here runs while all goes well."""

from __future__ import annotations

from soap.plan.division import weights_name
from soap.plan.plan import (
    backward_name,
    exchange_name,
    forward_name,
    message_name,
    recompute_name,
    reduce_name,
)
from soap.runtime.program import sync_actions
from soap.runtime.program.actions import ActionKind
from soap.runtime.program.program import Program

GRADIENTS = (ActionKind.RETURN, ActionKind.RETURN_EXCHANGE, ActionKind.REDUCE_GRADIENT)
"""Kinds that move gradients: their tasks are the transposes of forward ones."""

_PASSES = {ActionKind.SEGMENT: backward_name, ActionKind.WEIGHTS: weights_name, ActionKind.RECOMPUTE: recompute_name}


def task_name(program: Program, kind: str, subject: int) -> str:
    """The name of the task that an action is, or begins with. ``kind``: name of an ``ActionKind``."""
    plan, back = program.plan, ActionKind[kind] in GRADIENTS
    match ActionKind[kind]:
        case ActionKind.TILE:
            return forward_name(plan.operator(plan.tiles[subject]), plan.tiles[subject])
        case ActionKind.SEGMENT | ActionKind.WEIGHTS | ActionKind.RECOMPUTE as own:
            first = plan.tiles[program.segments[subject].tiles[0]]
            return _PASSES[own](plan.operator(first), first)
        case ActionKind.TRANSFER | ActionKind.RETURN:
            return message_name(plan, plan.messages[subject], gradient=back)
        case ActionKind.EXCHANGE | ActionKind.RETURN_EXCHANGE:
            return exchange_name(plan, plan.exchanges[subject], gradient=back)
        case ActionKind.REDUCE | ActionKind.REDUCE_GRADIENT | ActionKind.REDUCE_NUMBERS:
            number = program.number_sums[subject][0] if ActionKind[kind] is ActionKind.REDUCE_NUMBERS else subject
            reduction = plan.reductions[number]
            return reduce_name(plan.graph.operators[reduction.operator], reduction, gradient=back)
        case ActionKind.LOSS:
            return "tell the loss"
        case own:
            return sync_actions.task_name(plan, own, subject)
