"""Recomputation: which tiles run forward a second time before their backward pass, and what of each other they need for it.

Between forward and backward pass a tile of a marked operator (``OpConfig.recompute``) keeps nothing that it has made inside, and no output
that only such tiles of its own device read. So marked operators that follow each other on a device form *runs*, of which only what enters
and leaves is kept. Kept are, whatever is marked: what other tiles of the device read, what came from other devices or was sent to them, and
sums of partial results. No communication is repeated, and each device runs its own tiles alone, unless operators gather again
(``Plan.gathered_again``, ``Plan.summed_again``).

A tile that runs again but for its product (``LIGHT``) keeps its outputs. So it may read what is made again, and nothing reads of it again:
it is a run of its own.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from soap.plan.plan import Plan


def second_links(plan: Plan, active: Collection[int]) -> dict[int, tuple[int, ...]]:
    """Tile that runs twice -> the tiles whose second outputs it reads in its own second run; tiles that read none are missing. ``active``:
    the tiles that have a backward pass."""
    marked = plan.recomputed_operators
    tiles = frozenset(tile for tile in active if plan.tiles[tile].operator in marked) if marked else frozenset[int]()
    links: dict[int, set[int]] = {}
    for number in range(len(plan.fetches) if tiles else 0):
        makers = remade(plan, number, tiles)
        for tile, _ in plan.fetches[number].consumers if makers else ():
            if tile in tiles:
                links.setdefault(tile, set()).update(makers)
    return {tile: tuple(sorted(own)) for tile, own in sorted(links.items())}


def remade(plan: Plan, number: int, tiles: Collection[int]) -> list[int]:
    """The tiles among ``tiles`` whose second outputs are in a fetched region, if one of ``tiles`` reads it again. None if parts of it come
    from other devices: then the whole region is kept. Sums are kept, too, and what is ``LIGHT``."""
    fetch = plan.fetches[number]
    held = [plan.holdings[piece.holding] for piece in fetch.pieces]
    if any(own.device != fetch.device for own in held):
        return []
    return [own.tile for own in held if own.reduction is None and own.tile in tiles and not keeps_outputs(plan, own.tile)]


def keeps_outputs(plan: Plan, tile: int) -> bool:
    """Whether a tile that runs twice keeps what it has made the first time."""
    return plan.tiles[tile].operator in plan.light_operators


def dropped_holdings(plan: Plan, tiles: Collection[int], active: Collection[int]) -> frozenset[int]:
    """Holdings that are gone between their last reader in the forward pass and their tile's second run: those of recomputed ``tiles`` that
    no other tile of their device reads that has a backward pass. ``active``: the tiles that have one."""
    kept: set[int] = set()
    for fetch in plan.fetches if tiles else ():
        held = [plan.holdings[piece.holding] for piece in fetch.pieces]
        whole = all(own.device == fetch.device for own in held)  # else the region is a copy
        if whole and any(tile in active and tile not in tiles for tile, _ in fetch.consumers):
            kept.update(piece.holding for piece in fetch.pieces)
    made = (place for place, held in enumerate(plan.holdings) if held.reduction is None and held.tile in tiles) if tiles else ()
    dropped = frozenset(place for place in made if place not in kept and not keeps_outputs(plan, plan.holdings[place].tile))
    again = plan.summed_again
    sums = (place for place, held in enumerate(plan.holdings) if held.reduction is not None and plan.tiles[held.tile].operator in again)
    return dropped.union(sums if again else ())


class Needed(NamedTuple):
    """Where a backward pass has come: the ``chunk`` of its action (``PassOrder``; 0 without micro-batches), of which the highest goes back
    first, and the ``position`` of the operator."""

    chunk: int
    position: int


def needed_from(plan: Plan) -> tuple[Needed, ...]:
    """By operator, where the backward pass of a micro-batch may first need what it reads: at the operator itself, or if that is recomputed
    where it comes to the first reader. In an earlier chunk, behind a barrier, that is only so if second runs there read what it makes
    again: nothing else waits for its own second run before its own chunk goes back."""
    graph, marked = plan.graph, plan.recomputed_operators
    chunks = [0] * len(graph.operators) if plan.order is None else plan.order.chunks
    found = [Needed(*own) for own in zip(chunks, range(len(chunks)), strict=True)]
    for position in reversed(range(len(found))) if marked else ():
        again = position in marked and position not in plan.light_operators
        for output in graph.operators[position].outputs if position in marked else ():
            for reader, _ in graph.consumers.get(output.tensor, ()):
                own = found[reader] if again and reader in marked else Needed(chunks[position], reader)
                found[position] = max(found[position], own)
    return tuple(found)
