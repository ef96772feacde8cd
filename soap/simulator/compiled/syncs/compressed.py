"""Compressed gradients (compiled): what devices do, and what they exchange. The counterpart of ``plan.syncs.compressed``.

What a shard takes by a method among so many peers is worked out in Python (``compiled.effort``), once. Which shards travel together says
``packing``.
"""

from __future__ import annotations

from soap.plan.syncs.amounts import COPIES
from soap.plan.syncs.seam import COMBINE, PULL, PUSH, RESTORE, SELECT, SPREAD, SUM
from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.communication import add_flow, allreduce, begin_flows, find_list, sum_overhead_ns
from soap.simulator.compiled.effort import EXCHANGES, HELD, MESSAGES, OF_TYPES, SUMMED, TYPE_COLUMNS, WHOLE
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import PACKED, TASKS, USES
from soap.simulator.compiled.state import OTHER, SYNC_BUCKET, SYNC_DEVICE
from soap.simulator.compiled.syncs.codes import is_compressed
from soap.simulator.compiled.syncs.exchange import (
    add_exchange,
    add_sync_edge,
    begin_exchange,
    new_row,
    round_of_flows,
    wait_for_tiles,
)
from soap.simulator.compiled.syncs.members import find_members
from soap.simulator.compiled.syncs.packing import effort_columns, find_effort, find_packed
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
    """Add the tasks of all compressed buckets after the ``count[TASKS]`` tasks from ``slot0`` on, of which ``buckets`` sums are the first.
    Needs the parameters' geometries, and all compressed shards in their buckets (``pack``)."""
    S = W.scratch
    if S.count[PACKED] > 0:
        _settle_devices(W, slot0, buckets)
    for bucket in range(S.count[PACKED]):
        _add_sum(W, bucket, slot0)


@compiled
def _settle_devices(W, slot0, buckets):  # type: ignore[no-untyped-def]
    """Add, for each peer of a compressed bucket, the task that waits for all of its backward passes, with a row for what waits for it: its
    own works, and if ranks clip (``clips``) all sums, but not those of buckets that readers own in parts: such plans are refused then.
    ``settled``: by device, its slot, or -1; ``settling``: where the row's next slot goes. The ``count[TASKS]`` tasks from ``slot0`` on are
    sums of dense gradients in buckets first, then others."""
    G, R, D, C, S = W.graph, W.groups, W.shards, W.state, W.scratch
    fill(S.settled, 0, len(S.settled), -1)
    fill(S.settling, 0, len(S.settling), 0)
    for packed in range(S.count[PACKED]):
        exchanges = D.effort[find_packed(W, packed) + EXCHANGES]
        for i in range(S.peers[0]):
            S.settling[S.peers[1 + i]] += exchanges
        if D.clips[0]:
            _count_clipped(S)
    sums = buckets if D.clips[0] else 0
    for bucket in range(sums):
        group = S.t_res_n[bucket]
        for i in range(0 if W.templates.parts[S.bucket_template[bucket]] > 0 else R.sets.ptr[group + 1] - R.sets.ptr[group]):
            S.settling[R.sets.item[R.sets.ptr[group] + i]] += 1
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
    for bucket in range(sums):
        group = S.t_res_n[bucket]
        for i in range(0 if W.templates.parts[S.bucket_template[bucket]] > 0 else R.sets.ptr[group + 1] - R.sets.ptr[group]):
            _wait_until_settled(C, S, slot0 + bucket, R.sets.item[R.sets.ptr[group] + i])


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
    """Add the tasks of one bucket: the peers' works, and the exchanges between them; with local aggregation a task before all of these, and
    one behind them, for what happens inside hosts."""
    D, C, S = W.shards, W.state, W.scratch
    at, total, peers = find_packed(W, bucket), bucket * effort_columns(D), S.peers[0]
    parameter, shard = S.packed_parameter[S.packed_first[bucket]], S.packed_shard[S.packed_first[bucket]]
    number = shard - D.ptr[S.geometry[parameter]]
    exchanges, inside = D.effort[at + EXCHANGES], 1 if peers < S.members[0] else 0
    first = slot0 + S.count[TASKS]
    if first + (exchanges + 1) * (peers + 1) + 2 > len(C.key):
        raise MemoryError(STATE_FULL)
    S.count[TASKS] += (exchanges + 1) * peers + exchanges + 2 * inside
    if inside:
        _add_inside(W, bucket, task_key(SYNC, parameter, PUSH, number, 0, 0), first, True)
    stages = (SELECT, COMBINE if exchanges > 1 else RESTORE, RESTORE)
    for k in range(exchanges + 1):
        works = first + inside + k * (peers + 1)
        last, work = k == exchanges, 2 if k == exchanges else k
        for i in range(peers):
            slot, device = works + i, S.peers[1 + i]
            duration = S.packed_effort[total + OF_TYPES + TYPE_COLUMNS * W.cluster.device_type[device] + work]
            row, followed = device, (not last) or inside > 0
            if followed:
                row = new_row(C, 1)
                C.arena[row + 2] = works + peers
            key = task_key(SYNC, parameter, stages[k], number, device, 0)
            _write(C, slot, key, duration, OTHER if followed else SYNC_DEVICE, row, 1 if k else inside)
            C.resource[slot], C.resource_n[slot] = device, 1
            if k > 0 or D.clips[0]:
                _wait_until_settled(C, S, slot, device)
            if k == 0 and not inside and D.clips[0] and S.packed_own[device] == 0:
                for j in range(S.members[0]):
                    if j != i:
                        _wait_until_settled(C, S, slot, S.members[1 + j])
        if not last:
            stage, column = SPREAD if k else SUM, MESSAGES + 2 * k
            key, size = task_key(SYNC, parameter, stage, number, 0, 0), S.packed_effort[total + column + 1]
            _add_exchange(W, key, D.effort[at + column], size, works + peers)
        elif inside:
            _add_inside(W, bucket, task_key(SYNC, parameter, PULL, number, 0, 0), works + peers, False)
    _wait_for_gradients(W, bucket, first, inside > 0)


@compiled
def _add_inside(W, bucket, key, slot, begins):  # type: ignore[no-untyped-def]
    """Add a task inside hosts: gradients to peers, which the selections in the slots right behind it wait for, or (not ``begins``) sums
    from peers, which the readers' updates wait for."""
    K, R, D, C, S = W.cluster, W.groups, W.shards, W.state, W.scratch
    peers, size, most = S.peers[0], S.packed_bytes[bucket], 0
    begin_exchange(S)
    begin_flows(S)
    for i in range(S.members[0]):
        S.received[i] = 0
    for i in range(S.members[0]):
        place = S.leader[i]
        if place != i:
            reader, peer = S.members[1 + i], S.members[1 + place]
            add_flow(S, reader if begins else peer, peer if begins else reader, size)
            S.received[place] += size
            most = max(most, S.received[place])
    duration, moved = round_of_flows(K, S, most if begins else 0)
    add_exchange(W, slot, key, duration, moved)
    C.owner[slot] = -1
    if not begins:
        C.kind[slot], C.index[slot], C.waits[slot] = SYNC_BUCKET, find_list(R.sets, S.members[1 : 1 + S.members[0]]), peers
        return
    row = new_row(C, peers)
    for i in range(peers):
        C.arena[row + 2 + i] = slot + 1 + i
    C.kind[slot], C.index[slot], C.waits[slot] = OTHER, row, 0
    for i in range(S.members[0] if D.clips[0] else 0):
        _wait_until_settled(C, S, slot, S.members[1 + i])


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
def _add_exchange(W, key, kind, size, slot):  # type: ignore[no-untyped-def]
    """Add an exchange of this kind among all peers, which the slots right behind it wait for."""
    K, R, C, S = W.cluster, W.groups, W.state, W.scratch
    peers = S.peers[0]
    row = new_row(C, peers)
    for i in range(peers):
        C.arena[row + 2 + i] = slot + 1 + i
    if kind == SUMMED:
        group = find_list(R.sets, S.peers[1 : 1 + peers])
        duration, way = allreduce(R, group, size)
        _write(C, slot, key, duration, OTHER, row, peers)
        C.resource[slot], C.resource_n[slot] = R.resource[way], R.resource_n[way]
        C.overhead[slot], C.moved[slot] = sum_overhead_ns(K, peers, duration), 2 * (peers - 1) * size
        return
    begin_exchange(S)
    begin_flows(S)
    for i in range(peers):
        for j in range(peers):
            if i != j:
                add_flow(S, S.peers[1 + i], S.peers[1 + j], size)
    duration, moved = round_of_flows(K, S, 0)
    add_exchange(W, slot, key, duration, moved)
    C.kind[slot], C.owner[slot], C.index[slot], C.waits[slot] = OTHER, -1, row, peers


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
