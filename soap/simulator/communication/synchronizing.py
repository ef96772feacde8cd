"""The tasks that synchronize parameters, made from the steps and updates of each synchronization, and the devices' updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from soap.cluster.host_links import host_link
from soap.cluster.topology import DeviceType
from soap.plan.offloading import from_host_name, host_update_name, offloaded_bytes, to_host_name
from soap.plan.plan import ASK_NAME, Plan, ShardSync, serve_name, update_name
from soap.plan.syncs.asking import asking_rounds
from soap.plan.syncs.bucketing import idle_shards, shard_bytes
from soap.plan.syncs.clipping import NORM_BYTES, NORM_NAME, sums_norm
from soap.plan.syncs.gathering import Gather, gathers
from soap.plan.syncs.seam import SERVE, DeviceWork, How, Phase, ShardUpdate, SyncStep, method_for, row_name
from soap.simulator.communication.offloading import (
    DOWN,
    OFFLOADING_NS,
    ON_HOST,
    STAGES,
    UP,
    copy_ns,
    offload_resource,
    offload_updater,
)
from soap.simulator.communication.servers import adding_ns, device_row_seconds, row_seconds, server_resources, server_type
from soap.simulator.costs import CostModel, table_update_ns
from soap.simulator.task_list import FORWARD, SYNC, UPDATE, TaskList
from soap.simulator.tasks import TaskKind

Id = tuple[int, int, int, int, int, int]
"""Of a task."""
ASKING: Id = (FORWARD, 0, 0, 0, 0, 0)
"""The id of the request for rows. It comes before every other task that is ready when a step begins: it is the id of a message to the first
operator, which has no such message."""


NOTHING: Mapping[int, int] = {}
SETTLED, NORM = 1, 2
"""Stages of what is no update, among the tasks of devices' updates."""


class Synchronization:
    """Adds the tasks: ``pull`` before those of the forward pass, ``gather`` before those of each operator, forward and backward,
    ``synchronize`` after those of the backward pass.

    ``pull_together``: see ``SyncMethod.steps``.
    """

    def __init__(self, plan: Plan, costs: CostModel, tasks: TaskList, *, pull_together: bool = True) -> None:
        self._plan, self._costs, self._tasks = plan, costs, tasks
        self._positions = {tensor.name: position for position, tensor in enumerate(plan.graph.parameters)}
        methods = [method_for(sync) for sync in plan.syncs]
        self._steps = [method.steps(plan, sync, pull_together=pull_together) for method, sync in zip(methods, plan.syncs, strict=True)]
        self._updates = [method.updates(plan, sync) for method, sync in zip(methods, plan.syncs, strict=True)]
        self._settled: dict[int, int] = {}
        self._asking = asking_rounds(plan, pull_together=pull_together)
        self._gathering: list[tuple[int, Gather]] = []
        self._gathers: dict[tuple[bool, int], list[Gather]] = {}
        for own in gathers(plan):
            self._gathers.setdefault((own.backward, own.position), []).append(own)

    def pull(self) -> Iterator[tuple[int, int]]:
        """Add the request for rows of sparse parameters and the pulls before the forward pass. Yields (tile, a task that it waits for)."""
        asked: list[int] = []
        if self._asking:
            asked = [self._tasks.meeting(ASKING, ASK_NAME, TaskKind.SYNC, self._asking, ())]
        for number, sync in enumerate(self._plan.syncs):
            for task in self._walk(number, Phase.BEFORE_FORWARD, asked) if not sync.contract.gathers_values else ():
                yield from ((tile, task) for tile, _ in sync.uses)

    def gather(self, position: int, *, backward: bool) -> Iterator[tuple[int, int]]:
        """Add the gathers of values that the forward, or ``backward``, passes of an operator's tiles are the first to need. Yields (tile, a
        task that it waits for)."""
        for own in self._gathers.get((backward, position), ()):
            for task in self._walk(own.sync, Phase.BEFORE_BACKWARD if backward else Phase.BEFORE_FORWARD, ()):
                self._gathering.append((task, own))
                yield from ((tile, task) for tile, _ in self._plan.syncs[own.sync].uses)

    def synchronize(self, forward: Sequence[int], backward: Mapping[int, int]) -> None:
        """Let gathers wait for passes, and add what comes after the backward pass; last, one update per device, as the optimizer makes it.

        ``forward``, ``backward``: tile -> the task of its pass.
        """
        plan = self._plan
        for task, gather in self._gathering:
            after = [backward[tile] for tile in gather.after_backward if tile in backward]
            self._tasks.wait_also(task, [forward[tile] for tile in gather.after_forward] + after)
        ready: list[list[int]] = [[] for _ in range(plan.device_count)]
        for tile, task in backward.items():
            ready[plan.tiles[tile].device].append(task)
        resources, clips, arrived = server_resources(plan, self._tasks.topology), sums_norm(plan), [*backward.values()]
        self._settle(ready)
        for number, sync in enumerate(plan.syncs):
            gradients = [backward[tile] for tile, _ in sync.uses if tile in backward]
            if self._is_clipped(sync):  # nothing leaves a device before its gradients are clipped
                gradients += [self._settled[device] for device in sync.readers if device in self._settled]
            last = self._walk(number, Phase.AFTER_BACKWARD, gradients, backward)
            if clips:
                arrived += last
                continue
            ends = {device: task for task, among in last.items() for device in among}
            for device in plan.owners(sync) if last and not sync.contract.has_servers else ():
                ready[device].append(ends.get(device, next(reversed(last))))
            self._serve_all(number, resources, last or gradients)
        if clips:
            everyone = tuple(range(plan.device_count))
            norm = self._tasks.all_reduce(_update_id(0, NORM), NORM_NAME, TaskKind.SYNC, NORM_BYTES, everyone, arrived)
            for own in ready:
                own.append(norm)
            for number in range(len(plan.syncs)):
                self._serve_all(number, resources, (norm,))
        updates = {}
        for device, duration in self._device_updates().items():
            updates[device] = self._tasks.add(
                _update_id(device), update_name(device), TaskKind.UPDATE, (device,), duration, ready[device]
            )
        offloads = self._offload(updates)
        for number, sync in enumerate(plan.syncs):
            if not any(part.name for part in self._updates[number]):
                updated = offloads if sync.offload else updates
                self._walk(number, Phase.AFTER_UPDATE, [updated[device] for device in plan.owners(sync) if device in updated])

    def _offload(self, updates: Mapping[int, int]) -> dict[int, int]:
        """Add the updates that hosts make for devices, each behind the device's own: a copy to the host, its update, and a copy back.
        Returns device -> the copy back. Their bytes are not counted: they go to no other device."""
        topology, found, on_host_ns = self._tasks.topology, {}, self._host_updates()
        for device, size in offloaded_bytes(self._plan).items():
            link, task = host_link(topology, device), updates[device]
            copied_ns = copy_ns(size, link)
            held, durations = (link.down, (), link.up), (copied_ns, on_host_ns[device], copied_ns)
            for place, (own, name, kind) in enumerate(_host_tasks(device)):
                resources = (offload_resource(topology, device, place), *(topology.device_count + link for link in held[place]))
                task = self._tasks.add(own, name, kind, resources, durations[place], [task])
            found[device] = task
        return found

    def _host_updates(self) -> dict[int, int]:
        """Device -> nanoseconds that its host takes to update what the device owns and offloads."""
        found: dict[int, int] = {}
        plan, topology = self._plan, self._tasks.topology
        for part in own_updates(plan, self._updates):
            for device in plan.shards[part.shard].devices if part.shard in plan.offloaded else ():
                size = shard_bytes(plan.graph, plan.shards[part.shard])
                found[device] = found.get(device, 0) + self._costs.update_ns(size, offload_updater(topology, device))
        return found

    def _walk(
        self, number: int, phase: Phase, after: Iterable[int], backward: Mapping[int, int] = NOTHING
    ) -> dict[int, Sequence[int]]:
        """Add the tasks of one synchronization in one phase, each after the ones before, or at the same time. Returns the last ones, with
        the devices for which each is, if not for all. ``backward``: tile -> task; a device that has such tasks waits for these alone with
        what it does first."""
        sync, last, before = self._plan.syncs[number], dict[int, Sequence[int]](), None
        for step in self._steps[number]:
            if step.phase is phase:
                if before and not (before.apart and step.apart):
                    after, backward, last = tuple(last), NOTHING, {}
                if step.works:
                    last |= {self._work(sync, work, after, backward): (work.device,) for work in step.works}
                else:
                    last[self._move(sync, step, after)] = step.among if step.apart else ()
                before = step
        return last

    def _settle(self, backward: Sequence[Iterable[int]]) -> None:
        """Add, for devices that have such work, the task that says that no backward pass is left. ``backward``: device -> its tasks."""
        devices = {work.device for steps in self._steps for step in steps for work in step.works if work.settled}
        if devices:
            devices.update(device for sync in self._plan.syncs if self._is_clipped(sync) for device in sync.readers)
        for device in sorted(devices):
            own = _update_id(device, SETTLED), _settled_name(device), TaskKind.COMPRESS
            self._settled[device] = self._tasks.add(*own, (), 1, backward[device])

    def _is_clipped(self, sync: ShardSync) -> bool:
        """Whether its devices clip their gradients before they send them, if some are compressed. (Others are refused then: a server's
        partition, or rows, could not be clipped so.)"""
        contract = sync.contract
        return self._plan.training.clips and len(sync.readers) > 1 and (contract.sums_in_place or contract.compresses)

    def _work(self, sync: ShardSync, work: DeviceWork, after: Iterable[int], backward: Mapping[int, int]) -> int:
        device = self._tasks.topology.devices[work.device].type
        duration = sum(self._costs.compression_ns(work.compression, layout, work.work, device) for layout in work.layouts)
        own = [backward[tile] for tile, _ in sync.uses if tile in backward and self._plan.tiles[tile].device == work.device]
        waits = (*(own or after), *([self._settled[work.device]] if work.settled else ()))
        place = self._place(sync, work.stage, work.device)
        return self._tasks.add(place, work.name, TaskKind.COMPRESS, (work.device,), duration, waits)

    def _move(self, sync: ShardSync, step: SyncStep, after: Iterable[int]) -> int:
        place = self._place(sync, step.stage, step.among[0] if step.summed_bytes and step.apart else 0)
        if step.summed_bytes:
            return self._tasks.all_reduce(place, step.name, TaskKind.SYNC, step.summed_bytes, step.among, after, chunked=step.large)
        if step.collective is not None:
            return self._tasks.parted(place, step.name, TaskKind.SYNC, step.collective, after, chunked=step.large)
        return self._tasks.exchange(place, step.name, TaskKind.SYNC, step.rounds, after, chunked=step.large)

    def _serve_all(self, number: int, resources: Mapping[int, int], after: Iterable[int]) -> None:
        """Add the tasks of the servers that own a synchronization, and the pulls behind them."""
        sync = self._plan.syncs[number]
        served = [self._serve(sync, part, resources[part.shard], after) for part in self._updates[number] if part.name]
        if served:
            self._walk(number, Phase.AFTER_UPDATE, served)

    def _serve(self, sync: ShardSync, part: ShardUpdate, resource: int, after: Iterable[int]) -> int:
        """Add the task of a server that adds up the gradients of one partition and updates it."""
        topology, shard = self._tasks.topology, self._plan.shards[part.shard]
        duration = self._update_ns(part, server_type(topology, shard.devices[0]), row_seconds(topology, shard.devices[0]))
        place = self._place(sync, SERVE, partition=sync.shards.index(part.shard))
        return self._tasks.add(place, part.name, TaskKind.UPDATE, (resource,), duration, after)

    def _place(self, sync: ShardSync, stage: int, device: int = 0, partition: int | None = None) -> Id:
        return _sync_id(self._positions[sync.parameter], sync, stage, device, partition)

    def _device_updates(self) -> dict[int, int]:
        """Device -> nanoseconds for the updates of all its shards, with adding up gathered rows; devices without updates are left out.
        What hosts update for a device leaves it only the adding up."""
        found: dict[int, int] = dict.fromkeys(offloaded_bytes(self._plan), OFFLOADING_NS)
        plan, topology = self._plan, self._tasks.topology
        for part in own_updates(plan, self._updates):
            for device in plan.shards[part.shard].devices:
                kind = topology.devices[device].type
                if part.shard in plan.offloaded:
                    found[device] += adding_ns(part, kind, 0.0)
                    continue
                found[device] = found.get(device, 0) + self._update_ns(part, kind, device_row_seconds(topology, device))
        return dict(sorted(found.items()))

    def _update_ns(self, part: ShardUpdate, kind: DeviceType, seconds_per_row: float) -> int:
        """What a device of this type takes to add up a shard's gradients and to update it."""
        size = shard_bytes(self._plan.graph, self._plan.shards[part.shard])
        update = table_update_ns(self._costs, part.updated_bytes, size, kind) if part.by_rows else self._costs.update_ns(size, kind)
        return adding_ns(part, kind, seconds_per_row) + update


def own_updates(plan: Plan, updates: Iterable[Sequence[ShardUpdate]]) -> Iterator[ShardUpdate]:
    """The updates that are part of a device's own update task, with those of idle shards, whose gradient is zero. Servers update what they
    own in separate tasks."""
    for own in updates:
        yield from (part for part in own if not part.name)
    for number in idle_shards(plan):
        yield ShardUpdate(number, 0, 0, shard_bytes(plan.graph, plan.shards[number]), by_rows=False)


def of_every_iteration(plan: Plan) -> frozenset[str]:
    """Names of the communications that every iteration of a step needs: before passes, and gradients that leave with a micro-batch."""
    steps = ((sync.part is not None, step) for sync in plan.syncs for step in method_for(sync).steps(plan, sync))
    names = (step.name for leaves, step in steps if step.phase < Phase.AFTER_BACKWARD or (leaves and not step.summed_bytes))
    return frozenset(names) | {ASK_NAME}


def device_updates(plan: Plan, *, rows_alone: bool) -> Iterator[tuple[int, int]]:
    """(device, bytes) that a device's own update changes, for each shard. ``rows_alone``: the optimizer changes only rows with a gradient;
    a shard that is updated by rows then counts the rows that all its readers touch. What hosts update is left out."""
    for part in own_updates(plan, (method_for(sync).updates(plan, sync) for sync in plan.syncs)):
        shard = plan.shards[part.shard]
        if part.shard in plan.offloaded:
            continue
        size = part.updated_bytes if part.by_rows and rows_alone else shard_bytes(plan.graph, shard)
        for device in shard.devices:
            yield device, size


def possible_tasks(plan: Plan) -> Iterator[tuple[Id, str, TaskKind]]:
    """Id, name and kind of every task that synchronization may add. Those with nothing to move, or to update, do not take place. A
    communication's id is that of its first chunk."""
    yield ASKING, ASK_NAME, TaskKind.SYNC
    yield _update_id(0, NORM), NORM_NAME, TaskKind.SYNC
    for device in range(plan.device_count):
        yield _update_id(device), update_name(device), TaskKind.UPDATE
        yield _update_id(device, SETTLED), _settled_name(device), TaskKind.COMPRESS
        if plan.offloaded:
            yield from _host_tasks(device)
    positions = {tensor.name: position for position, tensor in enumerate(plan.graph.parameters)}
    for sync in plan.syncs:
        method, position = method_for(sync), positions[sync.parameter]
        for row in method.template_of(plan, sync).rows:
            first = row.groups[0][0] if row.how is How.SUM and row.apart else 0
            if row.how < How.WORK:
                yield _sync_id(position, sync, row.stage, first), row_name(sync, row), TaskKind.SYNC
            for work in method.works(plan, sync, row.work) if row.work else ():
                yield _sync_id(position, sync, work.stage, work.device), work.name, TaskKind.COMPRESS
        for partition in range(len(sync.shards)) if sync.contract.has_servers else ():
            yield _sync_id(position, sync, SERVE, partition=partition), serve_name(sync, partition), TaskKind.UPDATE


def _sync_id(position: int, sync: ShardSync, stage: int, device: int = 0, partition: int | None = None) -> Id:
    return SYNC, position, stage, sync.index, device, (sync.part or 0) if partition is None else partition


def _update_id(device: int, stage: int = 0) -> Id:
    return UPDATE, device, stage, 0, 0, 0


def _host_tasks(device: int) -> Iterator[tuple[Id, str, TaskKind]]:
    """The tasks by which its host updates for a device, in the order of its resources' places."""
    yield _update_id(device, STAGES[DOWN]), to_host_name(device), TaskKind.SYNC
    yield _update_id(device, STAGES[ON_HOST]), host_update_name(device), TaskKind.UPDATE
    yield _update_id(device, STAGES[UP]), from_host_name(device), TaskKind.SYNC


def _settled_name(device: int) -> str:
    """Task name of the moment from which on a device has no backward pass to run any more."""
    return f"settle @{device}"
