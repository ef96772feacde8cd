"""Sums of gradients in buckets (compiled). The counterpart of ``plan.syncs.all_reduce``."""

from __future__ import annotations

from soap.plan.syncs.bucketing import BUCKET_BYTES, FIRST_BUCKET_BYTES
from soap.simulator.compiled.communication import allreduce, find_list, sum_overhead_ns
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import FULL, TASKS, USES
from soap.simulator.compiled.state import SYNC_BUCKET
from soap.simulator.compiled.syncs.codes import is_compressed, is_dealt_out, is_gathered, method_of, offloads, wire_bytes
from soap.simulator.compiled.syncs.exchange import add_sync_edge
from soap.simulator.compiled.syncs.sharded_state import begin_owned, deal_out, owned_by_readers
from soap.simulator.compiled.task_keys import STATE_FULL, SYNC, task_key


@compiled
def join_bucket(W, parameter, shard, opened, slot0):  # type: ignore[no-untyped-def]
    """Put a shard into a bucket, whose task waits for the shard's gradients. Call it after ``find_members``."""
    C, S = W.state, W.scratch
    bucket = put_into_bucket(W, parameter, shard, opened)
    for i in range(S.count[USES]):
        if C.alive[S.use_slot[i]]:
            add_sync_edge(S, S.use_slot[i], slot0 + bucket)


@compiled
def put_into_bucket(W, parameter, shard, opened):  # type: ignore[no-untyped-def]
    """Put a shard into the open bucket of its devices, method, copies and dtype, frozen ones apart; returns the bucket. Call it after
    ``find_members``."""
    G, R, D, C, S = W.graph, W.groups, W.shards, W.state, W.scratch
    group = find_list(R.sets, S.members[1 : 1 + S.members[0]])
    code, parts = C.sync[parameter], owned_by_readers(W, parameter, shard)
    method = 2 * offloads(code) * G.trainable[parameter]
    # what is compressed by a single peer, or dealt out to one reader of each host, is left to the default
    if not is_compressed(code) and (parts or not is_dealt_out(code)):
        method += 8 * method_of(code) + 4 * (parts and S.peers[0] > 1) + (1 - G.trainable[parameter])
    place = (group * G.bucket_kinds[1] + method) * G.bucket_kinds[0] + G.parameter_dtype[parameter]
    if place >= len(S.bucket_stamp):
        raise MemoryError(FULL)
    if S.bucket_stamp[place] != opened:  # the first bucket is closed early
        first_limit = G.gather_limit[0] if parts and is_gathered(code) else FIRST_BUCKET_BYTES
        S.bucket_stamp[place], S.bucket_of[place], S.bucket_limit[place] = opened, -1, first_limit
    bucket = S.bucket_of[place]
    if bucket < 0:
        bucket = S.count[TASKS]
        if bucket + 2 > len(S.t_key):
            raise MemoryError(FULL)
        S.t_key[bucket], S.t_subkey[bucket] = task_key(SYNC, parameter, 0, shard - D.ptr[S.geometry[parameter]], 0, 0)
        S.t_bytes[bucket], S.t_res_n[bucket], S.t_res[bucket] = 0, group, parameter
        S.bucket_region[bucket] = shard - D.ptr[S.geometry[parameter]]
        begin_owned(S, bucket, parts)
        S.count[TASKS] = bucket + 1
        S.bucket_of[place] = bucket
    S.t_bytes[bucket] += D.bytes[shard]
    if parts:
        deal_out(W, parameter, shard, bucket)
    if S.t_bytes[bucket] >= S.bucket_limit[place]:
        S.bucket_of[place], S.bucket_limit[place] = -1, G.gather_limit[0] if parts and is_gathered(code) else BUCKET_BYTES
    return bucket


@compiled
def finish_bucket(W, bucket, slot):  # type: ignore[no-untyped-def]
    """Write the task of a complete bucket into its slot."""
    K, R, C, S = W.cluster, W.groups, W.state, W.scratch
    if slot + 1 > len(C.key):
        raise MemoryError(STATE_FULL)
    group = S.t_res_n[bucket]
    size = wire_bytes(C.sync[S.t_res[bucket]], S.t_bytes[bucket], W.graph.parameter_itemsize[S.t_res[bucket]])
    duration, way = allreduce(R, group, size)
    members = R.sets.ptr[group + 1] - R.sets.ptr[group]
    C.key[slot], C.subkey[slot] = S.t_key[bucket], S.t_subkey[bucket]
    C.duration[slot], C.resource[slot], C.resource_n[slot] = duration, R.resource[way], R.resource_n[way]
    C.latency[slot], C.overhead[slot] = 0, sum_overhead_ns(K, members, duration)
    C.waits[slot], C.alive[slot], C.kind[slot], C.owner[slot], C.index[slot] = 0, 1, SYNC_BUCKET, -1, group
    C.moved[slot] = 2 * (members - 1) * size
