"""Indices into a plan, by operator, tile or reduction, which lowering looks things up in. Pure data."""

from __future__ import annotations

from soap.plan.plan import Exchange, Message, Plan


class PlanPlaces:
    """Which fetches, carriers, reductions and holdings belong to which operator, tile or reduction.

    ``fetches``, ``carriers``: operator -> the fetches, and the messages and exchanges, that it is the first operator to need.
    ``reductions``: operator -> its reductions. ``of_tile``, ``of_reduction``: tile or reduction -> the holdings that it makes; a tile that
    only contributes to sums makes none.
    """

    def __init__(self, plan: Plan) -> None:
        self.fetches: list[list[int]] = [[] for _ in plan.graph.operators]
        self.carriers: list[list[Message | Exchange]] = [[] for _ in plan.graph.operators]
        self.reductions: list[list[int]] = [[] for _ in plan.graph.operators]
        self.of_tile: list[list[int]] = [[] for _ in plan.tiles]
        self.of_reduction: list[list[int]] = [[] for _ in plan.reductions]
        for number, fetch in enumerate(plan.fetches):
            self.fetches[plan.tiles[fetch.consumers[0][0]].operator].append(number)
        carriers: list[Message | Exchange] = [*plan.messages, *plan.exchanges]
        for carrier in carriers:
            first = min(plan.fetches[number].consumers[0][0] for number, _ in carrier.parts)
            self.carriers[plan.tiles[first].operator].append(carrier)
        for place, reduction in enumerate(plan.reductions):
            self.reductions[reduction.operator].append(place)
        for place, holding in enumerate(plan.holdings):
            if holding.reduction is None:
                self.of_tile[holding.tile].append(place)
            else:
                self.of_reduction[holding.reduction].append(place)
