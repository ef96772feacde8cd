"""Templates of synchronizations, as an engine numbers them, in arrays for compiled code (``state.SyncTemplates``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.syncs.amounts import Group
from soap.plan.syncs.keeping import serving
from soap.plan.syncs.seam import How, Row, Template, method_of
from soap.simulator.compiled.groups import DeviceGroups
from soap.simulator.compiled.growing import Growing, are_same
from soap.simulator.compiled.lists import GrowingLists
from soap.simulator.compiled.state import SyncTemplates
from soap.simulator.compiled.syncs.codes import SyncCodes
from soap.strategy.sync import ALL_REDUCE

IDLE, GRADIENT, FROZEN = range(3)
"""Of a region: no gradient reaches it; one does; or nothing trains it."""


class Templates:
    """Grows as compiled code asks for templates. Regions with equal templates that may travel together have one number."""

    def __init__(self, graph: OperatorGraph, topology: Topology, codes: SyncCodes, groups: DeviceGroups) -> None:
        self._graph, self._topology, self._codes, self._groups = graph, topology, codes, groups
        self._known, self._numbers = GrowingLists(), dict[tuple[object, ...], int]()
        kinds = SyncTemplates.__annotations__.items()
        self._columns = {name: Growing(np.int64 if "Longs" in str(kind) else np.int32) for name, kind in kinds if name != "known"}
        for name in ("row_ptr", "inside_ptr", "item_ptr"):
            self._columns[name].add([0])
        self._accelerators = frozenset(device.index for device in topology.devices if device.type.kind != "cpu")
        self._arrays: SyncTemplates | None = None

    def add(self, key: tuple[int, ...]) -> None:
        """Add the template of a list of ``SyncTemplates.known``."""
        code, need, *devices = key
        sync, readers = self._codes.sync(code), tuple(devices)
        used, leaders = serving(self._topology, sync, readers)
        synchronized = need == GRADIENT or (need == FROZEN and used.contract.gathers_values)
        if not synchronized:
            used, leaders = replace(ALL_REDUCE, offload=sync.offload), readers
        same = (used.contract, used.compression, used.offload, used.partitions, readers, leaders, synchronized)
        if same not in self._numbers:
            even, method = self._accelerators.issuperset(readers), method_of(used.contract)
            found = method.template(readers, leaders, even=even) if synchronized else Template()
            self._numbers[same] = len(self._numbers)
            self._put(
                readers=[self._groups.number(readers)], parts=[len(found.copies[0]) if found.copies else 0], added=[found.added],
                even=[even], offloads=[used.offload], wire_bits=[used.contract.wire_bits or 0],
                limits=method.limits(self._graph) or (0, 0),
                inside=[group.index(reader) for reader in readers for group in found.copies if reader in group],
            )  # fmt: skip
            for row in found.rows:
                self._add_row(row)
            self._put(row_ptr=[self._columns["phase"].size], inside_ptr=[self._columns["inside"].size])
        self._known.add(key)
        self._put(number=[self._numbers[same]])

    def _add_row(self, row: Row) -> None:
        items = row.flows if row.how is How.EXCHANGE else [(self._set(row, devices),) for devices in row.groups]
        self._put(item=[own for item in items for own in item])
        self._put(
            phase=[row.phase], stage=[row.stage], how=[row.how], amount=[row.amount], adds=[row.adds], apart=[row.apart],
            large=[row.large], first=[row.groups[0][0] if row.apart else 0], item_ptr=[self._columns["item"].size],
        )  # fmt: skip

    def _set(self, row: Row, devices: Group) -> int:
        return self._groups.number(devices, parted=row.how is not How.SUM)

    def _put(self, **values: Any) -> None:
        for name, own in values.items():
            self._columns[name].add(own)

    def arrays(self) -> SyncTemplates:
        """The tables for compiled code, with room behind what is there: the same ones until that is full."""
        found = SyncTemplates(known=self._known.arrays(), **{name: column.room for name, column in self._columns.items()})
        if self._arrays is None or not are_same(self._arrays, found):
            self._arrays = found
        return self._arrays
