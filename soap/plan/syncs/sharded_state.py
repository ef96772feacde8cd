"""Sharded optimizer states: each reader owns a part of every region, and alone keeps the optimizer's state for it and updates it.

Gradients are reduce-scattered to the owners, in buckets, and updated values are all-gathered from them: ZeRO-1 and ZeRO-2 of Rajbhandari et
al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from soap.model.graph import OperatorGraph
from soap.model.regions import Box
from soap.plan.flows import Round, box_bytes
from soap.plan.memory_kinds import MemoryKind
from soap.plan.placement import cut_rows
from soap.plan.plan import Plan, Shard, ShardSync, sync_name, update_name
from soap.plan.syncs.amounts import moving_rounds
from soap.plan.syncs.bucketing import gradient_bytes, make_buckets, shard_bytes
from soap.plan.syncs.seam import PULL, PUSH, Hold, Phase, Places, ShardUpdate, SyncMethod, SyncStep
from soap.plan.tiling import Tile
from soap.strategy.config import SyncConfig
from soap.strategy.sync_contracts import named


class ShardedState(SyncMethod):
    """Cuts a region by rows into as many parts as it has readers, or rows if these are fewer. Every reader keeps the whole region."""

    def serves_region(self, readers: Sequence[int], peers: Collection[int]) -> bool:
        """Only regions with several readers: one reader alone owns everything anyway."""
        return len(readers) > 1

    def owners(
        self, parameter: str, region: int, box: Box, readers: tuple[int, ...], sync: SyncConfig, places: Places
    ) -> Sequence[tuple[Box, tuple[int, ...]]]:
        """The parts, on the readers in turn."""
        parts = enumerate(cut_rows(box, len(readers)))
        return [(part, (places.reader(parameter, region, number, readers),)) for number, part in parts]

    def groups(
        self, graph: OperatorGraph, tiles: Sequence[Tile], shards: Sequence[Shard], syncs: Sequence[ShardSync]
    ) -> Sequence[ShardSync]:
        """Joined into buckets, as for all-reduces."""
        return make_buckets(graph, tiles, shards, syncs)

    def steps(self, plan: Plan, sync: ShardSync, *, pull_together: bool = True) -> Sequence[SyncStep]:
        """Every reader sends every owner its gradient of what that owns; later every owner sends every reader the values."""
        owned = owned_bytes(plan, sync)
        scatter = moving_rounds(([(reader, owner, size) for owner, size in owned.items() for reader in sync.readers], 0))
        gather = gather_round(plan, sync)
        found = [SyncStep(Phase.AFTER_BACKWARD, PUSH, scatter_name(sync), scatter, large=True)] if scatter else []
        return [*found, SyncStep(Phase.AFTER_UPDATE, PULL, gather_name(sync), gather)] if gather else found

    def updates(self, plan: Plan, sync: ShardSync) -> Sequence[ShardUpdate]:
        """Each owner adds up all readers' gradients of its parts, and updates these."""
        sizes = ((number, shard_bytes(plan.graph, plan.shards[number])) for number in sync.shards)
        others = len(sync.readers) - 1
        return [ShardUpdate(number, others * size, 0, size, by_rows=False) for number, size in sizes]

    def copies(self, plan: Plan, sync: ShardSync) -> Mapping[int, int]:
        """What the other readers own."""
        owned, whole = owned_bytes(plan, sync), gradient_bytes(plan, sync)
        return {reader: whole - owned.get(reader, 0) for reader in sync.readers}

    def buffers(self, plan: Plan, sync: ShardSync) -> Iterable[tuple[int, int]]:
        """What others send of a reader's parts, their sum, what it sends of their values, and what it receives of other values."""
        owned, copied = owned_bytes(plan, sync), self.copies(plan, sync)
        for reader in sync.readers:
            yield reader, (len(sync.readers) + 1) * owned.get(reader, 0) + copied[reader]

    def holds(self, plan: Plan, sync: ShardSync) -> Iterator[Hold]:
        """The bucket of gradients from the first one on until it has left; what others send until it is added up; the sum till the end.

        Values pass through buffers when they are brought. A reader is ready for others' values as soon as it has updated its own.
        """
        owned, copied, whole = owned_bytes(plan, sync), self.copies(plan, sync), gradient_bytes(plan, sync)
        scatter, gather = scatter_name(sync), gather_name(sync)
        for reader in sync.readers:
            own, update = owned.get(reader, 0), update_name(reader)
            yield Hold(reader, copied[reader], kind=MemoryKind.VALUES)
            yield Hold(reader, whole, until=scatter, before=True, from_gradient=True, kind=MemoryKind.GRADIENTS)
            yield Hold(reader, whole, since=scatter, until=scatter, queue="sent")
            yield Hold(reader, (len(sync.readers) - 1) * own, since=scatter, until=update, before=True, queue="received")
            yield Hold(reader, own, since=scatter, kind=MemoryKind.GRADIENTS)
            yield Hold(reader, own, since=update, until=gather, queue="sent")
            yield Hold(reader, copied[reader], since=update if own else gather, until=gather, queue="received")


def owned_bytes(plan: Plan, sync: ShardSync) -> dict[int, int]:
    """Owner -> bytes of all its parts of what is synchronized together."""
    found: dict[int, int] = {}
    for number in sync.shards:
        shard = plan.shards[number]
        found[shard.devices[0]] = found.get(shard.devices[0], 0) + box_bytes(plan, shard.parameter, shard.box)
    return found


def gather_round(plan: Plan, sync: ShardSync) -> tuple[Round, ...]:
    """All owners send all readers what they own; nothing if nobody else reads it."""
    owned = owned_bytes(plan, sync).items()
    return moving_rounds(([(owner, reader, size) for owner, size in owned for reader in sync.readers], 0))


def scatter_name(sync: ShardSync) -> str:
    """Task name of the reduce-scatter of gradients."""
    return sync_name(sync, "scatter")


def gather_name(sync: ShardSync) -> str:
    """Task name of the all-gather of values."""
    return sync_name(sync, "gather")


METHOD = ShardedState(named("sharded_state"))
