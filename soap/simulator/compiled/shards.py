"""Geometries: how a parameter is cut into shards, given how its users are cut (``cut_parameters``), as an engine numbers them, in arrays
for compiled code. A geometry knows no devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from soap.cluster.topology import DeviceType, Topology
from soap.model.graph import OperatorGraph
from soap.model.regions import Box
from soap.plan.compression.training import PlannedTraining
from soap.plan.placement import first_devices
from soap.simulator.communication.offloading import offload_updater
from soap.simulator.communication.servers import server_type
from soap.simulator.compiled.effort import effort_row
from soap.simulator.compiled.growing import Growing, GrowingColumns, are_same
from soap.simulator.compiled.lists import GrowingLists
from soap.simulator.compiled.state import LOW_BITS, ShardTables
from soap.simulator.compiled.syncs.codes import SyncCodes
from soap.simulator.costs import CostModel, table_update_ns
from soap.simulator.cut_parameters import CutParameter


class Geometries:
    """The geometries that one engine knows. Nothing of a frozen parameter gets a gradient."""

    def __init__(
        self,
        graph: OperatorGraph,
        topology: Topology,
        types: Sequence[DeviceType],
        costs: CostModel,
        training: PlannedTraining,
        codes: SyncCodes,
    ) -> None:
        self._codes = codes
        self._graph, self._topology, self._types, self._costs, self._training = graph, topology, types, costs, training
        self._ptr, self._bytes, self._lowest = Growing(np.int64), Growing(np.int64), Growing(np.int32)
        self._update_ns = GrowingColumns(len(types), np.int64)
        self._use_ptr, self._use_user, self._use_place = Growing(np.int64), Growing(np.int32), Growing(np.int32)
        self._cut, self._cuts = Growing(np.int32), dict[tuple[Box, ...], int]()
        self._tied, self._tied_geometry = GrowingLists(), Growing(np.int32)
        self._rows, self._row_bytes = Growing(np.int64), Growing(np.int64)
        self._size_ptr, self._size = Growing(np.int64), Growing(np.int64)
        self._prices, self._price_ns = GrowingLists(), Growing(np.int64)
        self._compressed, self._effort = GrowingLists(), Growing(np.int64)
        self._fixed = np.array([costs.updates_rows_alone], np.int32), np.array([training.clips], np.int32)
        self._shapes: list[tuple[int, ...]] = []
        self._first = {topology.devices[first].host: first for first in first_devices(topology)}
        self._accelerators = {own.host: own.index for own in topology.devices if own.type.kind != "cpu"}  # one of each host
        self._ptr.add([0])
        self._size_ptr.add([0])
        self._use_ptr.add([0])
        self._arrays: ShardTables | None = None

    def add(self, cut: CutParameter) -> int:
        """Add a geometry; returns its number."""
        self._bytes.add(cut.bytes)
        self._shapes += cut.shapes
        for shape in cut.shapes:
            self._size.add(shape)
            self._size_ptr.add([self._size.size])
        self._rows.add(cut.rows)
        self._row_bytes.add(cut.row_bytes)
        self._lowest.add(cut.lowest)
        self._update_ns.add(cut.update_ns)
        self._use_ptr.add(self._use_user.size + np.cumsum(cut.uses))
        self._use_user.add(cut.use_user)
        self._use_place.add(cut.use_place)
        self._ptr.add([self._bytes.size])
        return self._cut.add([self._cuts.setdefault(cut.grid, len(self._cuts))])

    def grids(self, cuts: Sequence[int]) -> tuple[tuple[Box, ...], ...]:
        """``CutParameter.grid`` by number, as ``ShardTables.cut`` has it."""
        known = list(self._cuts)
        return tuple([known[cut] for cut in cuts])

    def tie(self, key: tuple[int, ...], cut: CutParameter) -> None:
        """Add the geometry of a parameter that several operators use. ``key``: (parameter, its users' cuts)."""
        self._tied.add(key)
        self._tied_geometry.add([self.add(cut)])

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
        self._effort.add(effort_row(self._codes, self._graph, self._costs, self._types, self._training, self._shapes[key[2]], key))

    def arrays(self) -> ShardTables:
        """All geometries and prices as arrays, with room behind them: the same ones until that is full, or a list is added."""
        rooms: dict[str, NDArray[Any]] = {
            "ptr": self._ptr.room, "bytes": self._bytes.room, "rows": self._rows.room, "row_bytes": self._row_bytes.room,
            "size_ptr": self._size_ptr.room, "size": self._size.room,
            "lowest": self._lowest.room, "update_ns": self._update_ns.room, "use_ptr": self._use_ptr.room,
            "use_user": self._use_user.room, "use_place": self._use_place.room, "cut": self._cut.room,
            "tied_geometry": self._tied_geometry.room, "price_ns": self._price_ns.room, "effort": self._effort.room,
        }  # fmt: skip
        lists, (rows_alone, clips) = (self._tied.arrays(), self._prices.arrays(), self._compressed.arrays()), self._fixed
        tied, price, compressed = lists
        found = ShardTables(**rooms, tied=tied, price=price, compressed=compressed, rows_alone=rows_alone, clips=clips)
        if self._arrays is None or not are_same(self._arrays, found):
            self._arrays = found
        return self._arrays
