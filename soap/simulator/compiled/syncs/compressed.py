"""Compressed gradients (compiled): what devices do, and what they exchange. The counterpart of ``plan.syncs.compressed``.

What a shard takes by a method among so many peers is worked out in Python (``compiled.effort``), once.
"""

from __future__ import annotations

from soap.plan.syncs.amounts import COPIES
from soap.plan.syncs.seam import COMBINE, PULL, PUSH, RESTORE, SELECT, SPREAD, SUM
from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.communication import add_flow, allreduce, begin_flows, find_list, sum_overhead_ns
from soap.simulator.compiled.effort import EXCHANGES, HELD, MESSAGES, OF_TYPES, SUMMED, TYPE_COLUMNS, WHOLE
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import TASKS, USES
from soap.simulator.compiled.state import OTHER, SYNC_BUCKET, SYNC_DEVICE, ShardTables
from soap.simulator.compiled.syncs.codes import is_compressed
from soap.simulator.compiled.syncs.exchange import (
    add_exchange,
    add_sync_edge,
    begin_exchange,
    new_row,
    round_of_flows,
    wait_for_tiles,
)
from soap.simulator.compiled.syncs.members import compresses, find_members, is_trained
from soap.simulator.compiled.syncs.sharded_state import is_scattered
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
def find_effort(W: World, parameter: int, shard: int) -> int:
    """Where the columns of a compressed shard begin in ``effort``. LookupError if they are not known yet. Call it after
    ``compresses``."""
    D, C, S = W.shards, W.state, W.scratch
    key = D.compressed.missing[1:5]  # built in place: ``find_list`` leaves it there if it is missing
    key[0], key[1], key[2], key[3] = C.sync[parameter], parameter, shard, S.peers[0]
    return find_list(D.compressed, key) * effort_columns(D)


@compiled
def effort_columns(D: ShardTables) -> int:
    """Number of columns of ``effort``."""
    return OF_TYPES + TYPE_COLUMNS * D.update_ns.shape[0]


@compiled
def add_compressed(W: World, slot0: int, buckets: int) -> None:
    """Add the tasks of all compressed shards, in the order of the parameters, after the ``count[TASKS]`` tasks from ``slot0`` on, of which
    ``buckets`` sums are the first. Needs the parameters' geometries."""
    D, C, S = W.shards, W.state, W.scratch
    if not any_compressed(W):
        return
    _settle_devices(W, slot0, buckets)
    for parameter in range(len(W.graph.parameter_dtype)):
        if is_compressed(C.sync[parameter]) and is_trained(W.graph, parameter):
            geometry = S.geometry[parameter]
            for shard in range(D.ptr[geometry], D.ptr[geometry + 1]):
                if D.lowest[shard] >= 0:
                    find_members(W, parameter, shard)
                    if compresses(W, C.sync[parameter]):
                        _add_sum(W, parameter, shard, shard - D.ptr[geometry], slot0)


@compiled
def _settle_devices(W, slot0, buckets):  # type: ignore[no-untyped-def]
    """Add, for each peer of a compressed shard, the task that waits for all of its backward passes, with a row for what waits for it: its
    own works, and if ranks clip (``clips``) all sums, but not those of buckets that readers own in parts: such plans are refused then.
    ``settled``: by device, its slot, or -1; ``settling``: where the row's next slot goes. The ``count[TASKS]`` tasks from ``slot0`` on are
    sums in buckets first, then others."""
    G, R, D, C, S = W.graph, W.groups, W.shards, W.state, W.scratch
    fill(S.settled, 0, len(S.settled), -1)
    fill(S.settling, 0, len(S.settling), 0)
    for parameter in range(len(G.parameter_dtype)):
        if is_compressed(C.sync[parameter]) and is_trained(G, parameter):
            geometry = S.geometry[parameter]
            for shard in range(D.ptr[geometry], D.ptr[geometry + 1]):
                if D.lowest[shard] >= 0:
                    find_members(W, parameter, shard)
                    if compresses(W, C.sync[parameter]):
                        exchanges = D.effort[find_effort(W, parameter, shard) + EXCHANGES]
                        for i in range(S.peers[0]):
                            S.settling[S.peers[1 + i]] += exchanges
                        if D.clips[0]:
                            _count_clipped(C, S)
    compressing = False
    for device in range(len(S.settled)):
        compressing |= S.settling[device] > 0
    sums = buckets if compressing and D.clips[0] else 0
    for bucket in range(sums):
        group = S.t_res_n[bucket]
        for i in range(0 if is_scattered(W, bucket) else R.sets.ptr[group + 1] - R.sets.ptr[group]):
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
        for i in range(0 if is_scattered(W, bucket) else R.sets.ptr[group + 1] - R.sets.ptr[group]):
            _wait_until_settled(C, S, slot0 + bucket, R.sets.item[R.sets.ptr[group] + i])


@compiled
def _count_clipped(C, S):  # type: ignore[no-untyped-def]
    """Count in ``settling`` what of a compressed shard waits until devices have clipped, beside their own works."""
    inside = S.peers[0] < S.members[0]
    for i in range(S.peers[0]):
        S.settling[S.peers[1 + i]] += 1  # the selection
    for i in range(S.members[0]):
        if inside:
            S.settling[S.members[1 + i]] += 1  # for what is collected
        elif _own_uses(C, S, S.members[1 + i]) == 0:
            for j in range(S.members[0]):
                S.settling[S.members[1 + j]] += 1 if j != i else 0


@compiled
def _wait_until_settled(C, S, slot, device):  # type: ignore[no-untyped-def]
    """Let a task wait until a device has no backward pass left."""
    C.arena[S.settling[device]] = slot
    S.settling[device] += 1
    C.waits[slot] += 1


@compiled
def _own_uses(C, S, device):  # type: ignore[no-untyped-def]
    """How many of the tiles that use the shard have a backward pass on this device."""
    own = 0
    for i in range(S.count[USES]):
        own += 1 if S.use_device[i] == device and C.alive[S.use_slot[i]] else 0
    return own


@compiled
def _add_sum(W, parameter, shard, number, slot0):  # type: ignore[no-untyped-def]
    """Add the tasks of one shard: the peers' works, and the exchanges between them; with local aggregation a task before all of these, and
    one behind them, for what happens inside hosts."""
    D, C, S = W.shards, W.state, W.scratch
    at, peers = find_effort(W, parameter, shard), S.peers[0]
    exchanges, inside = D.effort[at + EXCHANGES], 1 if peers < S.members[0] else 0
    first = slot0 + S.count[TASKS]
    if first + (exchanges + 1) * (peers + 1) + 2 > len(C.key):
        raise MemoryError(STATE_FULL)
    S.count[TASKS] += (exchanges + 1) * peers + exchanges + 2 * inside
    if inside:
        _add_inside(W, parameter, shard, number, first, True)
    stages = (SELECT, COMBINE if exchanges > 1 else RESTORE, RESTORE)
    for k in range(exchanges + 1):
        works = first + inside + k * (peers + 1)
        last, work = k == exchanges, 2 if k == exchanges else k
        for i in range(peers):
            slot, device = works + i, S.peers[1 + i]
            duration = D.effort[at + OF_TYPES + TYPE_COLUMNS * W.cluster.device_type[device] + work]
            row, followed = device, (not last) or inside > 0
            if followed:
                row = new_row(C, 1)
                C.arena[row + 2] = works + peers
            key = task_key(SYNC, parameter, stages[k], number, device, 0)
            _write(C, slot, key, duration, OTHER if followed else SYNC_DEVICE, row, 1 if k else inside)
            C.resource[slot], C.resource_n[slot] = device, 1
            if k > 0 or D.clips[0]:
                _wait_until_settled(C, S, slot, device)
            if k == 0 and not inside:
                _wait_for_gradient(D, C, S, slot, device)
        if not last:
            _add_exchange(W, parameter, number, at + MESSAGES + 2 * k, works + peers, SPREAD if k else SUM)
        elif inside:
            _add_inside(W, parameter, shard, number, works + peers, False)


@compiled
def _add_inside(W, parameter, shard, number, slot, begins):  # type: ignore[no-untyped-def]
    """Add a task inside hosts: gradients to peers, which the selections in the slots right behind it wait for, or (not ``begins``) sums
    from peers, which the readers' updates wait for."""
    K, R, D, C, S = W.cluster, W.groups, W.shards, W.state, W.scratch
    peers, size, most = S.peers[0], D.bytes[shard], 0
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
    add_exchange(W, slot, task_key(SYNC, parameter, PUSH if begins else PULL, number, 0, 0), duration, moved)
    C.owner[slot] = -1
    if not begins:
        C.kind[slot], C.index[slot], C.waits[slot] = SYNC_BUCKET, find_list(R.sets, S.members[1 : 1 + S.members[0]]), peers
        return
    row = new_row(C, peers)
    for i in range(peers):
        C.arena[row + 2 + i] = slot + 1 + i
    C.kind[slot], C.index[slot], C.waits[slot] = OTHER, row, 0
    wait_for_tiles(C, S, slot, slot + 1)
    for i in range(S.members[0] if D.clips[0] else 0):
        _wait_until_settled(C, S, slot, S.members[1 + i])


@compiled
def _wait_for_gradient(D, C, S, slot, device):  # type: ignore[no-untyped-def]
    """Let a selection wait for the backward passes of the device's own uses of the shard; if it has none, for all of them, and if ranks
    clip until all readers have."""
    own = _own_uses(C, S, device)
    for i in range(S.members[0] if own == 0 and D.clips[0] else 0):
        if S.members[1 + i] != device:
            _wait_until_settled(C, S, slot, S.members[1 + i])
    for i in range(S.count[USES]):
        if C.alive[S.use_slot[i]] and (own == 0 or S.use_device[i] == device):
            add_sync_edge(S, S.use_slot[i], slot)


@compiled
def _add_exchange(W, parameter, number, at, slot, stage):  # type: ignore[no-untyped-def]
    """Add an exchange among all peers, which the slots right behind it wait for. ``at``: where its kind and bytes are in ``effort``."""
    K, R, D, C, S = W.cluster, W.groups, W.shards, W.state, W.scratch
    peers, key, size = S.peers[0], task_key(SYNC, parameter, stage, number, 0, 0), D.effort[at + 1]
    row = new_row(C, peers)
    for i in range(peers):
        C.arena[row + 2 + i] = slot + 1 + i
    if D.effort[at] == SUMMED:
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
