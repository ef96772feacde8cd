"""Updates that hosts make for devices (compiled): their price, and their tasks. The counterpart of ``plan.offloading`` and of
``communication.offloading``.

``offloaded`` counts by device the bytes that are copied, ``on_host`` the ns of their updates.
"""

from __future__ import annotations

from soap.simulator.communication.offloading import OFFLOADING_NS, ON_HOST, STAGES
from soap.simulator.compiled.communication import nanoseconds
from soap.simulator.compiled.graph_arrays import ClusterTables
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.syncs.exchange import add_edge, new_task
from soap.simulator.compiled.syncs.pricing import price_ns
from soap.simulator.compiled.task_keys import UPDATE, task_key
from soap.simulator.compiled.world import World


@compiled
def lift(K: ClusterTables, device: int, place: int) -> tuple[int, int]:
    """(place in ``Groups.static``, number) of the resources that a device's copies down, its part of the host's cores, or its copies up
    hold."""
    first, last = K.lift_ptr[3 * device + place], K.lift_ptr[3 * device + place + 1]
    return len(K.device_type) + len(K.route) + first, last - first


@compiled
def copied_ns(K: ClusterTables, device: int, size: int) -> int:
    """What a device takes to copy so many bytes to its host, or back."""
    return nanoseconds(K.lift_latency[device] + size / K.lift_bandwidth[device])


@compiled
def offload(W: World, device: int, size: int) -> None:
    """Count a shard, or a part of one, that a device owns and its host updates."""
    D, K, S = W.shards, W.cluster, W.scratch
    if S.offloaded[device] == 0:
        S.update[device] += OFFLOADING_NS
    S.offloaded[device] += size
    S.on_host[device] += price_ns(D, S, K.offload_owner[device], size)


@compiled
def add_offloads(W: World) -> None:
    """Behind the updates of devices that offload, add the copies to hosts, the hosts' updates and the copies back: each waits for the one
    before. ``lifting``: by device, the last one."""
    K, C, S = W.cluster, W.state, W.scratch
    for device in range(len(C.busy)):
        S.lifting[device] = device
        copied = copied_ns(K, device, S.offloaded[device])
        for place in range(3 if S.offloaded[device] > 0 else 0):
            slot = new_task(C, task_key(UPDATE, device, STAGES[place], 0, 0, 0))
            C.duration[slot] = S.on_host[device] if place == ON_HOST else copied
            C.resource[slot], C.resource_n[slot] = lift(K, device, place)
            add_edge(S, S.lifting[device], slot)
            S.lifting[device] = slot
