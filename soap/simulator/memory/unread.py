"""Tiles that make only what nobody reads, so that ranks keep and compute nothing for them."""

from __future__ import annotations

from collections.abc import Iterator

from soap.plan.plan import Plan
from soap.plan.tiling import Tile


def unread_tiles(plan: Plan) -> Iterator[int]:
    """Tiles that make only sums that nobody reads (``OperatorGraph.sums_of``)."""
    graph, bounds = plan.graph, (*plan.first_tile, len(plan.tiles))
    for sums, source in graph.sums_of.items():
        maker = graph.producers[sums][0]
        readers = {position for position, _ in graph.consumers.get(sums, ())}
        tiles = [tile for position in readers for tile in plan.tiles[bounds[position] : bounds[position + 1]]]
        if len(graph.operators[maker].outputs) == 1 and all(_sees_all_but_channels(plan, tile, source) for tile in tiles):
            yield from range(bounds[maker], bounds[maker + 1])


def _sees_all_but_channels(plan: Plan, tile: Tile, source: str) -> bool:
    regions = [box for o, box in zip(plan.operator(tile).inputs, tile.inputs, strict=True) if o.tensor == source]
    shape = plan.graph.tensors[source].shape
    return any(all(side == (0, size) for i, (side, size) in enumerate(zip(box, shape, strict=True)) if i != 1) for box in regions)
