"""Clipping by the norm of all gradients (compiled): the sum that updates wait for, and by which strategies ranks can clip. The counterpart
of ``plan.syncs.clipping``."""

from __future__ import annotations

from soap.plan.syncs.clipping import NORM_BYTES
from soap.plan.syncs.seam import SERVE
from soap.simulator.compiled.communication import allreduce, find_list, sum_overhead_ns
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.machine_code import entry
from soap.simulator.compiled.scratch import NORM, PACKED_SHARDS, TASKS
from soap.simulator.compiled.state import OTHER, SYNC_BUCKET, SYNC_NORM
from soap.simulator.compiled.syncs.exchange import add_sync_edge, new_row
from soap.simulator.compiled.syncs.members import compresses, find_geometries, find_members, is_trained
from soap.simulator.compiled.syncs.templates import find_template
from soap.simulator.compiled.task_keys import STATE_FULL, SYNC, UPDATE, phase_of, set_key, stage_of, task_key
from soap.simulator.compiled.world import World

NO_NORM = -1


@compiled
def begin_norm(W: World, slot0: int) -> None:
    """If all devices learn the norm, give that task the slot behind the ``count[TASKS]`` tasks from ``slot0`` on: ``count[NORM]``. Needs
    the parameters' geometries."""
    D, C, S = W.shards, W.state, W.scratch
    S.count[NORM] = NO_NORM
    if not D.clips[0] or len(C.busy) == 1 or S.count[PACKED_SHARDS] > 0:
        return
    slot = slot0 + S.count[TASKS]
    if slot + 1 > len(C.key):
        raise MemoryError(STATE_FULL)
    S.count[TASKS] += 1
    S.count[NORM] = slot
    C.kind[slot], C.owner[slot], C.waits[slot], C.alive[slot], C.latency[slot] = SYNC_NORM, -1, 0, 1, 0
    set_key(C, slot, task_key(UPDATE, 0, 2, 0, 0, 0))


@compiled
def finish_norm(W: World, slot0: int) -> None:
    """Write that task. It waits for all backward passes, and for the ``count[TASKS]`` tasks from ``slot0`` on of which updates waited;
    servers wait for it as all devices' updates do. Call it once sums are cut."""
    K, R, G, C, S = W.cluster, W.groups, W.graph, W.state, W.scratch
    norm, devices = S.count[NORM], len(C.busy)
    if norm == NO_NORM:
        return
    for device in range(devices):
        S.members[1 + device] = device
    group = find_list(R.sets, S.members[1 : 1 + devices])
    duration, way = allreduce(R, group, NORM_BYTES)
    C.duration[norm], C.resource[norm], C.resource_n[norm] = duration, R.resource[way], R.resource_n[way]
    C.overhead[norm], C.moved[norm] = sum_overhead_ns(K, devices, duration), 2 * (R.members[group] - 1) * NORM_BYTES
    served = 0
    for slot in range(slot0, slot0 + S.count[TASKS]):
        if C.kind[slot] == SYNC_BUCKET:
            row = new_row(C, 1)
            C.arena[row + 2] = norm
            C.kind[slot], C.index[slot] = OTHER, row
            C.waits[norm] += 1
        served += _is_served(C, slot)
    row = new_row(C, served)
    C.index[norm] = row
    for slot in range(slot0, slot0 + S.count[TASKS]):
        if _is_served(C, slot):
            served -= 1
            C.arena[row + 2 + served] = slot
    for op in range(len(G.backward)):
        for tile in range(C.tiles[op]):
            slot = C.tile_slot[op] + C.tiles[op] + tile
            if C.alive[slot]:
                add_sync_edge(S, slot, norm)


@compiled
def _is_served(C, slot):  # type: ignore[no-untyped-def]
    return phase_of(C.key[slot]) == SYNC and stage_of(C.key[slot]) == SERVE


@entry
def can_clip(W: World) -> bool:
    """Whether training by the strategy does not clip, or ranks can clip by it: ``plan.syncs.clipping.refusal`` is empty."""
    G, D, C, S, Y = W.graph, W.shards, W.state, W.scratch, W.templates
    if not D.clips[0]:
        return True
    find_geometries(W)
    peers, able = 0, True
    for parameter in range(len(G.parameter_dtype)):
        if not is_trained(G, parameter):
            continue
        geometry = S.geometry[parameter]
        for shard in range(D.ptr[geometry], D.ptr[geometry + 1]):
            if D.lowest[shard] < 0:
                continue
            find_members(W, parameter, shard)
            template = find_template(W, parameter, shard)
            able &= S.members[0] == len(C.busy) and Y.limits[2 * template] > 0 and Y.parts[template] == 0
            if compresses(W, C.sync[parameter]):
                able &= peers == 0 or peers == S.peers[0]  # all read it, so as many peers are the same ones
                peers = S.peers[0]
    return able or peers == 0
