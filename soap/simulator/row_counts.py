"""How many rows of sparse parameters tiles look up, and how many different ones a device's tiles touch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from soap.graph import OperatorGraph
from soap.regions import Box
from soap.row_access import Lookup, RowAccess
from soap.simulator.tiling import Tile


def looked_up(graph: OperatorGraph, lookup: Lookup, tile: Tile) -> int:
    """How many rows a tile looks up, repeated ones counted: its part of the operator's points in all factors that the parameter does not
    follow, rounded up. A tile with a part of the rows counts what it is asked for, wherever that lies."""
    op = graph.operators[tile.operator]
    own = {dim.factor for dim in op.parameters[lookup.parameter].dims}
    others = [(stop - start, op.factors[i].size) for i, (start, stop) in enumerate(tile.intervals) if i not in own]
    return -(-lookup.indices * prod(length for length, _ in others) // prod(size for _, size in others))


def touched_rows(
    graph: OperatorGraph, parameter: str, box: Box, tiles: Sequence[Tile], uses: Iterable[tuple[int, int]]
) -> dict[int, int]:
    """Device -> how many different rows of a region of a sparse parameter its tiles touch in a step; devices ascend.

    ``uses``: (position in ``tiles``, parameter position). Rows are taken to be spread evenly over the regions of a parameter.
    """
    access = graph.sparse[parameter]
    lookups = {(lookup.operator, lookup.parameter): lookup for lookup in access.lookups}
    indices: dict[int, int] = {}
    for tile, place in uses:
        own = tiles[tile]
        indices[own.device] = indices.get(own.device, 0) + looked_up(graph, lookups[own.operator, place], own)
    return {device: part_of_rows(access, box, access.touched_by(count)) for device, count in sorted(indices.items())}


def part_of_rows(access: RowAccess, box: Box, rows: int) -> int:
    """Of so many of a parameter's rows, how many lie in a region, rounded up."""
    start, stop = box[0]
    return -(-rows * (stop - start) // access.rows)
