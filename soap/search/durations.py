"""How long an operator's tiles take with certain degrees, worked out once for all operators that differ in names only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.simulator.costs import CostModel
from soap.strategy.shares import Shares

if TYPE_CHECKING:
    from soap.simulator.shared import Shared

Longs = NDArray[np.int64]


class TileDurations:
    """The durations of all tiles, by operator, degrees and shares."""

    def __init__(self, graph: OperatorGraph, topology: Topology, costs: CostModel, shared: Shared | None = None) -> None:
        """``shared``: what engines of these have worked out; nothing if None."""
        from soap.simulator.compiled.graph_arrays import device_types  # imported here: it imports numba
        from soap.simulator.cut_operators import CutOperators

        self._cuts = shared.cuts if shared is not None else CutOperators(graph, topology, costs)
        names = device_types(topology)
        self.type_of: tuple[int, ...] = tuple(names.index(device.type.name) for device in topology.devices)
        """Device -> position of its type."""
        self.type_count = len(names)
        self._known: dict[tuple[int, tuple[int, ...], Shares, bool], Longs] = {}

    def __call__(self, position: int, degrees: tuple[int, ...], shares: Shares = (), *, sparse_lookup: bool = False) -> Longs:
        """Nanoseconds, [device type, forward or backward, tile of one replica], of the operator at ``position``. ``sparse_lookup``: whether
        its sparse parameters are synchronized by rows instead of all-reduced."""
        same = self.same(position)
        key = (same, degrees, shares, sparse_lookup)
        if key not in self._known:
            self._known[key] = self._cuts.durations(same, degrees, shares, sparse_lookup=sparse_lookup)
        return self._known[key]

    def same(self, position: int) -> int:
        """The first operator that differs from this one in its names only."""
        return self._cuts.class_of(position)
