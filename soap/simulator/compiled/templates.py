"""Templates of synchronizations, as an engine numbers them, in arrays for compiled code (``state.SyncTemplates``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from soap.model.graph import OperatorGraph
from soap.plan.compression.seam import WORKS, layout_of
from soap.plan.syncs.amounts import Group
from soap.plan.syncs.keeping import serving
from soap.plan.syncs.seam import WHOLE, Amount, How, Of, Setting, Template, method_of
from soap.simulator.communication.prices import Communication
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

    def __init__(self, graph: OperatorGraph, communication: Communication, codes: SyncCodes, groups: DeviceGroups) -> None:
        self._graph, self._communication, self._codes, self._groups = graph, communication, codes, groups
        self._known, self._numbers = GrowingLists(), dict[tuple[object, ...], int]()
        kinds = SyncTemplates.__annotations__.items()
        self._columns = {name: Growing(np.int64 if "Longs" in str(kind) else np.int32) for name, kind in kinds if name != "known"}
        for name in ("row", "place", "inside", "told", "asked", "amount", "item"):
            self._columns[f"{name}_ptr"].add([0])
        self._accelerators = frozenset(device.index for device in communication.topology.devices if device.type.kind != "cpu")
        self._arrays: SyncTemplates | None = None
        self._keys: set[tuple[int, ...]] = set()

    def add(self, key: tuple[int, ...]) -> None:
        """Add the template of a list of ``SyncTemplates.known``, and those that differ from it in the readers alone, of all sets of devices
        that are known to sum: compiled code begins anew whenever one is missing."""
        for own in (key, *((*key[:3], *devices) for devices in self._communication.groups)):
            if own not in self._keys:
                self._keys.add(own)
                self._add(own)

    def _add(self, key: tuple[int, ...]) -> None:
        code, need, setting, *devices = key
        sync, readers = self._codes.sync(code), tuple(devices)
        used, leaders = serving(self._communication.topology, sync, readers)
        synchronized = need == GRADIENT or (need == FROZEN and used.contract.gathers_values)
        if not synchronized:
            used, leaders = replace(ALL_REDUCE, offload=sync.offload), readers
        settled = self._codes.compression(setting - 1) if setting else None  # how layers of this kind are compressed
        same = (used.contract, settled, used.offload, used.partitions, readers, leaders, synchronized)
        if same not in self._numbers:
            self._numbers[same] = len(self._numbers)
            method, peers = method_of(used.contract), len({*leaders})
            kinds = tuple([own.kind for own in layout_of(settled, (1, 1), 4, peers).exchanges]) if settled is not None else ()
            how = Setting(self._accelerators.issuperset(readers), used.partitions, exchanges=kinds)
            found = method.template(readers, leaders, how) if synchronized else Template()
            sharing = found.copies[0] if found.copies else ()
            places = self._communication.places(sharing)
            self._put(
                readers=[self._groups.number(readers)], sharers=[sum(map(len, places))], parts=[len(sharing)], added=[found.added],
                first_part=[self._columns["place_ptr"].size - 1],
                offloads=[used.offload], by_rows=[used.contract.by_rows and synchronized],
                partitions=[found.partitions], limits=method.limits(self._graph) or (0, 0),
                inside=[group.index(reader) for reader in readers for group in found.copies if reader in group],
                told=[end for pair in found.told for end in pair], asked=[end for pair in found.asked for end in pair],
            )  # fmt: skip
            for own in places:
                self._put(place=own)
                self._end("place", "place")
            self._add_rows(found, readers)
            for name in ("inside", "told", "asked"):
                self._end(name, name)
            self._end("row", "phase")
            self._end("amount", "of")
        self._known.add(key)
        self._put(number=[self._numbers[same]])

    def _add_rows(self, template: Template, readers: Group) -> None:
        amounts = {WHOLE: 0}
        for part in range(len(template.copies[0]) if template.copies else 0):
            amounts[Amount(Of.OWNED, part=part)] = 1 + part
        counted = len(amounts)
        for row in template.rows:
            moved = [(number, adds, *flow) for number, (flows, adds) in enumerate(row.rounds) for flow in flows]
            items = [(2 * number + adds, *ends, amounts.setdefault(own, len(amounts))) for number, adds, *ends, own in moved]
            if row.how is How.WORK:
                (sets,) = row.groups
            else:
                sets = tuple(self._groups.number(devices, parted=row.how is not How.SUM) for devices in row.groups)
            self._put(
                item=[*sets, *(own for item in items for own in item)], amount=[amounts.setdefault(row.amount, len(amounts))],
                phase=[row.phase], stage=[row.stage], how=[row.how], apart=[row.apart], large=[row.large],
                work=[WORKS.index(row.work) if row.work else -1], first=[row.groups[0][0] if row.apart else 0],
            )  # fmt: skip
            self._end("item", "item")
        for amount in [*amounts][counted:]:
            who = readers.index(amount.who[0]) + (len(readers) if len(amount.who) > 1 else 0) if amount.who else 0
            self._put(of=[amount.of], who=[who], part=[amount.part])

    def _end(self, name: str, column: str) -> None:
        self._columns[f"{name}_ptr"].add([self._columns[column].size])

    def _put(self, **values: Any) -> None:
        for name, own in values.items():
            self._columns[name].add(own)

    def arrays(self) -> SyncTemplates:
        """The tables for compiled code, with room behind what is there: the same ones until that is full."""
        found = SyncTemplates(known=self._known.arrays(), **{name: column.room for name, column in self._columns.items()})
        if self._arrays is None or not are_same(self._arrays, found):
            self._arrays = found
        return self._arrays
