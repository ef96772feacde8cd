"""Look-up tables of a plan, and where gradients flow in it. Pure data, no torch.

A tile is *active* if it has a backward pass: a gradient reaches one of its outputs. Everything follows from the plan alone, so all ranks
agree on who sends which gradient to whom without talking to each other. The simulator's lowering follows the same rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from soap.plan.plan import Exchange, Message, Plan, local_pieces, remote_parts

ValueKey = tuple[Literal["holding", "fetch"], int]
"""A value that a rank computes with, besides parameters: a holding or a fetch of its own, by its position in the plan."""

Carrier = tuple[Literal["message", "exchange"], int]
"""A message or exchange that brings parts of fetches, by its position in the plan."""


class PlanIndex:
    """Look-up tables of a plan.

    ``fetch_of``: (tile, input) -> fetch. ``direct``: tile -> [(output, holding)] for outputs that stay on its device without a reduction.
    ``partial``: (tile, output) -> the reduction that it contributes to. ``reduced``: (reduction, device) -> holding.
    ``fetches_from``: holding -> fetches that take a piece of it. ``carriers``: fetch -> messages and exchanges that bring parts of it;
    fetches without parts from elsewhere are missing. ``carriers_from``: holding -> messages and exchanges that take parts of it.
    ``moves``: carrier -> the message or exchange itself.
    """

    def __init__(self, plan: Plan) -> None:
        self.fetch_of = {consumer: i for i, fetch in enumerate(plan.fetches) for consumer in fetch.consumers}
        self.partial = {(tile, r.output): i for i, r in enumerate(plan.reductions) for tile in r.tiles}
        self.direct: dict[int, list[tuple[int, int]]] = {}
        self.reduced: dict[tuple[int, int], int] = {}
        self.fetches_from: list[list[int]] = [[] for _ in plan.holdings]
        for place, holding in enumerate(plan.holdings):
            if holding.reduction is not None:
                self.reduced[holding.reduction, holding.device] = place
            else:
                outputs = plan.operator(plan.tiles[holding.tile]).outputs
                output = next(k for k, operand in enumerate(outputs) if operand.tensor == holding.tensor)
                self.direct.setdefault(holding.tile, []).append((output, place))
        for number, fetch in enumerate(plan.fetches):
            for piece in fetch.pieces:
                if number not in self.fetches_from[piece.holding][-1:]:
                    self.fetches_from[piece.holding].append(number)
        self.moves: dict[Carrier, Message | Exchange] = {}
        self.moves.update({("message", number): message for number, message in enumerate(plan.messages)})
        self.moves.update({("exchange", number): exchange for number, exchange in enumerate(plan.exchanges)})
        self.carriers: dict[int, list[Carrier]] = {}
        self.carriers_from: dict[int, list[Carrier]] = {}
        for key, carrier in self.moves.items():
            for number in dict.fromkeys(fetch for fetch, _ in carrier.parts):
                self.carriers.setdefault(number, []).append(key)
            for place in dict.fromkeys(holding for *_, holding in remote_parts(plan, carrier.parts)):
                self.carriers_from.setdefault(place, []).append(key)


@dataclass
class Activity:
    """The parts of a plan that carry gradients, by position. ``seeds``: tiles whose outputs have a known gradient, where the backward pass
    begins."""

    tiles: set[int] = field(default_factory=set)
    fetches: set[int] = field(default_factory=set)
    holdings: set[int] = field(default_factory=set)
    reductions: set[int] = field(default_factory=set)
    seeds: set[int] = field(default_factory=set)


def count_second_readers(plan: Plan, index: PlanIndex, rank: int, tiles: Collection[int]) -> dict[ValueKey, int]:
    """How often second runs of these tiles read each of a rank's holdings and fetches, counted as ``count_readers`` does."""
    counts: dict[ValueKey, int] = {}
    for number, fetch in enumerate(plan.fetches if tiles else ()):
        readers = sum(tile in tiles for tile, _ in fetch.consumers)
        if fetch.device != rank or not readers:
            continue
        counts["fetch", number] = readers
        if number not in index.carriers:
            for holding in {piece.holding for piece in local_pieces(plan, fetch)}:
                counts["holding", holding] = counts.get(("holding", holding), 0) + 1
    return counts


def count_takers(plan: Plan, index: PlanIndex, rank: int) -> dict[ValueKey, int]:
    """How often parts of the gradient of a rank's fetch are taken, for fetches with parts from elsewhere: once by each message and exchange
    that brought a part, and once for each holding of this rank that it reads."""
    counts: dict[ValueKey, int] = {}
    for number, carriers in index.carriers.items():
        if plan.fetches[number].device == rank:
            counts["fetch", number] = len(carriers) + len({piece.holding for piece in local_pieces(plan, plan.fetches[number])})
    return counts


def count_readers(plan: Plan, index: PlanIndex, rank: int) -> dict[ValueKey, int]:
    """How often the forward pass of a rank reads each of its holdings and fetches.

    Each consumer of a fetch reads it once. A holding is read once by each message and exchange that takes a piece of it, and once by each
    fetch of its own rank.
    """
    counts: dict[ValueKey, int] = {}

    def add(kind: Literal["holding", "fetch"], numbers: Iterable[int], times: int = 1) -> None:
        for number in set(numbers):
            counts[kind, number] = counts.get((kind, number), 0) + times

    for number, fetch in enumerate(plan.fetches):
        if fetch.device == rank:
            add("fetch", [number], len(fetch.consumers))
            add("holding", (piece.holding for piece in local_pieces(plan, fetch)))
    for carrier in index.moves.values():
        add("holding", (holding for source, _, _, holding in remote_parts(plan, carrier.parts) if source == rank))
    return counts
