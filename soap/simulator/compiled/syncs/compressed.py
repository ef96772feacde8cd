"""Compressed gradients (compiled): what devices do beside the rows of their template. The counterpart of ``plan.syncs.compressed``. What a
shard takes by a method among so many peers is worked out in Python (``compiled.effort``), once."""

from __future__ import annotations

from soap.plan.syncs.amounts import COPIES
from soap.plan.syncs.seam import COMBINE, RESTORE, SELECT
from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.effort import HELD, OF_TYPES, TYPE_COLUMNS, WHOLE
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import PACKED_SHARDS, TASKS, USES
from soap.simulator.compiled.state import OTHER, SYNC_BUCKET, SYNC_DEVICE
from soap.simulator.compiled.syncs.codes import is_compressed
from soap.simulator.compiled.syncs.exchange import add_sync_edge, new_row, wait_for_tiles
from soap.simulator.compiled.syncs.members import compresses, find_members
from soap.simulator.compiled.syncs.templates import find_effort, write_row
from soap.simulator.compiled.task_keys import STATE_FULL, SYNC, UPDATE, set_key, task_key
from soap.simulator.compiled.world import World


@compiled
def any_compressed(W: World) -> bool:
    """Whether some parameter is compressed."""
    G, C = W.graph, W.state
    found = False
    for parameter in range(len(G.parameter_dtype)):
        found |= is_compressed(C.sync[parameter])
    return found


@compiled
def add_compressed(W: World, slot0: int, buckets: int) -> None:
    """Add the tasks of the compressed ones of the first ``buckets`` buckets: their first exchange in its slot, the others after the
    ``count[TASKS]`` tasks from ``slot0`` on. Needs the parameters' geometries."""
    S = W.scratch
    if S.count[PACKED_SHARDS] > 0:
        _settle_devices(W, slot0, buckets)
        for bucket in range(buckets):
            if S.packed_first[bucket] >= 0:
                _add_sum(W, bucket, slot0)


@compiled
def _settle_devices(W, slot0, buckets):  # type: ignore[no-untyped-def]
    """Add, for each peer of a compressed bucket, the task that waits for all of its backward passes, with a row for what waits for it: its
    own works, and if ranks clip (``clips``) all sums, but not those of buckets that readers own in parts: such plans are refused then.
    ``settled``: by device, its slot, or -1; ``settling``: where the row's next slot goes. The ``count[TASKS]`` tasks from ``slot0`` on are
    those of buckets first, then others."""
    G, R, D, C, S, Y = W.graph, W.groups, W.shards, W.state, W.scratch, W.templates
    fill(S.settled, 0, len(S.settled), -1)
    fill(S.settling, 0, len(S.settling), 0)
    for bucket in range(buckets):
        if S.packed_first[bucket] >= 0:
            _find_packed(W, bucket)
            template = S.bucket_template[bucket]
            late = 1 if Y.ending[template] > 0 else 0
            for row in range(Y.row_ptr[template], Y.row_ptr[template + 1]):
                late += 1 if Y.work[row] > 0 else 0
            for i in range(S.peers[0]):
                S.settling[S.peers[1 + i]] += late
            if D.clips[0]:
                _count_clipped(S)
        elif _is_clipped(W, bucket):
            group = S.t_res_n[bucket]
            for i in range(R.sets.ptr[group], R.sets.ptr[group + 1]):
                S.settling[R.sets.item[i]] += 1
    for device in range(len(S.settled)):
        if S.settling[device] > 0:
            slot = slot0 + S.count[TASKS]
            S.count[TASKS] += 1
            row = new_row(C, S.settling[device])
            _write(C, slot, task_key(UPDATE, device, 1, 0, 0, 0), 1, OTHER, row, 0)
            C.resource[slot], C.resource_n[slot] = device, 0
            S.settled[device], S.settling[device] = slot, row + 2
    for op in range(len(G.backward)):
        count = C.tiles[op]
        for tile in range(count):
            slot, device = C.tile_slot[op] + count + tile, C.dev[C.dev_ptr[op] + tile]
            if C.alive[slot] and S.settled[device] >= 0:
                add_sync_edge(S, slot, S.settled[device])
    for bucket in range(buckets):
        if S.packed_first[bucket] < 0 and _is_clipped(W, bucket):
            group = S.t_res_n[bucket]
            for i in range(R.sets.ptr[group], R.sets.ptr[group + 1]):
                _wait_until_settled(C, S, slot0 + bucket, R.sets.item[i])


@compiled
def _is_clipped(W, bucket):  # type: ignore[no-untyped-def]
    """Whether a bucket's sum waits until devices have clipped their gradients."""
    return W.shards.clips[0] and W.templates.parts[W.scratch.bucket_template[bucket]] == 0


@compiled
def _count_clipped(S):  # type: ignore[no-untyped-def]
    """Count in ``settling`` what of a compressed bucket waits until devices have clipped, beside their own works."""
    inside = S.peers[0] < S.members[0]
    for i in range(S.peers[0]):
        S.settling[S.peers[1 + i]] += 1  # the selection
    for i in range(S.members[0]):
        if inside:
            S.settling[S.members[1 + i]] += 1  # for what is collected
        elif S.packed_own[S.members[1 + i]] == 0:
            for j in range(S.members[0]):
                S.settling[S.members[1 + j]] += 1 if j != i else 0


@compiled
def _wait_until_settled(C, S, slot, device):  # type: ignore[no-untyped-def]
    """Let a task wait until a device has no backward pass left."""
    C.arena[S.settling[device]] = slot
    S.settling[device] += 1
    C.waits[slot] += 1


@compiled
def _add_sum(W, bucket, slot0):  # type: ignore[no-untyped-def]
    """Add the tasks of one bucket: its template's rows, and the peers' works before these and behind the last one."""
    D, C, S, Y = W.shards, W.state, W.scratch, W.templates
    _find_packed(W, bucket)
    template, before, first, peers = S.bucket_template[bucket], -1, slot0 + bucket, S.peers[0]
    inside = peers < S.members[0]
    for row in range(Y.row_ptr[template], Y.row_ptr[template + 1]):
        works = _add_works(W, bucket, Y.work[row], before, slot0) if Y.work[row] >= 0 else -1
        slot = slot0 + bucket if before < 0 else slot0 + S.count[TASKS]
        S.count[TASKS] += 1 if before >= 0 else 0
        write_row(W, bucket, row, slot)
        C.kind[slot], C.index[slot], C.waits[slot] = SYNC_BUCKET, S.t_res_n[bucket], peers if works >= 0 else 0
        C.owner[slot], C.alive[slot] = -1, 1
        for work in range(works, works + peers if works >= 0 else works):
            C.kind[work], C.index[work] = OTHER, new_row(C, 1)
            C.arena[C.index[work] + 2] = slot
        if before < 0 and works >= 0:
            first = works
        before = slot
    if Y.ending[template] >= 0:
        _add_works(W, bucket, Y.ending[template], before, slot0)
    for i in range(S.members[0] if inside and D.clips[0] else 0):
        _wait_until_settled(C, S, first, S.members[1 + i])
    _wait_for_gradients(W, bucket, first, inside)


@compiled
def _add_works(W, bucket, work, before, slot0):  # type: ignore[no-untyped-def]
    """Add a work of all peers, for which their updates wait, behind the task in slot ``before`` if there is one. Returns the first slot."""
    D, C, S = W.shards, W.state, W.scratch
    peers, first, parameter = S.peers[0], slot0 + S.count[TASKS], S.t_res[bucket]
    S.count[TASKS] += peers
    row = new_row(C, peers if before >= 0 else 0)
    for i in range(peers):
        slot, device = first + i, S.peers[1 + i]
        duration = S.owned[S.owned_ptr[bucket] + OF_TYPES + TYPE_COLUMNS * W.cluster.device_type[device] + work]
        key = task_key(SYNC, parameter, SELECT if work == 0 else COMBINE if work == 1 else RESTORE, S.bucket_region[bucket], device, 0)
        _write(C, slot, key, duration, SYNC_DEVICE, device, 1 if before >= 0 else 0)
        C.resource[slot], C.resource_n[slot] = device, 1
        if before >= 0:
            C.arena[row + 2 + i], C.kind[before], C.index[before] = slot, OTHER, row
        if work > 0 or D.clips[0]:
            _wait_until_settled(C, S, slot, device)
        if work == 0 and before < 0 and D.clips[0] and S.packed_own[device] == 0:
            for j in range(S.members[0]):
                if j != i:
                    _wait_until_settled(C, S, slot, S.members[1 + j])
    return first


@compiled
def _find_packed(W, bucket):  # type: ignore[no-untyped-def]
    """``find_members`` and ``compresses`` for a bucket. Fills ``packed_own``: by device, how many of the tiles that use its shards have a
    backward pass there."""
    C, S = W.state, W.scratch
    fill(S.packed_own, 0, len(S.packed_own), 0)
    entry = S.packed_next[S.packed_first[bucket]]
    while entry >= 0:
        _count_own(W, entry)
        entry = S.packed_next[entry]
    first = S.packed_first[bucket]
    _count_own(W, first)
    compresses(W, C.sync[S.packed_parameter[first]])


@compiled
def _count_own(W, entry):  # type: ignore[no-untyped-def]
    C, S = W.state, W.scratch
    find_members(W, S.packed_parameter[entry], S.packed_shard[entry])
    for i in range(S.count[USES]):
        S.packed_own[S.use_device[i]] += 1 if C.alive[S.use_slot[i]] else 0


@compiled
def _wait_for_gradients(W, bucket, first, inside):  # type: ignore[no-untyped-def]
    """Let the selections in the slots from ``first`` on wait for the backward passes of their device's own uses of the bucket's shards; a
    device that has none waits for all of them. ``inside``: what is collected, in slot ``first``, waits for all instead."""
    C, S = W.state, W.scratch
    entry = S.packed_first[bucket]
    while entry >= 0:
        find_members(W, S.packed_parameter[entry], S.packed_shard[entry])
        if inside:
            wait_for_tiles(C, S, first, first + 1)
        else:
            for i in range(S.members[0]):  # all of them are peers
                for use in range(S.count[USES]):
                    own = S.packed_own[S.members[1 + i]] == 0 or S.use_device[use] == S.members[1 + i]
                    if own and C.alive[S.use_slot[use]]:
                        add_sync_edge(S, S.use_slot[use], first + i)
        entry = S.packed_next[entry]


@compiled
def _write(C, slot, key, duration, kind, index, waits):  # type: ignore[no-untyped-def]
    """Write a task that moves nothing into a slot; the caller adds what it holds."""
    if slot + 1 > len(C.key):
        raise MemoryError(STATE_FULL)
    set_key(C, slot, key)
    C.duration[slot], C.latency[slot], C.overhead[slot], C.moved[slot] = duration, 0, 0, 0
    C.alive[slot], C.kind[slot], C.owner[slot], C.index[slot], C.waits[slot] = 1, kind, -1, index, waits


@compiled
def held_bytes(W: World, parameter: int, shard: int, place: int) -> int:
    """Bytes that a reader of a compressed shard holds for it, at most. ``place``: its place among the readers. Call it after
    ``compresses``. The counterpart of ``CompressedSum.buffers``."""
    D, S = W.shards, W.scratch
    at, size, others = find_effort(W, parameter, shard), D.bytes[shard], 0
    if S.leader[place] != place:
        return COPIES * size
    for i in range(S.members[0]):
        others += 1 if S.leader[i] == place else 0
    held = D.effort[at + OF_TYPES + TYPE_COLUMNS * W.cluster.device_type[S.members[1 + place]] + HELD]
    if S.peers[0] < S.members[0]:
        held += COPIES * (others - 1) * size + D.effort[at + WHOLE]
    return held
