"""How much travels between a parameter's readers and owners: the whole region, or for a sparse parameter the rows that a step touches."""

from __future__ import annotations

from collections.abc import Sequence

from soap.model.regions import Box
from soap.plan.delivery import Round, box_bytes, joined
from soap.plan.plan import Plan, ShardSync
from soap.plan.row_counts import DeviceLookups, row_bytes, touched_rows

INDEX_BYTES = 8
"""Size of a row's index."""
COPIES = 2
"""Buffers of the size of the rows: one to receive them in, apart from where they are used, and one to send copies from."""

COUNT_BYTES = 4
"""Size of a step count: optimizers with more than one state keep one for each tensor."""

Group = tuple[int, ...]
"""Devices (ascending) that push and pull together; the first of them communicates for all."""


class Amounts:
    """How much of a region groups of devices read and have gradients for: all of it, or with ``by_rows`` the rows that they touch."""

    def __init__(self, plan: Plan, sync: ShardSync, *, by_rows: bool) -> None:
        self._plan, self._parameter, self._by_rows = plan, sync.parameter, by_rows
        self._lookups = DeviceLookups(plan.graph, sync.parameter, plan.tiles, sync.uses if by_rows else ())
        self._touched: dict[Group, int] = {}
        self._row_bytes = row_bytes(plan.graph, sync.parameter, sync.box) if by_rows else 0

    def rows(self, devices: Group, box: Box) -> int:
        """How many different rows of the region these devices touch together; 0 if amounts are not counted by rows."""
        if not self._by_rows:
            return 0
        if devices not in self._touched:
            self._touched[devices] = self._lookups(devices)
        return touched_rows(self._plan.graph.sparse[self._parameter], box, self._touched[devices])

    def values(self, devices: Group, box: Box) -> int:
        """Bytes of values, or of gradients, that these devices read or give together."""
        return self.rows(devices, box) * self._row_bytes if self._by_rows else box_bytes(self._plan, self._parameter, box)

    def indices(self, devices: Group, box: Box) -> int:
        """Bytes of the indices of these rows; 0 if amounts are not counted by rows."""
        return self.rows(devices, box) * INDEX_BYTES


def reading_groups(sync: ShardSync) -> list[Group]:
    """The readers in groups that push and pull together: each alone, or with local aggregation those of each host."""
    return led_groups(sync.readers, sync.leaders)


def led_groups(readers: Group, leaders: Group) -> list[Group]:
    """These readers by their leaders."""
    together: dict[int, list[int]] = {}
    for reader, leader in zip(readers, leaders, strict=True):
        together.setdefault(leader, []).append(reader)
    return [tuple(readers) for readers in together.values()]


def moving_rounds(*rounds: tuple[Sequence[tuple[int, int, int]], int]) -> tuple[Round, ...]:
    """The rounds without flows from a device to itself and flows of no bytes; rounds that are empty then are left out."""
    moved = ((joined(flow for flow in flows if flow[0] != flow[1] and flow[2]), added) for flows, added in rounds)
    return tuple((flows, added) for flows, added in moved if flows)
