"""Which operators a task belongs to. Together with slack (``timeline.slack_ns``) it explains a schedule.

A tile's passes belong to its operator. So do the communications that bring the operator's inputs (and take their gradients back) and sum
its partial results. Synchronization (sums of gradients, servers, updates) belongs to the operators that use the parameters, by bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from soap.plan.plan import ASK_NAME, Plan
from soap.plan.syncs.bucketing import idle_shards, shard_bytes
from soap.plan.syncs.clipping import NORM_NAME
from soap.plan.syncs.seam import method_for
from soap.simulator.task_list import BACKWARD, FORWARD, UPDATE
from soap.simulator.tasks import Task, TaskGraph, TaskKind

Shares = Mapping[int, float]
"""Operator's position -> its part of a task. The parts add up to 1, or there are none."""


class Activity(StrEnum):
    """What a task is to the operators that it belongs to."""

    COMPUTATION = "computation"
    COMMUNICATION = "communication"
    SYNCHRONIZATION = "synchronization"


_ACTIVITIES = {
    TaskKind.FORWARD: Activity.COMPUTATION,
    TaskKind.RECOMPUTE: Activity.COMPUTATION,
    TaskKind.BACKWARD: Activity.COMPUTATION,
    TaskKind.WEIGHTS: Activity.COMPUTATION,
    TaskKind.SYNC: Activity.SYNCHRONIZATION,
    TaskKind.COMPRESS: Activity.SYNCHRONIZATION,
    TaskKind.UPDATE: Activity.SYNCHRONIZATION,
}


def activity(task: Task) -> Activity:
    """What a task is. Updates count as synchronization, because they depend on who owns which parameters."""
    return _ACTIVITIES.get(task.kind, Activity.COMMUNICATION)


def task_shares(tasks: TaskGraph) -> list[Shares]:
    """For each task, the operators that it belongs to."""
    plan = tasks.plan
    synchronized = _synchronized(plan)
    updates = _updates(plan)
    last = len(plan.graph.operators) - 1
    found: list[Shares] = []
    for task in tasks.tasks:
        if task.name == ASK_NAME:
            found.append(_by_bytes(plan, [i for i, shard in enumerate(plan.shards) if shard.parameter in plan.graph.sparse]))
        elif task.name == NORM_NAME:
            found.append(_by_bytes(plan, sorted(plan.synchronized)))
        elif task.id[0] == FORWARD:
            found.append({task.id[1]: 1.0})
        elif task.id[0] == BACKWARD:
            found.append({last - task.id[1]: 1.0})
        elif task.id[0] == UPDATE:
            found.append(updates[task.id[1]])
        else:
            found.append(synchronized[task.name])
    return found


def _by_bytes(plan: Plan, shards: Iterable[int]) -> Shares:
    """The operators that use these shards, each with its share of their bytes; operators that use one shard share it equally."""
    found: dict[int, float] = {}
    for number in shards:
        shard = plan.shards[number]
        users = sorted({plan.tiles[tile].operator for tile, _ in shard.uses})
        for operator in users:
            found[operator] = found.get(operator, 0.0) + shard_bytes(plan.graph, shard) / len(users)
    total = sum(found.values())
    return {operator: size / total for operator, size in found.items()} if total else {}


def _synchronized(plan: Plan) -> dict[str, Shares]:
    """Task name -> the operators whose parameters it synchronizes. Unless gradients travel in buckets, the whole parameter counts, not only
    the region that the task synchronizes."""
    found: dict[str, Shares] = {}
    for sync in plan.syncs:
        of_parameter = [i for i, shard in enumerate(plan.shards) if shard.parameter == sync.parameter]
        shares = _by_bytes(plan, sync.shards if sync.contract.in_buckets else of_parameter)
        method = method_for(sync)
        names = [own.name for step in method.steps(plan, sync) for own in step.works or [step]]
        names += [part.name for part in method.updates(plan, sync)]
        found.update(dict.fromkeys(filter(None, names), shares))
    return found


def _updates(plan: Plan) -> Sequence[Shares]:
    """For each device, the operators whose parameters it updates."""
    own: list[list[int]] = [[] for _ in range(plan.device_count)]
    for number in sorted((plan.synchronized - plan.on_servers).union(idle_shards(plan))):
        for device in plan.shards[number].devices:
            own[device].append(number)
    return [_by_bytes(plan, numbers) for numbers in own]
