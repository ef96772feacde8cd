"""Summing single numbers together. Pure data, no torch.

*Invariant*: reductions of one number each with the same devices and dtype become one action at the end of the forward pass: nothing reads
them before the backward pass is over. If one such sum gives every device all numbers that enter the loss epilogue, every device can compute
the loss from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from soap.plan.flows import reduced_tensor
from soap.plan.plan import Plan
from soap.plan.running.epilogue import LossEpilogue
from soap.runtime.program.actions import Action, ActionKind

NumberSums = tuple[tuple[int, ...], ...]
"""Reductions that are summed together."""


def sum_together(plan: Plan, sums: Iterable[Action]) -> tuple[NumberSums, list[Action]]:
    """The groups of reductions that are summed together, and one action for each group."""
    found: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for action in sums:
        reduction = plan.reductions[action.subject]
        dtype = plan.graph.tensors[reduced_tensor(plan, reduction)].dtype
        found.setdefault((reduction.devices, dtype), []).append(action.subject)
    actions = [Action(ActionKind.REDUCE_NUMBERS, number, devices) for number, (devices, _) in enumerate(found)]
    return tuple(map(tuple, found.values())), actions


def everyone_knows(plan: Plan, epilogue: LossEpilogue, number_sums: Sequence[Sequence[int]]) -> bool:
    """Whether a single sum over all devices has every number that enters the epilogue, each once."""
    if not epilogue.operators or len(number_sums) != 1:
        return False
    found = [reduced_tensor(plan, plan.reductions[number]) for number in number_sums[0]]
    everywhere = len(plan.reductions[number_sums[0][0]].devices) == plan.device_count
    return everywhere and len(found) == len(epilogue.seeds) and set(found) == set(epilogue.seeds)
