"""Which parts of what is owned in parts travel as they lie, from memory to memory, and which are copied into one message.

Gradients of a region whose parts are large stay where the backward pass has made them, and values of it are received where they belong.
Only the others pass through buffers.
"""

from __future__ import annotations

from soap.plan.delivery import box_bytes
from soap.plan.plan import Plan, ReadRegion, ShardSync
from soap.plan.syncs.bucketing import shard_bytes
from soap.plan.syncs.even_parts import is_even
from soap.plan.syncs.sharing import owned_bytes

LARGE_BYTES = 512 * 2**10
"""Parts of at least so many bytes are messages of their own, from where they lie to where they belong. Smaller ones are copied into one
message. 8 MiB between two ranks over gloo took a processor 3.5 ms in messages of 1 MiB, 3.9 of 512 KiB, 5.2 of 256 KiB, 5.7 of 128 KiB; in
one message with copies on both sides 4.6 to 5.1 ms (2026-11-27, AMD EPYC)."""


def large_regions(plan: Plan, sync: ShardSync) -> tuple[int, ...]:
    """Positions of the regions all of whose parts are large. None of collectives of equal parts, which move one buffer."""
    return () if is_even(plan, sync) else tuple(place for place, region in enumerate(sync.regions) if _is_large(plan, region))


def large_bytes(plan: Plan, sync: ShardSync) -> int:
    """Bytes of all large regions."""
    return sum(box_bytes(plan, sync.regions[place].parameter, sync.regions[place].box) for place in large_regions(plan, sync))


def packed_of_owners(plan: Plan, sync: ShardSync) -> dict[int, int]:
    """Owner -> bytes of its parts that are not large."""
    found, large = owned_bytes(plan, sync), large_regions(plan, sync)
    for shard in (number for place in large for number in sync.regions[place].shards):
        for device in plan.shards[shard].devices:
            found[device] -= shard_bytes(plan.graph, plan.shards[shard])
    return found


def _is_large(plan: Plan, region: ReadRegion) -> bool:
    return min(shard_bytes(plan.graph, plan.shards[shard]) for shard in region.shards) >= LARGE_BYTES
