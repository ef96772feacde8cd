"""The order in which tiles run forward. Pure data, no torch.

Each rule takes a topological order of all tiles and returns one. ``forward_order`` applies them one after the other:

- ``model_order_if_nothing_travels``: if no order makes any device wait, the model's own order is taken.
- ``sources_late``: a tile without inputs from other tiles runs right before its first reader.
- ``by_action``: with micro-batches, actions of ``Plan.order`` follow each other.
- ``epilogue_last``: the loss epilogue runs after everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from soap.errors import RuntimeFailure
from soap.plan.plan import Part, Plan
from soap.plan.running.activity import PlanIndex
from soap.plan.running.epilogue import LossEpilogue, closing_tensors


@dataclass(frozen=True)
class ExecutionOrder:
    """Tiles (positions in ``Plan.tiles``) in the order in which their passes begin. ``forward``: all tiles. ``backward``: the tiles that
    have a backward pass; if empty, the forward order is reversed."""

    forward: tuple[int, ...]
    backward: tuple[int, ...] = ()


def forward_order(plan: Plan, index: PlanIndex, order: ExecutionOrder, epilogue: LossEpilogue) -> ExecutionOrder:
    """The order in which a program runs tiles. Raises RuntimeFailure if ``order.forward`` is no topological order of all tiles."""
    _check(plan, index, order.forward)
    order = model_order_if_nothing_travels(plan, order, epilogue)
    forward = by_action(plan, sources_late(plan, index, order.forward))
    return ExecutionOrder(epilogue_last(plan, forward, epilogue), order.backward)


def model_order_if_nothing_travels(plan: Plan, order: ExecutionOrder, epilogue: LossEpilogue) -> ExecutionOrder:
    """*Invariant*: if only the loss and gradients travel between devices, no order of the tiles makes any device wait. Then tiles run in
    the model's own order, which completes gradients, and starts their sums, the earliest."""
    ends = closing_tensors(plan, epilogue) | {plan.graph.loss}
    sums = {plan.graph.operators[r.operator].outputs[r.output].tensor for r in plan.reductions if len(r.devices) > 1}
    parts = [part for message in plan.messages for part in message.parts] + [part for exchange in plan.exchanges for part in exchange.parts]
    moved = {plan.fetches[fetch].tensor for fetch, _ in parts}
    return ExecutionOrder(tuple(range(len(plan.tiles))), ()) if (sums | moved) <= ends else order


def sources_late(plan: Plan, index: PlanIndex, order: Sequence[int]) -> tuple[int, ...]:
    """*Invariant*: a tile that waits for no other, such as a sparse lookup, comes right before its first reader if all readers are on its
    device. The backward pass runs in reverse: so its gradient, which may have far to travel, is complete early."""
    places = places_of(order)
    readers: dict[int, list[int]] = {}
    tied = {tile for tile, _ in index.fetch_of}
    for fetch in plan.fetches:
        for held in (plan.holdings[piece.holding] for piece in fetch.pieces):
            readers.setdefault(held.tile, []).extend(places[tile] for tile, _ in fetch.consumers)
            if held.device != fetch.device or held.reduction is not None:
                tied.update((held.tile,) if held.reduction is None else plan.reductions[held.reduction].tiles)
    first = {tile: min(own) for tile, own in readers.items() if tile not in tied}
    return tuple(sorted(order, key=lambda tile: (first.get(tile, places[tile]), tile not in first, places[tile])))


def by_action(plan: Plan, order: Sequence[int]) -> tuple[int, ...]:
    """*Invariant*: forward passes follow the actions of ``Plan.order``; those of one action keep their order."""
    return tuple(sorted(order, key=lambda tile: plan.rank(plan.tiles[tile], "F")))


def epilogue_last(plan: Plan, order: Sequence[int], epilogue: LossEpilogue) -> tuple[int, ...]:
    """*Invariant*: tiles of the loss epilogue come after all others. Each of the two groups keeps its order."""
    return tuple(sorted(order, key=lambda tile: plan.tiles[tile].operator in epilogue.operators))


def places_of(order: Sequence[int]) -> list[int]:
    """Tile -> place in the order."""
    places = [0] * len(order)
    for place, tile in enumerate(order):
        places[tile] = place
    return places


def part_ready(plan: Plan, part: Part, places: Sequence[int]) -> int:
    """Place of the last tile that must run before a part can be sent."""
    return _ready(plan, plan.fetches[part[0]].pieces[part[1]].holding, places)


def _ready(plan: Plan, holding: int, places: Sequence[int]) -> int:
    """Place of the last tile that must run before a holding exists."""
    held = plan.holdings[holding]
    tiles = (held.tile,) if held.reduction is None else plan.reductions[held.reduction].tiles
    return max(places[tile] for tile in tiles)


def _check(plan: Plan, index: PlanIndex, order: Sequence[int]) -> None:
    """Raise RuntimeFailure if it is no topological order of all tiles."""
    if sorted(order) != list(range(len(plan.tiles))):
        raise RuntimeFailure(f"order of {len(order)} tiles: expected each of the plan's {len(plan.tiles)} tiles once; compute it anew")
    places = places_of(order)
    ready = [max(_ready(plan, piece.holding, places) for piece in fetch.pieces) for fetch in plan.fetches]
    for exchange in plan.exchanges:  # all its parts arrive at once
        latest = max(part_ready(plan, part, places) for part in exchange.parts)
        for fetch, _ in exchange.parts:
            ready[fetch] = max(ready[fetch], latest)
    for (tile, _), fetch in index.fetch_of.items():
        if ready[fetch] >= places[tile]:
            name = plan.operator(plan.tiles[tile]).name
            raise RuntimeFailure(f"order runs tile {plan.tiles[tile].index} of {name!r} before its input; expected a topological order")
