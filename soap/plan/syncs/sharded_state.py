"""Sharded optimizer states: each reader owns a part of every region, and alone keeps the optimizer's state for it and updates it.

Gradients are reduce-scattered to the owners, in buckets, and updated values are all-gathered from them: ZeRO-1 and ZeRO-2 of Rajbhandari et
al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.

With ``within="host"`` each host has a copy in parts: what is scattered and gathered stays inside hosts, and the holders of a part on all
hosts all-reduce its gradients between both (``sharing``). One reader on each host has nothing to share, and is left to the default method.

Between GPUs both are collectives of equal parts (``even_parts``), else messages between all pairs of readers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product

from soap.model.regions import Box
from soap.plan.delivery import box_bytes
from soap.plan.memory_kinds import MemoryKind
from soap.plan.placement import reader_parts
from soap.plan.plan import Plan, ShardSync, sync_name, update_name
from soap.plan.syncs.amounts import Group
from soap.plan.syncs.bucketing import gradient_bytes, shard_bytes
from soap.plan.syncs.even_parts import bucket_bytes, is_even, part_bytes
from soap.plan.syncs.large_parts import large_bytes, large_regions, packed_of_owners
from soap.plan.syncs.seam import PULL, PUSH, SUM, Amount, Hold, How, Of, Phase, Places, Row, Setting, ShardUpdate, SyncMethod, Template
from soap.plan.syncs.sharing import holders, holding_groups, owned_bytes, sharers, sharing_groups, sharing_leaders
from soap.strategy.config import SyncConfig
from soap.strategy.sync_contracts import named


class ShardedState(SyncMethod):
    """Cuts a region into as many parts as it has readers, by rows as long as there are enough. Every reader keeps the whole region."""

    def serves_region(self, readers: Sequence[int], peers: Collection[int], sync: SyncConfig) -> bool:
        """Only regions with several readers, with ``within="host"`` on one host at least: one reader alone owns everything anyway."""
        return len(readers) > (len(peers) if sync.within == "host" else 1)

    def leaders(self, readers: tuple[int, ...], of_hosts: tuple[int, ...]) -> tuple[int, ...]:
        """The first reader of each copy."""
        return sharing_leaders(readers, of_hosts)

    def owners(
        self, parameter: str, region: int, box: Box, readers: tuple[int, ...], leaders: tuple[int, ...], sync: SyncConfig, places: Places
    ) -> Sequence[tuple[Box, tuple[int, ...]]]:
        """The parts, on the readers of each copy in turn; in a folded plan, if all share one copy, also for those that are not there."""
        if places.represented is not None and leaders == readers:
            return places.represented.parts(box, places.first_reader[parameter] + region, readers)
        groups = sharing_groups(readers, leaders)
        found = []
        for number, part in enumerate(reader_parts(box, len(groups[0]))):
            found.append((part, tuple(sorted(places.reader(parameter, region, number, group) for group in groups))))
        return found

    def template(self, readers: Group, leaders: Group, how: Setting) -> Template:
        """In each copy every reader sends every owner its gradient of what that owns; then the holders of each part sum theirs. Later every
        owner sends every reader the values."""
        copies = sharing_groups(readers, leaders)
        gather = moving_row(copies, Phase.AFTER_UPDATE, PULL, "gather", How.GATHER, even=how.even)
        return Template((*scatter_rows(copies, even=how.even), gather), tuple(copies), 0 if how.even else len(copies[0]) - 1)

    def updates(self, plan: Plan, sync: ShardSync) -> Sequence[ShardUpdate]:
        """Each owner adds up its copy's readers' gradients of its parts, unless a collective does, and updates these."""
        sizes = ((number, shard_bytes(plan.graph, plan.shards[number])) for number in sync.shards)
        others = 0 if is_even(plan, sync) else sharers(sync) - 1
        return [ShardUpdate(number, others * size, 0, size, by_rows=False) for number, size in sizes]

    def copies(self, plan: Plan, sync: ShardSync) -> Mapping[int, int]:
        """What the other readers own."""
        owned, whole = owned_bytes(plan, sync), gradient_bytes(plan, sync)
        return {reader: whole - owned.get(reader, 0) for reader in sync.readers}

    def holds(self, plan: Plan, sync: ShardSync) -> Iterator[Hold]:
        """Gradients from the first one on until they have left; what others send until it is added up; from then on the sum, where two
        readers add up in what has come. What a collective reads and fills is there until it is waited for.

        Values pass through buffers when they are brought, but for large ones. A reader is ready for others' values as soon as it has
        updated its own.
        """
        owned, scatter, gather, bucket = owned_bytes(plan, sync), scatter_name(sync), gather_name(sync), bucket_bytes(plan, sync)
        packed, small = gradient_bytes(plan, sync) - large_bytes(plan, sync), packed_of_owners(plan, sync)
        even, part = is_even(plan, sync), part_bytes(plan, sync)
        yield from held_gradients(plan, sync)
        for reader, copied in self.copies(plan, sync).items():
            own, update, summed = owned.get(reader, 0), update_name(reader), added_up_for(plan, sync, reader)
            yield Hold(reader, copied, kind=MemoryKind.VALUES)
            ready = update if own else gather
            if even:
                yield Hold(reader, bucket, since=scatter, until=summed, before=True, queue="received")
                yield Hold(reader, part, since=scatter, kind=MemoryKind.GRADIENTS)
                yield Hold(reader, bucket, since=ready, until=gather, queue="received")
                continue
            yield Hold(reader, bucket, since=scatter, until=scatter, queue="sent")
            received = received_bytes(sync, own)
            later = own if received and not sync.aggregated else 0
            yield Hold(reader, received, since=scatter, until=summed, before=True, queue="received", sum_bytes=later)
            yield Hold(reader, own - later, since=scatter, kind=MemoryKind.GRADIENTS)
            mine = small.get(reader, 0)
            yield Hold(reader, mine, since=update, until=gather, queue="sent")
            yield Hold(reader, packed - mine, since=ready, until=gather, queue="received")


def held_gradients(plan: Plan, sync: ShardSync) -> Iterator[Hold]:
    """The readers' gradients until they leave: a buffer in which small ones are collected, and each large one as it was made."""
    scatter, large = scatter_name(sync), large_regions(plan, sync)
    boxes = ((place, sync.regions[place]) for place in large)
    sizes: dict[tuple[int, ...], int] = {(place,): box_bytes(plan, region.parameter, region.box) for place, region in boxes}
    together = tuple(place for place in range(len(sync.regions)) if place not in large)
    sizes[together] = bucket_bytes(plan, sync) - sum(sizes.values())
    for reader, (places, size) in product(sync.readers, sizes.items()):
        copied = places == together
        yield Hold(reader, size, until=scatter, before=True, gradients_of=places, copied=copied, kind=MemoryKind.GRADIENTS)


def added_up_for(plan: Plan, sync: ShardSync, reader: int) -> str:
    """The task before which a reader adds up what came in a scatter: the sum over the holders of its part, or its update."""
    owned = owned_bytes(plan, sync)
    groups = (devices for devices in holders(sync) if reader in devices and owned.get(devices[0], 0))
    return next((sum_name(sync, devices) for devices in groups), update_name(reader))


def received_bytes(sync: ShardSync, own: int) -> int:
    """What a reader receives of others' gradients, and does not keep as their sum, as it does if there are two readers. ``own``: bytes of
    its parts."""
    others = sharers(sync) - 1
    return others * own if others > 1 else 0


def scatter_rows(copies: Sequence[Group], *, even: bool) -> list[Row]:
    """How gradients reach their owners: a reduce-scatter in each copy, then a sum over the holders of each part."""
    scatter = moving_row(copies, Phase.AFTER_BACKWARD, PUSH, "scatter", How.SCATTER, even=even)
    sums = (
        Row(Phase.AFTER_BACKWARD, SUM, "sum", How.SUM, (devices,), amount=Amount(Of.OWNED, part=place), apart=True, large=True)
        for place, devices in enumerate(holding_groups(copies))
    )
    return [scatter, *sums]


def moving_row(copies: Sequence[Group], phase: Phase, stage: int, verb: str, how: How, *, even: bool) -> Row:
    """How parts reach their owners, or all readers: by a collective of equal parts, or else by messages between all pairs of a copy."""
    large = how is How.SCATTER
    if even:
        return Row(phase, stage, verb, how, tuple(copies), large=large)
    owned = [Amount(Of.OWNED, part=place) for place in range(len(copies[0]))]
    pairs = [(own, owner, other) for group in copies for own, owner in zip(owned, group, strict=True) for other in group if other != owner]
    flows = [(reader, owner, own) if large else (owner, reader, own) for own, owner, reader in pairs]
    return Row(phase, stage, verb, How.EXCHANGE, rounds=((flows, False),), large=large)


def scatter_name(sync: ShardSync) -> str:
    """Task name of the reduce-scatter of gradients."""
    return sync_name(sync, "scatter")


def sum_name(sync: ShardSync, devices: Group) -> str:
    """Task name of the all-reduce of gradients among the holders of the same parts."""
    return f"{sync_name(sync, 'sum')} {','.join(map(str, devices))}"


def gather_name(sync: ShardSync) -> str:
    """Task name of the all-gather of values."""
    return sync_name(sync, "gather")


METHOD = ShardedState(named("sharded_state"))
