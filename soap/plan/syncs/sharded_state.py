"""Sharded optimizer states: each reader owns a part of every region, and alone keeps the optimizer's state for it and updates it.

Gradients are reduce-scattered to the owners, in buckets, and updated values are all-gathered from them: ZeRO-1 and ZeRO-2 of Rajbhandari et
al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.

With ``within="host"`` each host has a copy in parts: what is scattered and gathered stays inside hosts, and the holders of a part on all
hosts all-reduce its gradients between both (``sharing``). One reader on each host has nothing to share, and is left to the default method.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from soap.model.graph import OperatorGraph
from soap.model.regions import Box
from soap.plan.flows import Round
from soap.plan.memory_kinds import MemoryKind
from soap.plan.placement import cut_rows
from soap.plan.plan import Plan, Shard, ShardSync, sync_name, update_name
from soap.plan.syncs.amounts import Group, moving_rounds
from soap.plan.syncs.bucketing import gradient_bytes, make_buckets, shard_bytes
from soap.plan.syncs.seam import PULL, PUSH, SUM, Hold, Phase, Places, ShardUpdate, SyncMethod, SyncStep
from soap.plan.syncs.sharing import copies_of, holders, owned_bytes, sharers, sharing_groups, sharing_leaders
from soap.plan.tiling import Tile
from soap.strategy.config import SyncConfig
from soap.strategy.sync_contracts import named


class ShardedState(SyncMethod):
    """Cuts a region by rows into as many parts as it has readers, or rows if these are fewer. Every reader keeps the whole region."""

    def serves_region(self, readers: Sequence[int], peers: Collection[int], sync: SyncConfig) -> bool:
        """Only regions with several readers, with ``within="host"`` on one host at least: one reader alone owns everything anyway."""
        return len(readers) > (len(peers) if sync.within == "host" else 1)

    def leaders(self, readers: tuple[int, ...], of_hosts: tuple[int, ...]) -> tuple[int, ...]:
        """The first reader of each copy."""
        return sharing_leaders(readers, of_hosts)

    def owners(
        self, parameter: str, region: int, box: Box, readers: tuple[int, ...], leaders: tuple[int, ...], sync: SyncConfig, places: Places
    ) -> Sequence[tuple[Box, tuple[int, ...]]]:
        """The parts, on the readers of each copy in turn."""
        groups = sharing_groups(readers, leaders)
        found = []
        for number, part in enumerate(cut_rows(box, len(groups[0]))):
            found.append((part, tuple(sorted(places.reader(parameter, region, number, group) for group in groups))))
        return found

    def groups(
        self, graph: OperatorGraph, tiles: Sequence[Tile], shards: Sequence[Shard], syncs: Sequence[ShardSync]
    ) -> Sequence[ShardSync]:
        """Joined into buckets, as for all-reduces."""
        return make_buckets(graph, tiles, shards, syncs)

    def steps(self, plan: Plan, sync: ShardSync, *, pull_together: bool = True) -> Sequence[SyncStep]:
        """In each copy every reader sends every owner its gradient of what that owns; then the holders of each part sum theirs. Later every
        owner sends every reader the values."""
        owned = owned_bytes(plan, sync)
        pairs = [(reader, owner) for group in copies_of(sync) for owner in group if owner in owned for reader in group]
        scatter, gather = moving_rounds(([(*pair, owned[pair[1]]) for pair in pairs], 0)), gather_round(plan, sync)
        found = [SyncStep(Phase.AFTER_BACKWARD, PUSH, scatter_name(sync), scatter, large=True)] if scatter else []
        for devices in holders(sync):
            if size := owned.get(devices[0], 0):
                name, beside = sum_name(sync, devices), len(found) > 1
                found.append(
                    SyncStep(Phase.AFTER_BACKWARD, SUM, name, summed_bytes=size, among=devices, large=True, beside=beside)
                )
        return [*found, SyncStep(Phase.AFTER_UPDATE, PULL, gather_name(sync), gather)] if gather else found

    def updates(self, plan: Plan, sync: ShardSync) -> Sequence[ShardUpdate]:
        """Each owner adds up its copy's readers' gradients of its parts, and updates these."""
        sizes = ((number, shard_bytes(plan.graph, plan.shards[number])) for number in sync.shards)
        others = sharers(sync) - 1
        return [ShardUpdate(number, others * size, 0, size, by_rows=False) for number, size in sizes]

    def copies(self, plan: Plan, sync: ShardSync) -> Mapping[int, int]:
        """What the other readers own."""
        owned, whole = owned_bytes(plan, sync), gradient_bytes(plan, sync)
        return {reader: whole - owned.get(reader, 0) for reader in sync.readers}

    def buffers(self, plan: Plan, sync: ShardSync) -> Iterable[tuple[int, int]]:
        """What others send of a reader's parts, their sum, what it sends of their values, and what it receives of other values."""
        owned, copied, count = owned_bytes(plan, sync), self.copies(plan, sync), sharers(sync)
        for reader in sync.readers:
            yield reader, (count + 1) * owned.get(reader, 0) + copied[reader]

    def holds(self, plan: Plan, sync: ShardSync) -> Iterator[Hold]:
        """The bucket of gradients from the first one on until it has left; what others send until it is added up; the sum till the end.

        Values pass through buffers when they are brought. A reader is ready for others' values as soon as it has updated its own.
        """
        owned, copied, whole = owned_bytes(plan, sync), self.copies(plan, sync), gradient_bytes(plan, sync)
        scatter, gather, others = scatter_name(sync), gather_name(sync), sharers(sync) - 1
        for reader in sync.readers:
            own, update = owned.get(reader, 0), update_name(reader)
            yield Hold(reader, copied[reader], kind=MemoryKind.VALUES)
            yield Hold(reader, whole, until=scatter, before=True, from_gradient=True, kind=MemoryKind.GRADIENTS)
            yield Hold(reader, whole, since=scatter, until=scatter, queue="sent")
            yield Hold(reader, others * own, since=scatter, until=update, before=True, queue="received")
            yield Hold(reader, own, since=scatter, kind=MemoryKind.GRADIENTS)
            yield Hold(reader, own, since=update, until=gather, queue="sent")
            yield Hold(reader, copied[reader], since=update if own else gather, until=gather, queue="received")


def gather_round(plan: Plan, sync: ShardSync) -> tuple[Round, ...]:
    """All owners send all readers of their copy what they own; nothing if nobody else reads it."""
    owned = owned_bytes(plan, sync)
    pairs = [(owner, reader) for group in copies_of(sync) for owner in group if owner in owned for reader in group]
    return moving_rounds(([(*pair, owned[pair[0]]) for pair in pairs], 0))


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
