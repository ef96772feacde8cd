"""Who does what in a synchronization. Pure data, no torch.

*Members* are the readers. Each member talks to the owners through its *leader*: itself, or the first reader of its host. *Owners* hold
the shards: each server its partitions, or every reader a copy of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from soap.model.regions import Box
from soap.plan.plan import Plan, ShardSync


@dataclass(frozen=True, slots=True)
class Roles:
    """``readers``: devices, ascending. ``leaders``: of each reader, in their order. ``parts``: (shard, owner), in the order of shards."""

    readers: tuple[int, ...]
    leaders: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]

    @property
    def speakers(self) -> tuple[int, ...]:
        """The leaders, each once, ascending."""
        return tuple(sorted(set(self.leaders)))

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices that take part, ascending."""
        return tuple(sorted({*self.readers, *(owner for _, owner in self.parts)}))

    def leader(self, reader: int) -> int:
        """The device that talks to the owners for a reader."""
        return self.leaders[self.readers.index(reader)]

    def members(self, leader: int) -> tuple[int, ...]:
        """The readers that a leader talks to the owners for, itself included."""
        return tuple(reader for reader, own in zip(self.readers, self.leaders, strict=True) if own == leader)

    def owned_by(self, device: int) -> list[int]:
        """The shards that a device owns."""
        return [shard for shard, owner in self.parts if owner == device]


def roles_of(plan: Plan, sync: ShardSync) -> Roles:
    """The roles of all devices in a synchronization."""
    return Roles(sync.readers, sync.leaders, tuple((i, device) for i in sync.shards for device in plan.shards[i].devices))


def pieces(plan: Plan) -> list[Box]:
    """Boxes of the pieces of tiles' parameter regions: all shards of the plan, then the regions of all synchronizations."""
    return [*(shard.box for shard in plan.shards), *(region.box for sync in plan.syncs for region in sync.regions)]


def pieces_read(plan: Plan) -> list[tuple[int, ...]]:
    """By synchronization, the pieces that tiles read, one a region: the region if owners have parts of it, else its only shard."""
    found, following = [], len(plan.shards)
    for sync in plan.syncs:
        own = tuple(range(following, following + len(sync.regions)))
        found.append(own if sync.contract.owned_in_parts else sync.shards)
        following += len(sync.regions)
    return found


def uses_of_pieces(plan: Plan) -> list[tuple[tuple[int, int], ...]]:
    """For each piece, who reads it: (position in ``Plan.tiles``, parameter position)."""
    found = [shard.uses for shard in plan.shards] + [()] * sum(len(sync.regions) for sync in plan.syncs)
    for sync, read in zip(plan.syncs, pieces_read(plan), strict=True):
        for region, piece in zip(sync.regions, read, strict=True):
            for shard in region.shards:
                found[shard] = ()
            found[piece] = region.uses
    return found
