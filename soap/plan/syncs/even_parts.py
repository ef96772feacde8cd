"""Parts of equal size: what readers own in parts is gathered and scattered by NCCL's collectives between GPUs.

An all-gather brings every reader what each owns, a reduce-scatter brings each owner the sum of what the readers have for it. Both want as
many bytes of every reader, so each reader's parts are padded to those of the one that owns most. Messages between all pairs would move no
padding. But over several hosts each byte would leave a host once for every reader elsewhere; along NCCL's rings it enters a host once.

Processors have no such collective: gloo's reduce-scatter is an all-reduce. There, every pair of readers sends messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from soap.plan.plan import Plan, ShardSync
from soap.plan.syncs.amounts import Group
from soap.plan.syncs.bucketing import gradient_bytes
from soap.plan.syncs.sharing import copies_of, owned_bytes, sharers

Kind = Literal["all_gather", "reduce_scatter"]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of equal parts over the devices of each group, in all groups at once. ``size_bytes``: all parts of one group with their
    padding, what an all-gather leaves on each device and a reduce-scatter takes from it. ``groups``: have equally many devices,
    ``members``; of the whole cluster's in a folded plan."""

    kind: Kind
    size_bytes: int
    groups: tuple[Group, ...]
    members: int

    @property
    def moved_bytes(self) -> int:
        """Bytes on all hops together: each part passes all devices of its group but one."""
        return len(self.groups) * (self.members - 1) * self.size_bytes


def is_even(plan: Plan, sync: ShardSync) -> bool:
    """Whether all readers are accelerators, whose library has collectives of equal parts."""
    return plan.accelerators.issuperset(sync.readers)


def part_bytes(plan: Plan, sync: ShardSync) -> int:
    """Bytes of one reader's parts with padding: as many as the reader owns that owns most."""
    return max(owned_bytes(plan, sync).values())


def room_bytes(plan: Plan, sync: ShardSync) -> int:
    """Bytes of all parts of a copy, with padding."""
    return sharers(sync) * part_bytes(plan, sync)


def bucket_bytes(plan: Plan, sync: ShardSync) -> int:
    """Bytes of a reader's buffer of all gradients, or of all values that it gathers, with padding if its parts are even."""
    return room_bytes(plan, sync) if is_even(plan, sync) else gradient_bytes(plan, sync)


def collective(plan: Plan, sync: ShardSync, kind: Kind) -> Collective:
    """All parts of what is synchronized, gathered or scattered in each copy."""
    size, narrow, own = room_bytes(plan, sync), plan.training.wrapped.itemsize, plan.graph.tensors[sync.parameter].itemsize
    if kind == "all_gather" and narrow:  # another trainer casts its own part before it sends it
        size = -(-size * min(narrow, own) // own)
    return Collective(kind, size, tuple(copies_of(sync)), sharers(sync))
