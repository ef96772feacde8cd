"""Backward passes in two: input gradients (I), which stages before wait for, and weight gradients (W), which fill time that is left.

Schedules with I and W divide them (zero bubble: Qi et al., 2401.10241). I makes the gradients of an operator's inputs, W those of its
parameters; until W has run, all stays that the operator keeps, and so do the gradients of its outputs. An operator without trainable
parameters has I alone, one whose inputs need no gradient W alone: its backward pass is one task then, as without division. Any operator
can be divided: autograd makes the gradients that it is asked for. What both passes go through is done twice (``profiles.work``).
"""

from __future__ import annotations

from typing import Literal

from soap.model.graph import Operator, OperatorGraph
from soap.schedules.table import WEIGHTS

Half = Literal["I", "W"]


def halves(graph: OperatorGraph, op: Operator) -> tuple[Half, ...]:
    """The passes into which the backward pass of an operator is divided, in their order; none if it has no backward pass."""
    if not graph.needs_backward(op):
        return ()
    weights = any(graph.tensors[operand.tensor].requires_grad for operand in op.parameters)
    inputs = any(graph.tensors[operand.tensor].requires_grad for operand in op.inputs)
    return ("I", "W") if inputs and weights else ("W",) if weights else ("I",)


def weights_share(graph: OperatorGraph, op: Operator) -> str:
    """Among which gradients of weights those of an operator are (``schedules.table``)."""
    return WEIGHTS[0]


def is_divided(graph: OperatorGraph, op: Operator) -> bool:
    """Whether an operator has both passes."""
    return len(halves(graph, op)) > 1
