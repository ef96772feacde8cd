"""Updates that hosts make for devices (compiled): their price, and their tasks. The counterpart of ``plan.offloading`` and of
``communication.offloading``.

``offloaded`` counts by device the bytes that are copied, ``on_host`` the ns of their updates.
"""

from __future__ import annotations

from soap.simulator.communication.offloading import DOWN, OFFLOADING_NS, ON_HOST, STAGES, UP
from soap.simulator.compiled.communication import nanoseconds
from soap.simulator.compiled.graph_arrays import ClusterTables
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import TASKS
from soap.simulator.compiled.state import OTHER
from soap.simulator.compiled.syncs.exchange import new_row
from soap.simulator.compiled.syncs.pricing import price_ns
from soap.simulator.compiled.task_keys import STATE_FULL, UPDATE, set_key, task_key
from soap.simulator.compiled.world import World

_DOWN_STAGE, _HOST_STAGE, _UP_STAGE = STAGES


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
def add_offload(W: World, device: int, slot0: int, followers: int) -> int:
    """Add a device's copy to its host, the host's update and the copy back, each waiting for the one before. The first one's row is the
    caller's to write. Returns the row of what waits for the last one, with room for ``followers``."""
    K, C, S = W.cluster, W.state, W.scratch
    slot = slot0 + S.count[TASKS]
    if slot + 3 > len(C.key):
        raise MemoryError(STATE_FULL)
    S.count[TASKS] += 3
    copied = copied_ns(K, device, S.offloaded[device])
    _add(W, slot, device, DOWN, _DOWN_STAGE, copied)
    _add(W, slot + 1, device, ON_HOST, _HOST_STAGE, S.on_host[device])
    _add(W, slot + 2, device, UP, _UP_STAGE, copied)
    for place in range(2):
        C.index[slot + place] = new_row(C, 1)
        C.arena[C.index[slot + place] + 2] = slot + place + 1
    C.index[slot + 2] = new_row(C, followers)
    return C.index[slot + 2]


@compiled
def _add(W, slot, device, place, stage, duration):  # type: ignore[no-untyped-def]
    C = W.state
    set_key(C, slot, task_key(UPDATE, device, stage, 0, 0, 0))
    C.duration[slot], C.latency[slot], C.overhead[slot], C.moved[slot], C.alive[slot] = duration, 0, 0, 0, 1
    C.resource[slot], C.resource_n[slot] = lift(W.cluster, device, place)
    C.kind[slot], C.owner[slot], C.waits[slot] = OTHER, -1, 1
