"""Which gradients synchronization waits for, and clipping by the norm of all (compiled): the sum that updates wait for, and by which
strategies ranks can clip. The counterpart of ``plan.syncs.clipping``."""

from __future__ import annotations

from soap.plan.syncs.clipping import NORM_BYTES
from soap.simulator.compiled.communication import allreduce, find_list, sum_overhead_ns
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.machine_code import entry
from soap.simulator.compiled.scratch import NORM, PACKED_SHARDS
from soap.simulator.compiled.syncs.exchange import add_edge, new_task
from soap.simulator.compiled.syncs.members import compresses, find_geometries, find_members, is_trained
from soap.simulator.compiled.syncs.templates import NO_TASK, find_template, settled
from soap.simulator.compiled.task_keys import UPDATE, task_key
from soap.simulator.compiled.world import World


@compiled
def add_norm(W: World) -> None:
    """If all devices learn the norm, add that task (``count[NORM]``), for which their updates wait."""
    K, R, D, C, S = W.cluster, W.groups, W.shards, W.state, W.scratch
    devices = len(C.busy)
    S.count[NORM] = NO_TASK
    if not D.clips[0] or devices == 1 or S.count[PACKED_SHARDS] > 0:
        return
    norm = S.count[NORM] = new_task(C, task_key(UPDATE, 0, 2, 0, 0, 0))
    for device in range(devices):
        S.members[1 + device] = device
        add_edge(S, norm, device)
    group = find_list(R.sets, S.members[1 : 1 + devices])
    duration, way = allreduce(R, group, NORM_BYTES)
    C.duration[norm], C.resource[norm], C.resource_n[norm] = duration, R.resource[way], R.resource_n[way]
    C.overhead[norm], C.moved[norm] = sum_overhead_ns(K, devices, duration), 2 * (R.members[group] - 1) * NORM_BYTES


@compiled
def wait_for_gradients(W: World, buckets: int, gradients: int) -> None:
    """Turn the first ``gradients`` edges, from tiles to the first ``buckets`` buckets, into edges to the buckets' first tasks. A device's
    work waits for its own tiles alone, unless it has none. Where ranks clip what they compress, all wait until their devices have
    clipped."""
    R, C, S, Y = W.groups, W.state, W.scratch, W.templates
    for i in range(gradients):
        first, source = S.first_task[S.e_dst[i]], S.e_src[i]
        for slot in range(first, first + S.first_count[S.e_dst[i]] if S.first_count[S.e_dst[i]] > 1 else first):
            if C.resource[slot] == C.resource[source]:
                C.waits[slot] = 1  # it has some of its own
    for i in range(gradients):
        first, source = S.first_task[S.e_dst[i]], S.e_src[i]
        S.e_dst[i], last = first, first + S.first_count[S.e_dst[i]]
        for slot in range(first, last if last > first + 1 else first):
            if C.resource[slot] == C.resource[source]:
                S.e_dst[i] = slot
            elif not C.waits[slot]:
                add_edge(S, source, slot)
    clips = W.shards.clips[0] and S.count[PACKED_SHARDS] > 0
    for bucket in range(buckets):
        group, first = S.t_res_n[bucket], S.first_task[bucket]
        for slot in range(first, first + S.first_count[bucket]):
            for i in range(R.sets.ptr[group], R.sets.ptr[group + 1] if clips else R.sets.ptr[group]):
                mine = S.first_count[bucket] > 1 and R.sets.item[i] == C.resource[slot]  # for which works wait anyway
                if not mine and not C.waits[slot] and Y.parts[S.bucket_template[bucket]] == 0:
                    add_edge(S, settled(C, S, R.sets.item[i]), slot)
            C.waits[slot] = 0


@compiled
def wait_for_passes(W: World) -> None:
    """Let the norm wait for all backward passes, and the tasks ``settled`` for those of their devices."""
    G, C, S = W.graph, W.state, W.scratch
    for op in range(len(G.backward)):
        for slot in range(C.tile_slot[op] + C.tiles[op], C.tile_slot[op] + 2 * C.tiles[op]):
            if C.alive[slot] and S.count[NORM] != NO_TASK:
                add_edge(S, slot, S.count[NORM])
            if C.alive[slot] and S.settled[C.resource[slot]] != NO_TASK:
                add_edge(S, slot, S.settled[C.resource[slot]])


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
