"""Who shares a copy of what is owned in parts: all readers one, or with ``within="host"`` those of each host one of their own (HSDP).

Each copy is cut in the same way, so every part has one owner in each copy: its *holders*. They sum their gradients of it and update it
alike. This needs as many readers on every host. Where hosts have unlike numbers of readers, all of them share one copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from soap.plan.delivery import box_bytes
from soap.plan.plan import Plan, ShardSync
from soap.plan.syncs.amounts import Group


def sharing_leaders(readers: tuple[int, ...], of_hosts: tuple[int, ...]) -> tuple[int, ...]:
    """For each reader the first one of its copy; the readers themselves if all share one. ``of_hosts``: the first one of its host."""
    counts = Counter(of_hosts)
    return of_hosts if len(counts) > 1 and len({*counts.values()}) == 1 else readers


def sharing_groups(readers: tuple[int, ...], leaders: tuple[int, ...]) -> list[Group]:
    """The readers of each copy. ``leaders``: as ``sharing_leaders`` has them."""
    if leaders == readers:
        return [readers]
    return [tuple(reader for reader, own in zip(readers, leaders, strict=True) if own == leader) for leader in dict.fromkeys(leaders)]


def copies_of(sync: ShardSync) -> list[Group]:
    """The readers of each copy of what is synchronized; all have equally many."""
    return sharing_groups(sync.readers, sync.leaders)


def sharers(sync: ShardSync) -> int:
    """How many readers share a copy; in a folded plan, of the whole cluster's."""
    return sync.cluster_readers or len(copies_of(sync)[0])


def holders(sync: ShardSync) -> Iterator[Group]:
    """The devices that own the same parts, if there are several copies, ascending; one after the other in the order of the first copy."""
    return holding_groups(copies_of(sync))


def holding_groups(copies: Sequence[Group]) -> Iterator[Group]:
    """``holders`` of copies with these readers."""
    for place in range(len(copies[0]) if len(copies) > 1 else 0):
        yield tuple(sorted(group[place] for group in copies))


def owned_bytes(plan: Plan, sync: ShardSync) -> dict[int, int]:
    """Owner -> bytes of all its parts of what is synchronized together."""
    found: dict[int, int] = {}
    for number in sync.shards:
        shard = plan.shards[number]
        for device in shard.devices:
            found[device] = found.get(device, 0) + box_bytes(plan, shard.parameter, shard.box)
    return found
