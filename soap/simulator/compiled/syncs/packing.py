"""Buckets of compressed shards (compiled): which of them travel together. The counterpart of ``plan.syncs.bucketing`` for these.

Bucket b has the shards ``packed_first[b]``, then ``packed_next`` of each, to ``packed_last[b]``: ``packed_parameter``, ``packed_shard``.
They have equal readers (``packed_group``), dtype, settings, and either all or none of them use local aggregation (``packed_way``).
``packed_bytes``: of all gradients; ``packed_left``: how many more there is room for; none in a bucket that is closed. ``packed_effort``:
for each bucket the sum of its shards' columns in ``effort``.
"""

from __future__ import annotations

from soap.plan.syncs.bucketing import BUCKET_BYTES, FIRST_BUCKET_BYTES
from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.communication import find_list
from soap.simulator.compiled.effort import OF_TYPES, SETTINGS, TYPE_COLUMNS
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import FULL, PACKED, PACKED_SHARDS, USES
from soap.simulator.compiled.state import ShardTables
from soap.simulator.compiled.syncs.members import compresses, find_members
from soap.simulator.compiled.world import World


@compiled
def effort_columns(D: ShardTables) -> int:
    """Number of columns of ``effort``."""
    return OF_TYPES + TYPE_COLUMNS * D.update_ns.shape[0]


@compiled
def find_effort(W: World, parameter: int, shard: int) -> int:
    """Where the columns of a compressed shard begin in ``effort``. LookupError if they are not known yet. Call it after
    ``compresses``."""
    D, C, S = W.shards, W.state, W.scratch
    key = D.compressed.missing[1:5]  # built in place: ``find_list`` leaves it there if it is missing
    key[0], key[1], key[2], key[3] = C.sync[parameter], parameter, shard, S.peers[0]
    return find_list(D.compressed, key) * effort_columns(D)


@compiled
def pack(W: World, parameter: int, shard: int) -> None:
    """Put a shard into the open bucket of its kind, or into a new one. Shards come in the order in which the backward pass completes their
    gradients. Call it after ``compresses``."""
    G, R, D, S = W.graph, W.groups, W.shards, W.scratch
    at, columns, dtype = find_effort(W, parameter, shard), effort_columns(D), G.parameter_dtype[parameter]
    way = 2 * D.effort[at + SETTINGS] + (1 if S.peers[0] < S.members[0] else 0)
    group, bucket, limit = find_list(R.sets, S.members[1 : 1 + S.members[0]]), -1, FIRST_BUCKET_BYTES
    for other in range(S.count[PACKED] - 1, -1, -1):
        alike = S.packed_group[other] == group and S.packed_way[other] == way
        if alike and G.parameter_dtype[S.packed_parameter[S.packed_first[other]]] == dtype:
            bucket, limit = other, BUCKET_BYTES
            break
    entry = S.count[PACKED_SHARDS]
    if entry + 1 > len(S.packed_next):
        raise MemoryError(FULL)
    S.packed_parameter[entry], S.packed_shard[entry], S.packed_next[entry] = parameter, shard, -1
    S.count[PACKED_SHARDS] = entry + 1
    if bucket < 0 or S.packed_left[bucket] <= 0:
        bucket = S.count[PACKED]
        if bucket + 1 > len(S.packed_first) or (bucket + 1) * columns > len(S.packed_effort):
            raise MemoryError(FULL)
        S.count[PACKED] = bucket + 1
        S.packed_first[bucket], S.packed_group[bucket], S.packed_way[bucket] = entry, group, way
        S.packed_left[bucket], S.packed_bytes[bucket] = limit, 0
        fill(S.packed_effort, bucket * columns, (bucket + 1) * columns, 0)
    else:
        S.packed_next[S.packed_last[bucket]] = entry
    S.packed_last[bucket] = entry
    S.packed_left[bucket] -= D.bytes[shard]
    S.packed_bytes[bucket] += D.bytes[shard]
    for column in range(columns):
        S.packed_effort[bucket * columns + column] += D.effort[at + column]


@compiled
def find_packed(W: World, bucket: int) -> int:
    """``find_members`` and ``compresses`` for a bucket; returns where the columns of its first shard begin in ``effort``. Fills
    ``packed_own``: by device, how many of the tiles that use its shards have a backward pass there."""
    C, S = W.state, W.scratch
    fill(S.packed_own, 0, len(S.packed_own), 0)
    entry = S.packed_next[S.packed_first[bucket]]
    while entry >= 0:
        _count_own(W, entry)
        entry = S.packed_next[entry]
    first = S.packed_first[bucket]
    _count_own(W, first)
    compresses(W, C.sync[S.packed_parameter[first]])
    return find_effort(W, S.packed_parameter[first], S.packed_shard[first])


@compiled
def _count_own(W, entry):  # type: ignore[no-untyped-def]
    C, S = W.state, W.scratch
    find_members(W, S.packed_parameter[entry], S.packed_shard[entry])
    for i in range(S.count[USES]):
        S.packed_own[S.use_device[i]] += 1 if C.alive[S.use_slot[i]] else 0
