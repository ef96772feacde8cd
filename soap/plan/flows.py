"""What the collectives of a plan move between devices: for each exchange and each reduce-scatter, who sends how many bytes to whom.

A collective is a list of rounds, one after the other; the flows of a round run at once. In the backward pass each collective runs as its
transpose.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from soap.model.regions import Box, volume
from soap.plan.collectives import Flow, tree_rounds
from soap.plan.plan import Exchange, Part, Pattern, Plan, Reduction, remote_parts

Round = tuple[tuple[Flow, ...], int]
"""Flows that run at once, and the most bytes that one target then adds up."""


def exchange_rounds(plan: Plan, exchange: Exchange, parts: Sequence[Part], *, gradient: bool) -> list[Round]:
    """Rounds that move ``parts`` of an exchange, or their gradients: one round, or for a broadcast those of a tree."""
    moved = [(source, target, box_bytes(plan, exchange.tensor, box)) for source, target, box, _ in remote_parts(plan, parts)]
    if exchange.pattern is not Pattern.BROADCAST:
        return [(joined(_turned(flow) for flow in moved) if gradient else joined(moved), 0)]
    source, _, size = moved[0]
    rounds = tree_rounds((source, *(device for device in exchange.devices if device != source)), size)
    if not gradient:
        return [(tuple(flows), 0) for flows in rounds]
    return [(tuple(map(_turned, flows)), size) for flows in reversed(rounds)]


def scatter_rounds(plan: Plan, reduction: Reduction, *, gradient: bool) -> list[Round]:
    """The one round of a reduce-scatter; with ``gradient`` that of the all-gather of its cells' gradients."""
    cells = {
        device: box_bytes(plan, reduced_tensor(plan, reduction), cell) if gradient else partial_bytes(plan, reduction, cell)
        for device, cell in zip(reduction.devices, reduction.cells, strict=True)
    }
    flows = tuple((a, b, size) for b, size in cells.items() for a in reduction.devices if a != b and size)
    if gradient:
        return [(tuple(map(_turned, flows)), 0)]
    return [(flows, (len(cells) - 1) * max(cells.values()))]


def reduced_tensor(plan: Plan, reduction: Reduction) -> str:
    """The tensor that a reduction computes, or computes a region of."""
    return plan.graph.operators[reduction.operator].outputs[reduction.output].tensor


def partial_bytes(plan: Plan, reduction: Reduction, box: Box) -> int:
    """Size of a region of the partial results that a reduction adds up."""
    return volume(box) * plan.graph.tensors[reduced_tensor(plan, reduction)].partial_itemsize


def box_bytes(plan: Plan, tensor: str, box: Box) -> int:
    """Size of a region of a tensor in the model's own dtype."""
    return volume(box) * plan.graph.tensors[tensor].itemsize


def _turned(flow: Flow) -> Flow:
    source, target, size = flow
    return target, source, size


def joined(flows: Iterable[Flow]) -> tuple[Flow, ...]:
    """The flows added up, one for each pair of devices; pairs ascend."""
    found: dict[tuple[int, int], int] = {}
    for source, target, size in flows:
        found[source, target] = found.get((source, target), 0) + size
    return tuple((source, target, size) for (source, target), size in sorted(found.items()))
