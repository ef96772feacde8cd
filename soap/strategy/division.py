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


def shares(graph: OperatorGraph, op: Operator) -> tuple[str, ...]:
    """What there is to do in the backward pass of an operator, in order, of ``schedules.table.SHARES``; nothing if it has none."""
    if not graph.needs_backward(op):
        return ()
    weights = any(graph.tensors[operand.tensor].requires_grad for operand in op.parameters)
    inputs = any(graph.tensors[operand.tensor].requires_grad for operand in op.inputs)
    return ("inputs", *WEIGHTS) if inputs and weights else WEIGHTS if weights else ("inputs",)
