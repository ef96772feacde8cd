"""Parameter servers of dense parameters: readers have copies, push their gradients, and pull values after the update.

One push and one pull per step: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014. Partitions, and
local aggregation on a host before the network: Kim et al., "Parallax: Sparsity-aware Data Parallel Training of Deep Neural Networks",
EuroSys 2019.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from soap.model.regions import Box
from soap.plan.delivery import box_bytes
from soap.plan.memory_kinds import MemoryKind
from soap.plan.placement import cut_rows
from soap.plan.plan import Plan, ShardSync, serve_name, sync_name
from soap.plan.syncs.amounts import Amounts, Group, led_groups, reading_groups
from soap.plan.syncs.seam import (
    PULL,
    PUSH,
    SERVE,
    Amount,
    Hold,
    How,
    Of,
    Phase,
    Places,
    Row,
    Setting,
    ShardUpdate,
    SyncMethod,
    Template,
    server_of,
)
from soap.strategy.config import SyncConfig
from soap.strategy.sync_contracts import named


class ParameterServer(SyncMethod):
    """Cuts a region into partitions; each is a shard that one server owns."""

    pull_phase = Phase.AFTER_UPDATE

    def serves_region(self, readers: Sequence[int], peers: Collection[int], sync: SyncConfig) -> bool:
        """Only regions with several readers: one reader alone needs no server."""
        return len(readers) > 1

    def owners(
        self, parameter: str, region: int, box: Box, readers: tuple[int, ...], leaders: tuple[int, ...], sync: SyncConfig, places: Places
    ) -> Sequence[tuple[Box, tuple[int, ...]]]:
        """The partitions: cut by rows, on the hosts' servers in turn."""
        return [(part, (places.server(parameter, region, number),)) for number, part in enumerate(cut_rows(box, sync.partitions))]

    def template(self, readers: Group, leaders: Group, how: Setting) -> Template:
        """A push, the servers' updates, and a pull. Each host's leader communicates with the servers, and the host's other readers with
        their leader. Without ``pull_together`` this holds for the push only, and each reader pulls for itself."""
        groups, partitions, rows = led_groups(readers, leaders), range(how.partitions), self.contract.by_rows
        pulling = groups if how.pull_together else [(reader,) for reader in readers]
        given = [(device, leader, Amount(Of.VALUES, (device,))) for leader, *others in groups for device in others]
        pushed = [(own[0], server_of(part), Amount(Of.VALUES, own, part)) for part in partitions for own in groups]
        pulled = [(server_of(part), own[0], Amount(Of.VALUES, own, part)) for part in partitions for own in pulling]
        asked = [(own[0], server_of(part), Amount(Of.INDICES, own, part)) for part in partitions for own in pulling] if rows else []
        told = [(device, leader, Amount(Of.INDICES, amount.who)) for device, leader, amount in given] if rows and how.pull_together else []
        handed = [(leader, device, amount) for device, leader, amount in given] if how.pull_together else []
        push = Row(Phase.AFTER_BACKWARD, PUSH, "push", How.EXCHANGE, rounds=((given, True), (pushed, False)))
        pull = Row(self.pull_phase, PULL, "pull", How.EXCHANGE, rounds=(([*pulled, *asked], False), ([*handed, *told], False)))
        serve = Row(Phase.UPDATE, SERVE, "serve", How.SERVE)
        ordered = (push, serve, pull) if push.phase < pull.phase else (pull, push, serve)
        return Template(ordered, (), 0, how.partitions, [flow[:2] for flow in told], [flow[:2] for flow in asked])

    def updates(self, plan: Plan, sync: ShardSync) -> Sequence[ShardUpdate]:
        """Each partition is a task of its own on its server."""
        return [replace(own, name=serve_name(sync, partition)) for partition, own in enumerate(added_updates(plan, sync))]

    def copies(self, plan: Plan, sync: ShardSync) -> Mapping[int, int]:
        """The whole region, for each reader."""
        return dict.fromkeys(sync.readers, box_bytes(plan, sync.parameter, sync.box))

    def holds(self, plan: Plan, sync: ShardSync) -> Iterator[Hold]:
        """Readers hold a copy and its gradient all the time; servers hold what they receive until they have used it."""
        for device, size in self.copies(plan, sync).items():
            yield Hold(device, size, kind=MemoryKind.VALUES)
            yield Hold(device, size, kind=MemoryKind.GRADIENTS)
        yield from self.server_holds(plan, sync)

    def server_holds(self, plan: Plan, sync: ShardSync) -> Iterator[Hold]:
        """What servers receive, from the push to their update."""
        for partition, (device, size) in enumerate(self.received(plan, sync)):
            yield Hold(device, size, since=sync_name(sync, "push"), until=serve_name(sync, partition))

    def received(self, plan: Plan, sync: ShardSync) -> Iterator[tuple[int, int]]:
        """For each partition (device, bytes): gradients that its server receives; 0 beside accelerators: they are in the host's memory."""
        for device, received in self.given_to_servers(plan, sync):
            yield device, 0 if device in plan.accelerators else received

    def host_buffers(self, plan: Plan, sync: ShardSync) -> Iterable[tuple[int, int]]:
        """What servers beside accelerators receive."""
        return [(device, size) for device, size in self.given_to_servers(plan, sync) if device in plan.accelerators]

    def given_to_servers(self, plan: Plan, sync: ShardSync) -> Iterator[tuple[int, int]]:
        """For each partition (the device beside its server, bytes of gradients that the server receives)."""
        own = self.copies(plan, sync)
        for number in sync.shards:
            shard = plan.shards[number]
            most = box_bytes(plan, shard.parameter, shard.box)
            yield shard.devices[0], self.received_bytes(plan, sync, shard.box, [min(most, size) for size in own.values()])

    def received_bytes(self, plan: Plan, sync: ShardSync, box: Box, given: Sequence[int]) -> int:
        """Bytes that the server of a partition (``box``) receives. ``given``: by reader, the most bytes of gradients that it pushes."""
        return sum(given)


def added_updates(plan: Plan, sync: ShardSync) -> Iterator[ShardUpdate]:
    """The updates of all shards by owners that add up what each group of readers gives them."""
    groups, by_rows = reading_groups(sync), sync.contract.by_rows
    amounts = Amounts(plan, sync, by_rows=by_rows)
    for number in sync.shards:
        box = plan.shards[number].box
        given = [amounts.values(group, box) for group in groups]
        added = sum(given) if by_rows else sum(given[1:])  # dense gradients are added onto the first one
        rows = sum(amounts.rows(group, box) for group in groups)
        yield ShardUpdate(number, *((added, rows) if len(groups) > 1 else (0, 0)), amounts.values(sync.readers, box), by_rows)


METHOD = ParameterServer(named("parameter_server"))
