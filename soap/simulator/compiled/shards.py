"""Geometries: how a parameter is cut into shards, given how its users are cut. A geometry knows no devices.

The counterpart of ``planning._make_cells``: the grid of all regions that tiles read cuts the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from soap.cluster.topology import DeviceType, Topology
from soap.model.graph import OperatorGraph
from soap.model.regions import Box, cells, contains, lengths, subtract, volume, whole
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.plan.placement import first_devices
from soap.simulator.communication.offloading import offload_updater
from soap.simulator.communication.servers import server_type
from soap.simulator.compiled.effort import effort_row
from soap.simulator.compiled.growing import Growing
from soap.simulator.compiled.lists import GrowingLists
from soap.simulator.compiled.state import LOW_BITS, ShardTables
from soap.simulator.costs import CostModel, table_update_ns, updates_rows_alone

Need = tuple[int, int, Box]
"""(user, tile of one replica or shard of the user's own geometry, region that it needs)."""


class Geometries:
    """The geometries of one graph's parameters. Nothing of a frozen one gets a gradient."""

    def __init__(
        self,
        graph: OperatorGraph,
        topology: Topology,
        types: Sequence[DeviceType],
        costs: CostModel,
        training: PlannedTraining = PLAIN,
    ) -> None:
        self._graph, self._topology, self._types, self._costs, self._training = graph, topology, types, costs, training
        self._ptr, self._bytes, self._lowest = Growing(np.int64), Growing(np.int64), Growing(np.int32)
        self._updates = [Growing(np.int64) for _ in types]
        self._use_ptr, self._use_user, self._use_place = Growing(np.int64), Growing(np.int32), Growing(np.int32)
        self._cut, self._cuts = Growing(np.int32), dict[tuple[Box, ...], int]()
        self._tied, self._tied_geometry = GrowingLists(), Growing(np.int32)
        self._rows, self._row_bytes = Growing(np.int64), Growing(np.int64)
        self._prices, self._price_ns = GrowingLists(), Growing(np.int64)
        self._compressed, self._effort = GrowingLists(), Growing(np.int64)
        self._shapes: list[tuple[int, ...]] = []
        self._first = {topology.devices[first].host: first for first in first_devices(topology)}
        self._accelerators = {own.host: own.index for own in topology.devices if own.type.kind != "cpu"}  # one of each host
        self._ptr.add([0])
        self._use_ptr.add([0])

    def add(self, parameter: str, users: Sequence[int], needs: Sequence[Need]) -> int:
        """Add a geometry; returns its number. ``users``: positions of the operators that use the parameter."""
        tensor = self._graph.tensors[parameter]
        active = [tensor.requires_grad and position in self._graph.backward_operators for position in users]
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
        if tensor.requires_grad and grid and sum(map(volume, grid)) < volume(whole(tensor.shape)):
            found += [(box, []) for box in rest]
        known: dict[int, list[int]] = {}
        for cell, uses in found:
            size = volume(cell) * tensor.itemsize
            if size not in known:
                known[size] = [self._costs.update_ns(size, kind) for kind in self._types]
            self._bytes.add([size])
            self._shapes.append(lengths(cell))
            rows = cell[0][1] - cell[0][0] if cell else 1
            self._rows.add([rows])
            self._row_bytes.add([size // rows])
            self._lowest.add([min((user for user, _ in uses if active[user]), default=-1)])
            for update, own in zip(self._updates, known[size], strict=True):
                update.add([own])
            self._use_user.add([user for user, _ in uses])
            self._use_place.add([place for _, place in uses])
            self._use_ptr.add([self._use_user.size])
        self._ptr.add([self._bytes.size])
        return self._cut.add([self._cuts.setdefault(tuple(grid), len(self._cuts))])

    def tie(self, key: tuple[int, ...], parameter: str, users: Sequence[int]) -> None:
        """Add the geometry of a parameter that several operators use. ``key``: (parameter, its users' cuts)."""
        known = list(self._cuts)
        needs = [(user, place, box) for user, cut in enumerate(key[1:]) for place, box in enumerate(known[cut])]
        self._tied.add(key)
        self._tied_geometry.add([self.add(parameter, users, needs)])

    def price(self, missing: Sequence[int]) -> None:
        """Ask the cost model for the prices of updates. ``missing``: entries of ``price``, one after the other."""
        hosts = len(self._topology.hosts)
        for owner, high, low in dict.fromkeys(zip(missing[::3], missing[1::3], missing[2::3], strict=True)):
            kinds, size = hosts + len(self._types), (high << LOW_BITS) + low
            place, of_rows = owner % kinds, owner // kinds == 1
            if owner >= 2 * kinds:
                kind = offload_updater(self._topology, self._accelerators[place])
            else:
                kind = server_type(self._topology, self._first[place]) if place < hosts else self._types[place - hosts]
            self._prices.add((owner, high, low))
            self._price_ns.add([table_update_ns(self._costs, size, size, kind) if of_rows else self._costs.update_ns(size, kind)])

    def compress(self, key: tuple[int, ...]) -> None:
        """Work out what compression of a shard takes. ``key``: an entry of ``compressed``."""
        self._compressed.add(key)
        self._effort.add(effort_row(self._graph, self._costs, self._types, self._training, self._shapes[key[2]], key))

    def arrays(self) -> ShardTables:
        """All geometries and prices as arrays."""
        return ShardTables(
            ptr=self._ptr.array(),
            bytes=self._bytes.array(),
            rows=self._rows.array(),
            row_bytes=self._row_bytes.array(),
            lowest=self._lowest.array(),
            update_ns=np.stack([update.array() for update in self._updates]),
            use_ptr=self._use_ptr.array(),
            use_user=self._use_user.array(),
            use_place=self._use_place.array(),
            cut=self._cut.array(),
            tied=self._tied.arrays(),
            tied_geometry=self._tied_geometry.array(),
            price=self._prices.arrays(),
            price_ns=self._price_ns.array(),
            compressed=self._compressed.arrays(),
            effort=self._effort.array(),
            clips=np.array([self._training.clips], np.int32),
            rows_alone=np.array([updates_rows_alone(self._costs)], np.int32),
        )


def _grid(needed: dict[Box, list[tuple[int, int]]]) -> list[Box]:
    """``regions.cells``, with a shortcut if the regions are a grid already."""
    if needed:
        dims = zip(*needed, strict=True)
        if all(a[1] <= b[0] for intervals in dims for a, b in pairwise(sorted(set(intervals)))):
            return sorted(needed)
    return cells(needed)
