"""Geometries: how a parameter is cut into shards when its users are cut in certain ways. No devices yet.

The counterpart of ``planning._make_cells``: the grid of all regions that tiles need cuts the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from soap.graph import OperatorGraph
from soap.regions import Box, cells, contains, subtract, volume, whole
from soap.simulator.compiled.growing import Growing
from soap.simulator.compiled.lists import make_lists
from soap.simulator.compiled.state import LOW_BITS, ShardTables
from soap.simulator.costs import CostModel
from soap.simulator.servers import core_type
from soap.topology import DeviceType, Topology

Need = tuple[int, int, Box]
"""(user, tile of one replica or shard of the user's own geometry, region that it needs)."""


class Geometries:
    """The geometries of one graph's trainable parameters."""

    def __init__(self, graph: OperatorGraph, topology: Topology, types: Sequence[DeviceType], costs: CostModel) -> None:
        self._graph, self._topology, self._types, self._costs = graph, topology, types, costs
        self._count = 0
        self._ptr, self._bytes, self._lowest, self._updates = [0], Growing(np.int64), Growing(np.int32), list[list[int]]()
        self._use_ptr, self._use_user, self._use_place = [0], Growing(np.int32), Growing(np.int32)
        self._cut, self._cuts = list[int](), dict[tuple[Box, ...], int]()
        self._tied: dict[tuple[int, ...], int] = {}
        self._core_sizes: dict[tuple[int, ...], int] = {}

    def add(self, parameter: str, users: Sequence[int], needs: Sequence[Need]) -> int:
        """Number of a new geometry. ``users``: positions of the operators that use the parameter."""
        tensor = self._graph.tensors[parameter]
        active = [position in self._graph.backward_operators for position in users]
        needed: dict[Box, list[tuple[int, int]]] = {}
        for user, place, box in needs:
            if volume(box):
                needed.setdefault(box, []).append((user, place))
        grid = _grid(needed)
        disjoint = set(grid) == needed.keys()
        found = []
        for cell in grid:
            uses = needed[cell] if disjoint else [use for box, own in needed.items() if contains(box, cell) for use in own]
            found.append((cell, sorted(set(uses))))
        rest = [whole(tensor.shape)] if grid else []
        for cell in grid if sum(map(volume, grid)) < volume(whole(tensor.shape)) else ():
            rest = [piece for part in rest for piece in subtract(part, cell)]
        if grid and sum(map(volume, grid)) < volume(whole(tensor.shape)):
            found += [(box, []) for box in rest]
        known: dict[int, list[int]] = {}
        for cell, uses in found:
            size = volume(cell) * tensor.itemsize
            if size not in known:
                known[size] = [self._costs.update_ns(size, kind) for kind in self._types]
            self._bytes.add([size])
            self._lowest.add([min((user for user, _ in uses if active[user]), default=-1)])
            self._updates.append(known[size])
            self._use_user.add([user for user, _ in uses])
            self._use_place.add([place for _, place in uses])
            self._use_ptr.append(self._use_user.size)
        self._ptr.append(self._bytes.size)
        self._cut.append(self._cuts.setdefault(tuple(grid), len(self._cuts)))
        self._count += 1
        return self._count - 1

    def tie(self, key: tuple[int, ...], parameter: str, users: Sequence[int]) -> None:
        """The geometry of a parameter of several users, by (parameter, cuts of its users)."""
        known = list(self._cuts)
        needs = [(user, place, box) for user, cut in enumerate(key[1:]) for place, box in enumerate(known[cut])]
        self._tied[key] = self.add(parameter, users, needs)

    def price(self, missing: Sequence[int]) -> None:
        """Find out what updates on hosts' cores take; ``missing``: entries of ``core_size``, one after the other."""
        for host, high, low in zip(missing[::3], missing[1::3], missing[2::3], strict=True):
            self._core_sizes[host, high, low] = self._costs.update_ns((high << LOW_BITS) + low, core_type(self._topology, host))

    def tables(self) -> ShardTables:
        """All of them as arrays."""
        updates = np.array(self._updates, np.int64).reshape(len(self._updates), len(self._types)).T
        return ShardTables(
            np.array(self._ptr, np.int64),
            self._bytes.array(),
            self._lowest.array(),
            np.ascontiguousarray(updates),
            np.array(self._use_ptr, np.int64),
            self._use_user.array(),
            self._use_place.array(),
            np.array(self._cut, np.int32),
            make_lists(list(self._tied)),
            np.array(list(self._tied.values()), np.int32),
            make_lists(list(self._core_sizes)),
            np.array(list(self._core_sizes.values()), np.int64),
        )


def _grid(needed: dict[Box, list[tuple[int, int]]]) -> list[Box]:
    """``regions.cells``, at once where the regions lie in a grid already."""
    if needed:
        dims = zip(*needed, strict=True)
        if all(a[1] <= b[0] for intervals in dims for a, b in pairwise(sorted(set(intervals)))):
            return sorted(needed)
    return cells(needed)
