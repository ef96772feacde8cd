"""Sparse tables of a plan: who reads rows of them, who updates them. Pure data, no torch.

What servers keep and what all readers keep (``allgather``) is the same to the runtime: readers tell *keepers* which rows they look up, and
give them these rows' gradients. Servers are keepers of their partitions and send the rows themselves; where every reader has a copy of
the whole, each is a keeper of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from soap.model.regions import Box, Interval
from soap.plan.plan import Plan, Served, gather_name, pull_name, push_name


@dataclass(frozen=True, slots=True)
class Table:
    """A region of a sparse parameter.

    ``piece``: what tiles read, in the sense of ``pieces``. ``uses``: as in ``Shard``. ``readers``: devices (ascending) whose tiles look
    rows up, and for each its ``leader``, which speaks for it. ``parts``: (shard, rows, device that keeps it), in order of the rows.
    ``pulled``: readers have no copy. ``pull``, ``push``: names of the tasks.
    """

    piece: int
    parameter: str
    box: Box
    uses: tuple[tuple[int, int], ...]
    readers: tuple[int, ...]
    leaders: tuple[int, ...]
    parts: tuple[tuple[int, Interval, int], ...]
    pulled: bool
    pull: str
    push: str

    @property
    def aggregated(self) -> bool:
        """Whether some readers speak through others."""
        return self.leaders != self.readers

    @property
    def senders(self) -> tuple[int, ...]:
        """Devices that speak with keepers, ascending."""
        return tuple(sorted(set(self.leaders)))

    @property
    def keepers(self) -> tuple[int, ...]:
        """Devices that keep a part, ascending."""
        return tuple(sorted({device for *_, device in self.parts}))

    @property
    def devices(self) -> tuple[int, ...]:
        """All that take part, ascending."""
        return tuple(sorted({*self.readers, *self.keepers}))

    def members(self, leader: int) -> tuple[int, ...]:
        """The readers for which a device speaks, itself included if it is one."""
        return tuple(reader for reader, own in zip(self.readers, self.leaders, strict=True) if own == leader)

    def kept_by(self, device: int) -> list[tuple[int, Interval]]:
        """The parts that a device keeps: (shard, rows)."""
        return [(shard, rows) for shard, rows, keeper in self.parts if keeper == device]


def sparse_tables(plan: Plan) -> tuple[Table, ...]:
    """All regions of which rows travel, in one order for all ranks."""
    found = []
    for number, own in enumerate(plan.served):
        if own.sparse:
            parts = tuple((i, plan.shards[i].box[0], plan.shards[i].devices[0]) for i in own.shards)
            piece, names = len(plan.shards) + number, (pull_name(own), push_name(own))
            found.append(Table(piece, own.parameter, own.box, own.uses, own.readers, own.leaders, parts, True, *names))
    for number in plan.gathered:
        shard, name = plan.shards[number], gather_name(plan, number)
        parts = tuple((number, shard.box[0], device) for device in shard.devices)
        found.append(Table(number, shard.parameter, shard.box, shard.uses, shard.devices, shard.devices, parts, False, name, name))
    return tuple(found)


def speakers(tables: Sequence[Table]) -> tuple[int, ...]:
    """All devices that take part in telling which rows are wanted, ascending."""
    return tuple(sorted({device for table in tables for device in table.devices}))


def members_of(plan: Plan, served: Served) -> tuple[int, ...]:
    """The readers and the servers of a region, ascending."""
    return tuple(sorted({*served.readers, *(plan.shards[i].devices[0] for i in served.shards)}))


def pieces(plan: Plan) -> list[Box]:
    """What tiles' parameter regions consist of: shards by their number in the plan, then the regions that servers keep."""
    return [*(shard.box for shard in plan.shards), *(own.box for own in plan.served)]
