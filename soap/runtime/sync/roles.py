"""Who does what in a synchronization. Pure data, no torch.

*Members* are the readers. Each deals with the others through its *leader*: itself, or the first reader of its host. Leaders deal with
*owners*, which keep the shards: servers their partitions, or every reader a copy of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from soap.model.regions import Box
from soap.plan.plan import Plan, ShardSync


@dataclass(frozen=True, slots=True)
class Roles:
    """``readers``: ascending, and for each its ``leaders``. ``parts``: (shard, device that owns it), in order of the shards."""

    readers: tuple[int, ...]
    leaders: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]

    @property
    def speakers(self) -> tuple[int, ...]:
        """The leaders, each once, ascending."""
        return tuple(sorted(set(self.leaders)))

    @property
    def devices(self) -> tuple[int, ...]:
        """All that take part, ascending."""
        return tuple(sorted({*self.readers, *(owner for _, owner in self.parts)}))

    def leader(self, reader: int) -> int:
        """The device through which a reader deals with the others."""
        return self.leaders[self.readers.index(reader)]

    def members(self, leader: int) -> tuple[int, ...]:
        """The readers for which a device speaks, itself included if it is one."""
        return tuple(reader for reader, own in zip(self.readers, self.leaders, strict=True) if own == leader)

    def owned_by(self, device: int) -> list[int]:
        """The shards that a device owns."""
        return [shard for shard, owner in self.parts if owner == device]


def roles_of(plan: Plan, sync: ShardSync) -> Roles:
    """Those of a synchronization."""
    return Roles(sync.readers, sync.leaders, tuple((i, device) for i in sync.shards for device in plan.shards[i].devices))


def pieces(plan: Plan) -> list[Box]:
    """What tiles' parameter regions consist of: shards by their number in the plan, then what each synchronization's readers read."""
    return [*(shard.box for shard in plan.shards), *(sync.box for sync in plan.syncs)]


def piece_read(plan: Plan, number: int) -> int:
    """The piece that tiles read of a synchronization's region: the region if servers own it in parts, else its first shard."""
    sync = plan.syncs[number]
    return len(plan.shards) + number if sync.contract.has_servers else sync.shards[0]
