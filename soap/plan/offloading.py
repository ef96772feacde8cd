"""What hosts update for devices (``SyncConfig.offload``), and the tasks of that.

When all gradients are there, a device copies those of the shards that it owns to its host, whose cores update, and copies the values back.
What follows the update (``Phase.AFTER_UPDATE``) waits for that copy. A device that is a CPU does all of it in its own memory.
"""

from __future__ import annotations

from soap.plan.plan import Plan
from soap.plan.syncs.bucketing import idle_shards, shard_bytes


def offloaded_bytes(plan: Plan) -> dict[int, int]:
    """Device -> bytes of the gradients that it copies to its host, as many as of the values that come back."""
    found: dict[int, int] = {}
    for number in sorted(plan.offloaded & plan.synchronized.union(idle_shards(plan))):
        for device in plan.shards[number].devices:
            found[device] = found.get(device, 0) + shard_bytes(plan.graph, plan.shards[number])
    return dict(sorted(found.items()))


def to_host_name(device: int) -> str:
    """Task name of the copy of a device's gradients to its host."""
    return f"gradients to host @{device}"


def host_update_name(device: int) -> str:
    """Task name of the update by the host."""
    return f"update on host @{device}"


def from_host_name(device: int) -> str:
    """Task name of the copy of updated values back to the device."""
    return f"values from host @{device}"
