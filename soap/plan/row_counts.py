"""Rows of sparse parameters: which tiles are sparse lookups, how many rows tiles look up, and how many different rows that touches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from soap.model.graph import OperatorGraph
from soap.model.regions import Box, Interval, volume
from soap.model.sparse_access import Lookup, RowAccess
from soap.plan.plan import Plan
from soap.plan.tiling import Tile
from soap.strategy.config import SyncConfig


def looked_up(graph: OperatorGraph, lookup: Lookup, tile: Tile, *, weighed: bool = False) -> int:
    """How many rows a tile looks up, repeated rows counted: the operator's look-ups times the tile's share in all factors that the
    parameter does not follow, rounded up. A tile that has only a part of the rows counts all look-ups, not only those that hit its part.

    ``weighed``: count ``Lookup.weighed`` instead of ``Lookup.indices``.
    """
    op = graph.operators[tile.operator]
    own = {dim.factor for dim in op.parameters[lookup.parameter].dims}
    others = [(stop - start, op.factors[i].size) for i, (start, stop) in enumerate(tile.intervals) if i not in own]
    whole = lookup.weighed if weighed else lookup.indices
    return -(-whole * prod(length for length, _ in others) // prod(size for _, size in others))


def tile_lookups(graph: OperatorGraph, parameter: str, tile: Tile, *, weighed: bool = False) -> int:
    """How many rows of a sparse parameter a tile looks up through all its operands, repeated rows counted.

    ``weighed``: the count that ``RowAccess.touched_by`` takes to find how many different rows are touched.
    """
    own = (lookup for lookup in graph.sparse[parameter].lookups if lookup.operator == tile.operator)
    return sum(looked_up(graph, lookup, tile, weighed=weighed) for lookup in own)


def device_lookups(graph: OperatorGraph, parameter: str, tiles: Sequence[Tile], uses: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Device -> how many rows of a sparse parameter its tiles look up, added up over the tiles; devices ascend.

    ``uses``: (position in ``tiles``, parameter position).
    """
    found: dict[int, int] = {}
    for number in sorted({tile for tile, _ in uses}):
        tile = tiles[number]
        found[tile.device] = found.get(tile.device, 0) + tile_lookups(graph, parameter, tile)
    return dict(sorted(found.items()))


class DeviceLookups:
    """How many rows of a sparse parameter devices look up, weighed, repeated rows counted. Equal tiles of replicas count once.

    ``uses``: (position in ``tiles``, parameter position).
    """

    def __init__(self, graph: OperatorGraph, parameter: str, tiles: Sequence[Tile], uses: Iterable[tuple[int, int]]) -> None:
        self._found: dict[int, dict[tuple[int, tuple[Interval, ...]], int]] = {}
        for number in {tile for tile, _ in uses}:
            tile = tiles[number]
            own = self._found.setdefault(tile.device, {})
            own[tile.operator, tile.intervals] = tile_lookups(graph, parameter, tile, weighed=True)

    def __call__(self, devices: Iterable[int]) -> int:
        """How many these devices look up together."""
        together: dict[tuple[int, tuple[Interval, ...]], int] = {}
        for device in devices:
            together |= self._found.get(device, {})
        return sum(together.values())


def sparse_lookup_operators(graph: OperatorGraph, syncs: Mapping[str, SyncConfig]) -> frozenset[int]:
    """Positions of the operators whose tiles are sparse lookups: every sparse parameter that they use is synchronized by rows.

    ``syncs``: by parameter; parameters with the default synchronization may be missing.
    """
    by_rows, as_a_whole = set[int](), set[int]()
    for name, access in graph.sparse.items():
        rows = syncs.get(name, SyncConfig()).contract.by_rows
        (by_rows if rows else as_a_whole).update(lookup.operator for lookup in access.lookups)
    return frozenset(by_rows - as_a_whole)


def parameters_held(graph: OperatorGraph, tile: Tile) -> tuple[Box, ...]:
    """Boxes as large as what a tile holds of its parameters: its regions; in a sparse lookup, only as many rows as it looks up."""
    if not tile.sparse_lookup:
        return tile.parameters
    held = list(tile.parameters)
    for place, operand in enumerate(graph.operators[tile.operator].parameters):
        access = graph.sparse.get(operand.tensor)
        if access is not None:
            own = (lookup for lookup in access.lookups if (lookup.operator, lookup.parameter) == (tile.operator, place))
            lookups = sum(looked_up(graph, lookup, tile, weighed=True) for lookup in own)
            held[place] = ((0, touched_rows(access, held[place], lookups)), *held[place][1:])
    return tuple(held)


def all_lookups(graph: OperatorGraph, tile: Tile) -> int:
    """How many rows of all its sparse parameters a tile looks up, repeated rows counted."""
    names = {operand.tensor for operand in graph.operators[tile.operator].parameters} & graph.sparse.keys()
    return sum(tile_lookups(graph, name, tile) for name in names)


def touched_rows(access: RowAccess, box: Box, lookups: int) -> int:
    """How many different rows of a region this many look-ups of its parameter touch, rounded up, if they spread evenly over the rows."""
    start, stop = box[0]
    return -(-access.touched_by(lookups) * (stop - start) // access.rows)


def most_rows(plan: Plan, parameter: str, box: Box, uses: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Device -> the most different rows of a region that its tiles can look up: as if no look-up repeated a row."""
    start, stop = box[0]
    return {device: min(stop - start, count) for device, count in device_lookups(plan.graph, parameter, plan.tiles, uses).items()}


def row_bytes(graph: OperatorGraph, parameter: str, box: Box) -> int:
    """Size of one row of a region of a parameter."""
    return volume(box[1:]) * graph.tensors[parameter].itemsize
