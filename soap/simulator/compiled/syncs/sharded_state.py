"""Parts that readers own (compiled): reduce-scatters of buckets, all-gathers of values. The counterpart of ``plan.syncs.sharded_state``.

What each reader of a bucket owns of it is counted in ``owned``, from ``owned_ptr[bucket]`` on, in the order of the readers. How many
readers share a copy of it says ``bucket_sharers``; 0: each reader owns all of it.
"""

from __future__ import annotations

from soap.plan.syncs.seam import PULL, PUSH, SUM
from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.communication import add_flow, allreduce, begin_flows, find_list, sum_overhead_ns
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import FULL, TASKS, Scratch
from soap.simulator.compiled.state import OTHER, SYNC_BUCKET
from soap.simulator.compiled.syncs.codes import is_dealt_out, is_gathered, offloads
from soap.simulator.compiled.syncs.even_parts import collective_of, is_even
from soap.simulator.compiled.syncs.exchange import add_exchange, begin_exchange, new_row, round_of_flows
from soap.simulator.compiled.syncs.members import find_copies
from soap.simulator.compiled.syncs.offloading import add_offload
from soap.simulator.compiled.syncs.pricing import adding_ns, price_ns
from soap.simulator.compiled.task_keys import STATE_FULL, SYNC, set_key, task_key
from soap.simulator.compiled.world import World


@compiled
def owned_by_readers(W: World, parameter: int, shard: int) -> bool:
    """Whether several readers own a part of a region each, and it gets a gradient, or is frozen and gathered for its uses; then
    ``find_copies`` has been called. Call it after ``find_members``."""
    code = W.state.sync[parameter]
    wanted = W.shards.lowest[shard] >= 0 or (is_gathered(code) and not W.graph.trainable[parameter])
    return bool(is_dealt_out(code) and wanted and W.scratch.members[0] > 1 and find_copies(W, code) > 0)


@compiled
def sharers(S: Scratch) -> int:
    """How many readers share a copy. Call it after ``find_copies``."""
    return int(S.members[0] // S.peers[0])


@compiled
def parts_of(W: World, shard: int) -> int:
    """Into how many parts a region is cut. Call it after ``find_copies``."""
    return min(W.shards.rows[shard], sharers(W.scratch))


@compiled
def part_bytes(W: World, shard: int, part: int) -> int:
    """Bytes of a part of a region."""
    D, count = W.shards, parts_of(W, shard)
    return (D.rows[shard] // count + (1 if part < D.rows[shard] % count else 0)) * D.row_bytes[shard]


@compiled
def part_of_place(W: World, parameter: int, shard: int, place: int) -> int:
    """The part that the reader in this place owns; -1 if it owns none."""
    G, D, S = W.graph, W.shards, W.scratch
    count = sharers(S)
    part = (S.inside[place] - G.first_reader[parameter] - (shard - D.ptr[S.geometry[parameter]])) % count
    return part if part < parts_of(W, shard) else -1


@compiled
def part_adding_ns(W: World, shard: int, part: int, device: int, others: int) -> int:
    """Duration in ns of adding up the gradients of so many ``others`` for a part."""
    return adding_ns(others * part_bytes(W, shard, part), 0, W.cluster.memory_bandwidth[device], 0.0)


@compiled
def part_ns(W: World, shard: int, part: int, device: int, others: int) -> int:
    """Duration in ns of adding up the gradients of so many ``others`` for a part and updating it."""
    K, D, S = W.cluster, W.shards, W.scratch
    size = part_bytes(W, shard, part)
    return part_adding_ns(W, shard, part, device, others) + price_ns(D, S, K.hosts[0] + K.device_type[device], size)


@compiled
def is_scattered(W: World, bucket: int) -> bool:
    """Whether a bucket's gradients are scattered to readers that own parts."""
    return W.scratch.bucket_sharers[bucket] > 0


@compiled
def begin_owned(S, bucket, parts):  # type: ignore[no-untyped-def]
    """Set up what the readers of a new bucket own. ``parts``: whether they own parts; ``find_copies`` has been called then."""
    first, readers = S.owned_ptr[bucket], S.members[0] if parts else 0
    S.bucket_sharers[bucket] = sharers(S) if parts else 0
    if bucket + 2 > len(S.owned_ptr) or first + readers > len(S.owned):
        raise MemoryError(FULL)
    fill(S.owned, first, first + readers, 0)
    S.owned_ptr[bucket + 1] = first + readers


@compiled
def deal_out(W, parameter, shard, bucket):  # type: ignore[no-untyped-def]
    """Count a region's parts in its bucket."""
    S = W.scratch
    for place in range(S.members[0]):
        part = part_of_place(W, parameter, shard, place)
        if part >= 0:
            S.owned[S.owned_ptr[bucket] + place] += part_bytes(W, shard, part)


@compiled
def brings_values(W: World, bucket: int) -> bool:
    """Whether its values are gathered behind the owners' updates."""
    return is_scattered(W, bucket) and not is_gathered(W.state.sync[W.scratch.t_res[bucket]])


@compiled
def name_readers(R, S, group):  # type: ignore[no-untyped-def]
    """Fill ``members`` with the readers of a bucket; returns their number."""
    first, count = R.sets.ptr[group], R.sets.ptr[group + 1] - R.sets.ptr[group]
    S.members[0] = count
    for i in range(count):
        S.members[1 + i] = R.sets.item[first + i]
    return count


@compiled
def exchange_of(W, bucket, gather):  # type: ignore[no-untyped-def]
    """(duration in ns, bytes) of a bucket's exchange; its links are added to ``res``. ``gather``: from owners, else to them."""
    R, K, S = W.groups, W.cluster, W.scratch
    count, first = name_readers(R, S, S.t_res_n[bucket]), S.owned_ptr[bucket]
    find_copies(W, W.state.sync[S.t_res[bucket]])
    begin_exchange(S)
    if is_even(W):
        return collective_of(W, bucket)
    begin_flows(S)
    for owner in range(count):
        for reader in range(count if S.owned[first + owner] > 0 else 0):
            if reader != owner and S.leader[reader] == S.leader[owner]:
                source, target = (owner, reader) if gather else (reader, owner)
                add_flow(S, S.members[1 + source], S.members[1 + target], S.owned[first + owner])
    return round_of_flows(K, S, 0)


@compiled
def finish_scatter(W, bucket, slot, slot0):  # type: ignore[no-untyped-def]
    """Write the task that scatters a complete bucket into its slot. The owners' updates wait for it; or, if there are several copies, sums
    among the owners of the same parts do, whose tasks come after the ``count[TASKS]`` tasks from ``slot0`` on."""
    R, C, S = W.groups, W.state, W.scratch
    duration, moved = exchange_of(W, bucket, False)
    add_exchange(W, slot, task_key(SYNC, S.t_res[bucket], PUSH, S.bucket_region[bucket], 0, 0), duration, moved)
    if S.peers[0] > 1:
        _add_sums(W, bucket, slot, slot0)
        return
    readers, owners, first = S.members[0], 0, S.owned_ptr[bucket]
    for place in range(readers):
        if S.owned[first + place] > 0:
            owners += 1
            S.members[owners] = S.members[1 + place]
    C.kind[slot], C.owner[slot], C.waits[slot] = SYNC_BUCKET, -1, 0
    C.index[slot] = find_list(R.sets, S.members[1 : 1 + owners])


@compiled
def _add_sums(W, bucket, scatter, slot0):  # type: ignore[no-untyped-def]
    """Add an all-reduce among the owners of the same parts of a bucket for each reader of the first copy, behind the scatter. Each device's
    update waits for its own."""
    K, R, C, S = W.cluster, W.groups, W.state, W.scratch
    readers, count, sums = S.members[0], S.bucket_sharers[bucket], 0
    for place in range(readers):
        sums += S.leader[place] == S.leader[0] and S.owned[S.owned_ptr[bucket] + place] > 0
    row = new_row(C, sums)
    C.kind[scatter], C.owner[scatter], C.index[scatter], C.waits[scatter] = OTHER, -1, row, 0
    at = row + 2
    for inside in range(count):
        holders = size = 0
        for place in range(readers):
            if S.inside[place] == inside:
                holders, size = holders + 1, S.owned[S.owned_ptr[bucket] + place]
                S.peers[holders] = S.members[1 + place]
        if size == 0:
            continue
        slot = slot0 + S.count[TASKS]
        if slot + 1 > len(C.key):
            raise MemoryError(STATE_FULL)
        S.count[TASKS] += 1
        group = find_list(R.sets, S.peers[1 : 1 + holders])
        duration, way = allreduce(R, group, size)
        set_key(C, slot, task_key(SYNC, S.t_res[bucket], SUM, S.bucket_region[bucket], S.peers[1], 0))
        C.duration[slot], C.resource[slot], C.resource_n[slot] = duration, R.resource[way], R.resource_n[way]
        C.latency[slot], C.overhead[slot] = 0, sum_overhead_ns(K, holders, duration)
        C.waits[slot], C.alive[slot], C.kind[slot], C.owner[slot], C.index[slot] = 1, 1, SYNC_BUCKET, -1, group
        C.moved[slot] = 2 * (holders - 1) * size
        C.arena[at] = slot
        at += 1


@compiled
def gather_values(W, buckets, slot0):  # type: ignore[no-untyped-def]
    """Add the tasks that gather values of the first ``buckets`` buckets behind the owners' updates (``update_row``), and the updates that
    hosts make for devices. ``lifting``: as ``settling``, of what waits for these."""
    R, C, S = W.groups, W.state, W.scratch
    fill(C.update_row, 0, len(C.update_row), -1)
    fill(S.settling, 0, len(S.settling), 0)
    fill(S.lifting, 0, len(S.lifting), 0)
    for bucket in range(buckets):
        if brings_values(W, bucket):
            waiting = S.lifting if offloads(C.sync[S.t_res[bucket]]) else S.settling
            for place in range(name_readers(R, S, S.t_res_n[bucket])):
                waiting[S.members[1 + place]] += S.owned[S.owned_ptr[bucket] + place] > 0
    for device in range(len(S.settling)):
        away = S.offloaded[device] > 0
        if S.settling[device] > 0 or away:
            C.update_row[device] = new_row(C, S.settling[device] + away)
            S.settling[device] = C.update_row[device] + 2
        if away:
            C.arena[S.settling[device]] = slot0 + S.count[TASKS]
            S.settling[device] += 1
            S.lifting[device] = add_offload(W, device, slot0, S.lifting[device]) + 2
    for bucket in range(buckets):
        if brings_values(W, bucket):
            slot = slot0 + S.count[TASKS]
            if slot + 1 > len(C.key):
                raise MemoryError(STATE_FULL)
            S.count[TASKS] += 1
            duration, moved = exchange_of(W, bucket, True)
            add_exchange(W, slot, task_key(SYNC, S.t_res[bucket], PULL, S.bucket_region[bucket], 0, 0), duration, moved)
            C.kind[slot], C.owner[slot], C.index[slot], C.waits[slot] = OTHER, -1, new_row(C, 0), 0
            waiting = S.lifting if offloads(C.sync[S.t_res[bucket]]) else S.settling
            for place in range(S.members[0]):
                if S.owned[S.owned_ptr[bucket] + place] > 0:
                    device = S.members[1 + place]
                    C.arena[waiting[device]] = slot
                    waiting[device] += 1
                    C.waits[slot] += 1
