"""The loss epilogue in the order of actions. Pure data, no torch.

*Invariant*: no action before the end of the backward pass waits for a number that only the epilogue reads. The epilogue's own tiles and
messages run after the backward pass, in their original order. (``soap.tracing.loss_terms`` finds a model's epilogue.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from soap.model.graph import OperatorGraph
from soap.plan.plan import Plan


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


def kept_epilogue(plan: Plan, epilogue: LossEpilogue, *, mixes: bool) -> LossEpilogue:
    """``usable_epilogue``. ``mixes``: whether a message mixes its tensors with others."""
    if plan.order is not None:
        return replace(epilogue, operators=frozenset()) if mixes else epilogue
    return no_epilogue(plan.graph) if mixes or plan.device_count == 1 else epilogue


def closing_tensors(plan: Plan, epilogue: LossEpilogue) -> set[str]:
    """Tensors that the epilogue makes, and those that enter it: only the epilogue reads them."""
    made = {out.tensor for position in epilogue.operators for out in plan.graph.operators[position].outputs}
    return made | (set(epilogue.seeds) if epilogue.operators else set())
