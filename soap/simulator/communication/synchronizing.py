"""The tasks that keep parameters in step: sums of gradients, servers, gathered rows, and the devices' updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from soap.plan.buckets import bucket_bytes, idle_shards, shard_bytes
from soap.plan.plan import ASK_NAME, Plan, gather_name, pull_name, push_name, serve_name, sync_name, update_name
from soap.plan.serving import asking, gathering, served_traffic
from soap.simulator.communication.servers import gathered_ns, row_seconds, serve_ns, server_resources, server_type
from soap.simulator.costs import CostModel, dense_gradient_ns, updates_rows_alone
from soap.simulator.task_list import FORWARD, SYNC, UPDATE, TaskList
from soap.simulator.tasks import TaskKind

SUM, PUSH, SERVE, PULL = range(4)
"""Stages, the third part of a task's id: sums in buckets and gatherings; what servers do."""
ASKING = (FORWARD, 0, 0, 0, 0, 0)
"""The id of what comes before all that is ready when a step begins: where a message to the first operator, which reads none, would be."""


class Synchronization:
    """``pull`` comes before the forward pass, ``synchronize`` behind the backward pass. ``pull_together``: see ``served_traffic``."""

    def __init__(self, plan: Plan, costs: CostModel, tasks: TaskList, *, pull_together: bool = True) -> None:
        self._plan, self._costs, self._tasks = plan, costs, tasks
        self._positions = {tensor.name: position for position, tensor in enumerate(plan.graph.parameters)}
        self._traffic = [served_traffic(plan, served, pull_together=pull_together) for served in plan.served]
        self._asking = asking(plan, pull_together=pull_together)

    def pull(self) -> Iterator[tuple[int, int]]:
        """Ask for rows of sparse parameters, then bring those that servers have; (tile, the task that it waits for)."""
        asked: tuple[int, ...] = ()
        if self._asking:
            asked = (self._tasks.meeting(ASKING, ASK_NAME, TaskKind.SYNC, self._asking, ()),)
        for number, served in enumerate(self._plan.served):
            if served.sparse and self._traffic[number].pull:
                task = self._pull(number, asked)
                yield from ((tile, task) for tile, _ in served.uses)

    def synchronize(self, backward: Mapping[int, int]) -> None:
        """``backward``: tile -> the task of its backward pass.

        One all-reduce per bucket that several devices share, what servers do, and one update per device, as the optimizer makes it.
        """
        plan = self._plan
        ready: list[list[int]] = [[] for _ in range(plan.device_count)]
        for tile, task in backward.items():
            ready[plan.tiles[tile].device].append(task)
        for bucket in plan.buckets:
            if len(bucket.devices) > 1:
                after = (use for number in bucket.shards for use in plan.shards[number].uses)
                place, size = self._place(bucket.shards[0]), bucket_bytes(plan, bucket)
                task = self._tasks.all_reduce(
                    place, sync_name(plan, bucket), TaskKind.SYNC, size, bucket.devices, _known(backward, after), chunked=True
                )
                for device in bucket.devices:
                    ready[device].append(task)
        for number in plan.gathered:
            shard, rounds = plan.shards[number], gathering(plan, number).rounds
            if rounds:
                name, after_tiles = gather_name(plan, number), _known(backward, shard.uses)
                task = self._tasks.exchange(self._place(number), name, TaskKind.SYNC, rounds, after_tiles, chunked=True)
                for device in shard.devices:
                    ready[device].append(task)
        self._serve(backward)
        for device, duration in self._updates().items():
            self._tasks.add((UPDATE, device, 0, 0, 0, 0), update_name(device), TaskKind.UPDATE, (device,), duration, ready[device])

    def _place(self, number: int) -> tuple[int, ...]:
        shard = self._plan.shards[number]
        return (SYNC, self._positions[shard.parameter], SUM, shard.index, 0, 0)

    def _serve(self, backward: Mapping[int, int]) -> None:
        """Push and update what servers keep, and pull the values of dense parameters."""
        plan, topology = self._plan, self._tasks.topology
        resources = server_resources(plan, topology)
        for number, served in enumerate(plan.served):
            position, traffic = self._positions[served.parameter], self._traffic[number]
            pushed = _known(backward, served.uses)
            if traffic.push:
                place = (SYNC, position, PUSH, served.index, 0, 0)
                pushed = [self._tasks.exchange(place, push_name(served), TaskKind.SYNC, traffic.push, pushed)]
            updates = []
            for index, (shard, part, resource) in enumerate(zip(served.shards, traffic.partitions, resources[number], strict=True)):
                server, size = plan.shards[shard].devices[0], shard_bytes(plan.graph, plan.shards[shard])
                duration = serve_ns(self._costs, part, size, server_type(topology, server), row_seconds(topology, server))
                place, name = (SYNC, position, SERVE, served.index, 0, index), serve_name(served, index)
                updates.append(self._tasks.add(place, name, TaskKind.UPDATE, (resource,), duration, pushed))
            if not served.sparse and traffic.pull:
                self._pull(number, updates)

    def _pull(self, number: int, after: Iterable[int]) -> int:
        served = self._plan.served[number]
        place = (SYNC, self._positions[served.parameter], PULL, served.index, 0, 0)
        return self._tasks.exchange(place, pull_name(served), TaskKind.SYNC, self._traffic[number].pull, after)

    def _updates(self) -> dict[int, int]:
        """Device -> how long the updates of its shards take together, where there are any, with adding up rows that were gathered."""
        found: dict[int, int] = {}
        plan, topology = self._plan, self._tasks.topology
        for device, size in device_updates(plan, rows_alone=updates_rows_alone(self._costs)):
            found[device] = found.get(device, 0) + self._costs.update_ns(size, topology.devices[device].type)
        for number in plan.gathered:
            kept, size = gathering(plan, number).kept, shard_bytes(plan.graph, plan.shards[number])
            for device in plan.shards[number].devices:
                found[device] += gathered_ns(topology, kept, device)
                found[device] += dense_gradient_ns(self._costs, size, topology.devices[device].type)
        return dict(sorted(found.items()))


def _known(backward: Mapping[int, int], uses: Iterable[tuple[int, int]]) -> list[int]:
    return [backward[tile] for tile, _ in uses if tile in backward]


def device_updates(plan: Plan, *, rows_alone: bool) -> Iterator[tuple[int, int]]:
    """(device, bytes) of everything that a device's own update changes: shards, and of those that are gathered, if an optimizer updates
    ``rows_alone``, the rows that all touch. Servers update what they keep in tasks of their own."""
    for number in (*(number for bucket in plan.buckets for number in bucket.shards), *idle_shards(plan)):
        for device in plan.shards[number].devices:
            yield device, shard_bytes(plan.graph, plan.shards[number])
    for number in plan.gathered:
        size = gathering(plan, number).kept.updated_bytes if rows_alone else shard_bytes(plan.graph, plan.shards[number])
        for device in plan.shards[number].devices:
            yield device, size
