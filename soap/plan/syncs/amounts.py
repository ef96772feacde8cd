"""How much of a parameter travels between its readers and owners: all of it, or of a sparse one the rows that a step touches."""

from __future__ import annotations

from collections.abc import Sequence

from soap.model.regions import Box
from soap.plan.flows import Round, box_bytes, joined
from soap.plan.plan import Plan, ShardSync
from soap.plan.row_counts import DeviceLookups, row_bytes, touched_rows

INDEX_BYTES = 8
"""An index of a row."""
COPIES = 2
"""Rows are received apart from where they are used, and copied to be sent."""

COUNT_BYTES = 4
"""Optimizers with more than one state count their steps, once per tensor."""

Group = tuple[int, ...]
"""Devices that push and pull together, ascending, through the first of them."""


class Amounts:
    """How much of regions devices read and give gradients to."""

    def __init__(self, plan: Plan, sync: ShardSync, *, by_rows: bool) -> None:
        self._plan, self._parameter, self._by_rows = plan, sync.parameter, by_rows
        self._lookups = DeviceLookups(plan.graph, sync.parameter, plan.tiles, sync.uses if by_rows else ())
        self._touched: dict[Group, int] = {}
        self._row_bytes = row_bytes(plan.graph, sync.parameter, sync.box) if by_rows else 0

    def rows(self, devices: Group, box: Box) -> int:
        """Different rows of the region that devices touch together; 0 if they have all of it."""
        if not self._by_rows:
            return 0
        if devices not in self._touched:
            self._touched[devices] = self._lookups(devices)
        return touched_rows(self._plan.graph.sparse[self._parameter], box, self._touched[devices])

    def values(self, devices: Group, box: Box) -> int:
        """Bytes of values."""
        return self.rows(devices, box) * self._row_bytes if self._by_rows else box_bytes(self._plan, self._parameter, box)

    def indices(self, devices: Group, box: Box) -> int:
        """Bytes of indices."""
        return self.rows(devices, box) * INDEX_BYTES


def reading_groups(sync: ShardSync) -> list[Group]:
    """Readers that push and pull together: alone, or those of each host."""
    together: dict[int, list[int]] = {}
    for reader, leader in zip(sync.readers, sync.leaders, strict=True):
        together.setdefault(leader, []).append(reader)
    return [tuple(readers) for readers in together.values()]


def moving_rounds(*rounds: tuple[Sequence[tuple[int, int, int]], int]) -> tuple[Round, ...]:
    """The rounds in which something travels: what a device gives itself does not."""
    moved = ((joined(flow for flow in flows if flow[0] != flow[1] and flow[2]), added) for flows, added in rounds)
    return tuple((flows, added) for flows, added in moved if flows)
