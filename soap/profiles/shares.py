"""How much of a prediction rests on measurements: shares of the predicted compute time (tiles and updates) by where they come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from soap.profiles.corrections import CORRECTED
from soap.profiles.lookup import Answer, ProfiledCosts, Source
from soap.simulator.communication.synchronizing import device_updates
from soap.simulator.costs import CostModel
from soap.simulator.tasks import GRADIENTS, TaskGraph

SIGNIFICANT = 4
"""Decimal places of a share."""


def shares(costs: CostModel, tasks: TaskGraph) -> dict[str, float]:
    """By source, best first: its share of the time that all devices compute. Folded tasks count once for each copy."""
    spent_ns = dict.fromkeys(Source, 0)
    if not isinstance(costs, ProfiledCosts):
        return {source.value: float(source is Source.ESTIMATED) for source in Source}
    for answer in _answers(costs, tasks):
        spent_ns[answer.source] += answer.ns
    whole_ns = max(1, sum(spent_ns.values()))
    return {source.value: round(ns / whole_ns, SIGNIFICANT) for source, ns in spent_ns.items()}


def corrected(costs: CostModel, tasks: TaskGraph) -> float:
    """The share of that time that is made of corrected answers, whatever their source."""
    if not isinstance(costs, ProfiledCosts):
        return 0.0
    whole_ns = corrected_ns = 0
    for answer in _answers(costs, tasks):
        whole_ns += answer.ns
        corrected_ns += answer.ns * answer.corrected
    return round(corrected_ns / max(1, whole_ns), SIGNIFICANT)


def text(parts: Mapping[str, float], corrected_part: float) -> str:
    """``90% measured, 10% interpolated; 80% corrected by …``. Zero shares are left out."""
    said = ", ".join(f"{share:.0%} {source}" for source, share in parts.items() if share > 0) or "nothing is computed"
    return f"{said}; {corrected_part:.0%} {CORRECTED}" if corrected_part else said


def _answers(costs: ProfiledCosts, tasks: TaskGraph) -> Iterator[Answer]:
    """The answers for all tiles, in both directions, and for all updates."""
    for task in tasks.tasks:
        if task.tile is not None:
            tile, device = tasks.plan.as_run(tasks.plan.tiles[task.tile]), tasks.topology.devices[task.resources[0]].type
            yield costs.answer(tasks.plan.graph, tile, device, backward=task.kind in GRADIENTS)
    for device_number, size in device_updates(tasks.plan, rows_alone=costs.updates_rows_alone):
        yield costs.update_answer(size, tasks.topology.devices[device_number].type)
