"""How tiles cut a parameter into shards, and what those are. It knows no devices, and no engine's numbers.

The counterpart of ``planning._make_cells``: the grid of all regions that tiles read cuts the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from soap.model.graph import OperatorGraph
from soap.model.regions import Box, cells, contains, lengths, subtract, volume, whole
from soap.simulator.compiled.graph_arrays import Ints, Longs

Need = tuple[int, int, Box]
"""(user, tile of one replica or shard of the user's own geometry, region that it needs)."""

UpdateTimes = Callable[[int], Sequence[int]]
"""Bytes of a shard -> by type of device, ns of its update."""


class CutParameter(NamedTuple):
    """A parameter in shards. ``grid``: the regions into which what is needed cuts it; behind these there may be shards that nobody reads.

    By shard: ``shapes``, ``bytes``, ``rows``, ``row_bytes``; ``lowest``: the first user that gives it a gradient, -1 if none does;
    ``update_ns``: [type of device, shard]; ``uses``: how many there are, whose users and places follow each other in ``use_user`` and
    ``use_place``."""

    grid: tuple[Box, ...]
    shapes: tuple[tuple[int, ...], ...]
    bytes: Longs
    rows: Longs
    row_bytes: Longs
    lowest: Ints
    update_ns: Longs
    uses: Longs
    use_user: Ints
    use_place: Ints


def cut_parameter(
    graph: OperatorGraph, name: str, users: Sequence[int], needs: Sequence[Need], update_ns: UpdateTimes, types: int
) -> CutParameter:
    """The shards of a parameter. ``users``: positions of the operators that use it. ``types``: number of types of devices. Nothing of a
    frozen parameter gets a gradient."""
    tensor = graph.tensors[name]
    active = [tensor.requires_grad and position in graph.backward_operators for position in users]
    needed: dict[Box, list[tuple[int, int]]] = {}
    for user, place, box in needs:
        if volume(box):
            needed.setdefault(box, []).append((user, place))
    grid = _grid(needed)
    found = [(cell, sorted(set(uses))) for cell, uses in _uses_of(grid, needed)]
    if tensor.requires_grad and grid and sum(map(volume, grid)) < volume(whole(tensor.shape)):
        found += [(box, []) for box in _left(grid, whole(tensor.shape))]
    sizes = [volume(cell) * tensor.itemsize for cell, _ in found]
    rows = [cell[0][1] - cell[0][0] if cell else 1 for cell, _ in found]
    uses = [use for _, own in found for use in own]
    return CutParameter(
        grid=tuple(grid),
        shapes=tuple([lengths(cell) for cell, _ in found]),
        bytes=np.array(sizes, np.int64),
        rows=np.array(rows, np.int64),
        row_bytes=np.array([size // own for size, own in zip(sizes, rows, strict=True)], np.int64),
        lowest=np.array([min((user for user, _ in own if active[user]), default=-1) for _, own in found], np.int32),
        update_ns=np.array([update_ns(size) for size in sizes], np.int64).reshape(len(sizes), types).T.copy(),
        uses=np.array([len(own) for _, own in found], np.int64),
        use_user=np.array([user for user, _ in uses], np.int32),
        use_place=np.array([place for _, place in uses], np.int32),
    )


def _uses_of(
    grid: Sequence[Box], needed: Mapping[Box, Sequence[tuple[int, int]]]
) -> list[tuple[Box, Sequence[tuple[int, int]]]]:
    """Each region of the grid with who needs it, or a part of it."""
    if set(grid) == needed.keys():
        return [(cell, needed[cell]) for cell in grid]
    return [(cell, [use for box, own in needed.items() if contains(box, cell) for use in own]) for cell in grid]


def _left(grid: Sequence[Box], of: Box) -> list[Box]:
    """What the grid leaves of a box."""
    rest = [of]
    for cell in grid:
        rest = [piece for part in rest for piece in subtract(part, cell)]
    return rest


def _grid(needed: Mapping[Box, object]) -> list[Box]:
    """``regions.cells``, with a shortcut if the regions are a grid already."""
    if needed:
        dims = zip(*needed, strict=True)
        if all(a[1] <= b[0] for intervals in dims for a, b in pairwise(sorted(set(intervals)))):
            return sorted(needed)
    return cells(dict.fromkeys(needed))
