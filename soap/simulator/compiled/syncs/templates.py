"""Plays templates of synchronizations (compiled): buckets of regions, and the tasks that the rows of a bucket's template become.

A template says which devices move which amounts (``plan.syncs.seam.Template``); here these get their bytes and prices. The counterpart of
``seam.steps_of`` and of ``communication.synchronizing``. A bucket's ``t_bytes`` are all its gradients; what each of its template's parts
has of it is in ``owned``, from ``owned_ptr[bucket]`` on; of a compressed bucket, the sums of its shards' columns in ``effort``. Its
tasks that wait for gradients are ``first_count[bucket]`` from ``first_task[bucket]`` on. Of values that are gathered for each micro-batch
there is a bucket for each (``ShardSync.part``), one behind the other.
"""

from __future__ import annotations

from soap.plan.syncs.seam import How, Of, Phase
from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.chunks import cut_sum
from soap.simulator.compiled.communication import add_flow, allreduce, begin_joining, find_list, join_flow, parted_ns, sum_overhead_ns
from soap.simulator.compiled.effort import MESSAGES, OF_TYPES, SETTINGS, TYPE_COLUMNS
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.rows import INDEX_BYTES, part_of_rows
from soap.simulator.compiled.scratch import FULL, NORM, PACKED_SHARDS, TASKS
from soap.simulator.compiled.state import ARENA, SLOTS, ShardTables, SyncTemplates
from soap.simulator.compiled.syncs.codes import GATHERED
from soap.simulator.compiled.syncs.exchange import add_edge, add_exchange, begin_exchange, new_task, round_of_flows
from soap.simulator.compiled.syncs.members import compresses
from soap.simulator.compiled.syncs.server_traffic import owner_ns
from soap.simulator.compiled.task_keys import STATE_FULL, SYNC, UPDATE, task_key
from soap.simulator.compiled.variants import CELLS, PARTS
from soap.simulator.compiled.world import World

_SUM, _EXCHANGE, _WORK, _SERVE = int(How.SUM), int(How.EXCHANGE), int(How.WORK), int(How.SERVE)
_BEFORE_FORWARD, _AFTER_BACKWARD = int(Phase.BEFORE_FORWARD), int(Phase.AFTER_BACKWARD)
_VALUES, _INDICES, _MESSAGE = int(Of.VALUES), int(Of.INDICES), int(Of.MESSAGE)

NO_TASK = -1

_GRADIENTS, _TASKS, _UPDATES = range(3)
"""For which of these a row's tasks wait."""


@compiled
def find_template(W: World, parameter: int, shard: int) -> int:
    """The template of a shard. LookupError if it is not known yet. Call it after ``find_members``."""
    G, D, C, S, Y = W.graph, W.shards, W.state, W.scratch, W.templates
    key = Y.known.missing[1 : 4 + S.members[0]]  # built in place: it stays there if it is missing
    key[0], key[1], key[2] = C.sync[parameter], 2 if not G.trainable[parameter] else 1 if D.lowest[shard] >= 0 else 0, 0
    if key[1] == 1 and compresses(W, C.sync[parameter]):
        key[2] = 1 + D.effort[find_effort(W, parameter, shard) + SETTINGS]
    for i in range(S.members[0]):
        key[3 + i] = S.members[1 + i]
    return Y.number[find_list(Y.known, key)]


@compiled
def phase_row(Y: SyncTemplates, template: int, phase: int) -> int:
    """The first row of a phase; -1 if it has none."""
    for row in range(Y.row_ptr[template], Y.row_ptr[template + 1]):
        if Y.phase[row] == phase:
            return row
    return -1


@compiled
def is_alone(Y: SyncTemplates, template: int) -> bool:
    """Whether each region travels by itself, behind the backward pass."""
    return Y.limits[2 * template] == 0 and phase_row(Y, template, _AFTER_BACKWARD) >= 0


@compiled
def part_bytes(W: World, template: int, parameter: int, shard: int, place: int) -> int:
    """Bytes of a region's part that the readers in this place of their copies own: parts are dealt out like cards (``placement``). In a
    folded plan the largest of the parts for whose owners a reader stands (``represented``)."""
    D, Y = W.shards, W.templates
    readers, first = Y.sharers[template], W.graph.first_reader[parameter] + shard - D.ptr[W.scratch.geometry[parameter]]
    leading, entries = 1, 1  # ``placement.cut_place``
    for i in range(D.size_ptr[shard], D.size_ptr[shard + 1]):
        leading, entries = leading * entries, D.size[i]
        if leading * entries >= readers:
            break
    count, at, most = min(readers, leading * entries), Y.first_part[template] + place, 0
    parts, more = count // leading, count % leading  # of each of the leading entries, and of how many one more
    longest = -(-entries // parts)
    for i in range(Y.place_ptr[at], Y.place_ptr[at + 1]):
        part = (Y.place[i] - first) % readers
        if part < count:
            own, part = (parts + 1, part) if part < more * (parts + 1) else (parts, part - more * (parts + 1))
            most = max(most, entries // own + (part % own < entries % own))
        if most == longest or (count == readers and more == entries % parts == 0):
            break
    return most * (D.bytes[shard] // (leading * entries))


@compiled
def own_bytes(W: World, template: int, parameter: int, shard: int, i: int) -> int:
    """Bytes of a region that reader ``i`` owns."""
    Y = W.templates
    if Y.parts[template] == 0:
        return W.shards.bytes[shard]
    return part_bytes(W, template, parameter, shard, Y.inside[Y.inside_ptr[template] + i])


@compiled
def part_count(W: World, template: int, parameter: int) -> int:
    """For how many micro-batches a region is synchronized by itself; 1 if for all of a step."""
    G, A = W.graph, W.order
    if A.count[0] == 1 or not W.state.sync[parameter] & GATHERED or phase_row(W.templates, template, _BEFORE_FORWARD) < 0:
        return 1
    count = A.count[0]
    for i in range(G.user_ptr[parameter], G.user_ptr[parameter + 1]):
        count = count if A.repeats[G.user[i]] else 1
    return int(count)


@compiled
def of_micro_batch(W: World, bucket: int, slot: int) -> int:
    """The bucket for the micro-batch of a tile's slot. ``bucket``: for the first one."""
    V, C = W.variants, W.state
    if W.scratch.bucket_part[bucket] < 0:
        return bucket
    row = V.rows[C.variant[C.owner[slot]]]
    return int(bucket + C.index[slot] % row[CELLS] // (row[CELLS] // row[PARTS]))


@compiled
def put_into_bucket(W: World, template: int, parameter: int, shard: int, opened: int) -> int:
    """Put a shard into the open bucket of its template and dtype, frozen ones apart, and what is for each micro-batch; returns the bucket,
    or the first one of these. ``opened``: a stamp."""
    G, D, S, Y = W.graph, W.shards, W.scratch, W.templates
    count = part_count(W, template, parameter)
    place = ((template * G.dtypes[0] + G.parameter_dtype[parameter]) * 2 + G.trainable[parameter]) * 2 + (count > 1)
    if place >= len(S.bucket_stamp):
        raise MemoryError(FULL)
    if S.bucket_stamp[place] != opened:
        S.bucket_stamp[place], S.bucket_of[place], S.bucket_limit[place] = opened, -1, Y.limits[2 * template]
    is_packed = compresses(W, W.state.sync[parameter])
    bucket, parts = S.bucket_of[place], effort_columns(D) if is_packed else Y.parts[template]
    if bucket < 0:
        bucket = S.bucket_of[place] = S.count[TASKS]
        if bucket + count + 1 > len(S.t_key) or S.owned_ptr[bucket] + count * parts > len(S.owned):
            raise MemoryError(FULL)
        for own in range(bucket, bucket + count):
            first = S.owned_ptr[own]
            S.bucket_template[own], S.t_bytes[own], S.bucket_part[own] = template, 0, own - bucket if count > 1 else -1
            S.t_res_n[own], S.t_res[own] = Y.readers[template], parameter
            S.bucket_region[own] = shard - D.ptr[S.geometry[parameter]]
            fill(S.owned, first, first + parts, 0)
            S.owned_ptr[own + 1] = first + parts
        S.count[TASKS] = bucket + count
    effort = find_effort(W, parameter, shard) if is_packed else 0
    S.count[PACKED_SHARDS] += is_packed
    for part in range(parts):
        size = D.effort[effort + part] if is_packed else part_bytes(W, template, parameter, shard, part)
        for own in range(bucket, bucket + count):
            S.owned[S.owned_ptr[own] + part] += size
    for own in range(bucket, bucket + count):
        S.t_bytes[own] += D.bytes[shard]
    if S.t_bytes[bucket] >= S.bucket_limit[place]:
        S.bucket_of[place], S.bucket_limit[place] = -1, Y.limits[2 * template + 1]
    return bucket


@compiled
def owns(W: World, bucket: int, i: int) -> bool:
    """Whether reader ``i`` of a bucket owns some of it."""
    S, Y = W.scratch, W.templates
    template = S.bucket_template[bucket]
    return Y.parts[template] == 0 or S.owned[S.owned_ptr[bucket] + Y.inside[Y.inside_ptr[template] + i]] > 0


@compiled
def largest_part(W: World, bucket: int) -> int:
    """Bytes of one reader's parts of a bucket, with padding."""
    S, largest = W.scratch, 0
    for i in range(S.owned_ptr[bucket], S.owned_ptr[bucket + 1]):
        largest = max(largest, S.owned[i])
    return largest


@compiled
def put_alone(W: World, bucket: int, template: int, parameter: int, shard: int) -> None:
    """Make a bucket of one shard, for ``write_row``. Call ``prepare`` before that if its amounts are those of rows."""
    D, S, Y = W.shards, W.scratch, W.templates
    if bucket + 1 > len(S.t_key):
        raise MemoryError(FULL)
    S.bucket_template[bucket], S.t_bytes[bucket], S.bucket_shard[bucket] = template, D.bytes[shard], shard
    S.t_res_n[bucket], S.t_res[bucket] = Y.readers[template], parameter
    S.bucket_region[bucket], S.bucket_part[bucket] = shard - D.ptr[S.geometry[parameter]], -1


@compiled
def _amount(W, bucket, amount):  # type: ignore[no-untyped-def]
    """Bytes of an amount, as they travel."""
    S, Y = W.scratch, W.templates
    template = S.bucket_template[bucket]
    if amount > Y.parts[template]:
        return _rows_bytes(W, bucket, Y.amount_ptr[template] + amount - Y.parts[template] - 1)
    if amount > 0:
        return S.owned[S.owned_ptr[bucket] + amount - 1]
    return S.t_bytes[bucket]


@compiled
def _rows_bytes(W, bucket, k):  # type: ignore[no-untyped-def]
    """Bytes of a message; or of an amount of rows: of all that there are, or if the parameter is sparse of those that are looked up."""
    D, S, Y = W.shards, W.scratch, W.templates
    if Y.of[k] == _MESSAGE:
        return S.owned[S.owned_ptr[bucket] + MESSAGES + Y.part[k]]
    parameter, shard, who = S.t_res[bucket], S.bucket_shard[bucket], Y.who[k]
    readers = Y.readers[S.bucket_template[bucket]]
    count = W.groups.sets.ptr[readers + 1] - W.groups.sets.ptr[readers]
    touched = S.touched[who] if who < count else S.together[who - count]
    rows = D.rows[shard] if Y.part[k] < 0 else S.p_rows[Y.part[k]]
    rows = rows if touched < 0 else part_of_rows(W.graph, parameter, touched, rows)
    size = rows * D.row_bytes[shard] if Y.of[k] != _INDICES else 0
    return size + (rows * INDEX_BYTES if Y.of[k] != _VALUES else 0)


@compiled
def write_row(W: World, bucket: int, row: int) -> int:
    """Enter the task of a bucket's row that moves something, but for its edges; returns its slot, or -1 if there is nothing to move."""
    K, R, C, S, Y = W.cluster, W.groups, W.state, W.scratch, W.templates
    first, last = Y.item_ptr[row], Y.item_ptr[row + 1]
    if Y.how[row] == _SUM:
        size, group = _amount(W, bucket, Y.amount[row]), Y.item[first]
        if size == 0:
            return -1
        slot, members = new_task(C, _key(W, bucket, row, Y.first[row], 0)), R.sets.ptr[group + 1] - R.sets.ptr[group]
        duration, way = allreduce(R, group, size)
        C.duration[slot], C.resource[slot], C.resource_n[slot] = duration, R.resource[way], R.resource_n[way]
        C.overhead[slot], C.moved[slot] = sum_overhead_ns(K, members, duration), 2 * (R.members[group] - 1) * size
        return slot
    begin_exchange(S)
    if Y.how[row] == _EXCHANGE:
        duration, moved = _rounds(W, bucket, row)
        if duration == 0:
            return -1
    else:
        duration, moved = 0, 0
        sharers = Y.sharers[S.bucket_template[bucket]]
        size = sharers * largest_part(W, bucket)
        for i in range(first, last):
            duration, moved = max(duration, parted_ns(R, S, Y.item[i], size)), moved + (sharers - 1) * size
    return add_exchange(W, _key(W, bucket, row, 0, 0), duration, moved)


@compiled
def _key(W, bucket, row, device, partition):  # type: ignore[no-untyped-def]
    S = W.scratch
    last = max(S.bucket_part[bucket], partition)
    return task_key(SYNC, S.t_res[bucket], W.templates.stage[row], S.bucket_region[bucket], device, last)


@compiled
def _rounds(W, bucket, row):  # type: ignore[no-untyped-def]
    """(duration in ns, bytes) of the rounds of an exchange; zeros if nothing travels."""
    K, S, Y = W.cluster, W.scratch, W.templates
    parameter, shard, devices = S.t_res[bucket], S.bucket_shard[bucket], len(K.device_type)
    stamp, duration, moved, most, last = begin_joining(S), 0, 0, 0, -1
    for i in range(Y.item_ptr[row], Y.item_ptr[row + 1], 4):
        if Y.item[i] != last:
            own_ns, own = round_of_flows(K, S, most)
            stamp, duration, moved, most, last = begin_joining(S), duration + own_ns, moved + own, 0, Y.item[i]
            if last % 2 == 1:
                fill(S.received, 0, len(S.received), 0)
        source, target, served = Y.item[i + 1], Y.item[i + 2], False
        if source < 0:
            source, served = server_at(W, parameter, shard, -1 - source), True
        elif target < 0:
            target, served = server_at(W, parameter, shard, -1 - target), True
        size = _amount(W, bucket, Y.item[i + 3])
        if size > 0 and source != target:
            if served:  # a server may have several partitions
                join_flow(S, stamp, devices, source, target, size)
            else:
                add_flow(S, source, target, size)
            if last % 2 == 1:
                S.received[target] += size
                most = max(most, S.received[target])
    own_ns, own = round_of_flows(K, S, most)
    return duration + own_ns, moved + own


@compiled
def server_at(W: World, parameter: int, shard: int, partition: int) -> int:
    """The device beside which the server of a partition of a shard is."""
    G, K, D, S = W.graph, W.cluster, W.shards, W.scratch
    return K.server[(G.first_server[parameter] + shard - D.ptr[S.geometry[parameter]] + partition) % len(K.server)]


@compiled
def add_rows(W: World, bucket: int) -> None:
    """Add the tasks of a bucket's rows behind the backward pass: each waits for the row before it, or all rows before it that are
    ``apart``; the first ones wait for gradients (``first_task``). The owners' updates wait for the last ones of that phase, or if all
    devices learn the norm of gradients this does, and servers wait for it. What follows the updates waits for them."""
    R, C, S, Y = W.groups, W.state, W.scratch, W.templates
    template, before, waited, source, phase = S.bucket_template[bucket], NO_TASK, 0, _GRADIENTS, _AFTER_BACKWARD
    row, last = phase_row(Y, template, _AFTER_BACKWARD), Y.row_ptr[template + 1]
    S.first_count[bucket] = 0
    while row < last:
        if Y.phase[row] > phase == _AFTER_BACKWARD:
            _end_backward(W, bucket, before, waited)
            if Y.partitions[template] == 0:
                source = _UPDATES
            elif S.count[NORM] != NO_TASK:
                before, waited, source = S.count[NORM], 1, _TASKS
        phase, first, end = Y.phase[row], C.used[SLOTS], row + 1
        while Y.apart[row] and end < last and Y.phase[end] == phase and Y.apart[end]:
            end += 1
        for own in range(row, end):
            _add_tasks(W, bucket, own, first)
        count = C.used[SLOTS] - first
        for slot in range(first, first + count):
            for own in range(before, before + waited if source == _TASKS else before):
                add_edge(S, C.index[own], slot)
            if source == _UPDATES:
                _follow_updates(W, bucket, slot)
            if Y.how[row] == _WORK and (Y.work[row] > 0 or W.shards.clips[0]):
                add_edge(S, settled(C, S, C.resource[slot]), slot)
            if Y.large[row]:
                cut_sum(R, C, S, slot)
        if count > 0:
            if source == _GRADIENTS:
                S.first_task[bucket], S.first_count[bucket] = first, count
            before, waited, source = first, count, _TASKS
        row = end
    if phase == _AFTER_BACKWARD:
        _end_backward(W, bucket, before, waited)


@compiled
def _add_tasks(W, bucket, row, first):  # type: ignore[no-untyped-def]
    """Enter the tasks of a row, and note it in ``work``, from slot ``first`` on. Copies are summed when gradients are complete."""
    K, C, S, Y = W.cluster, W.state, W.scratch, W.templates
    begin = C.used[SLOTS]
    if Y.how[row] == _SUM and 0 <= S.bucket_part[bucket] < W.order.count[0] - 1:
        return
    if Y.how[row] == _WORK:
        for i in range(Y.item_ptr[row], Y.item_ptr[row + 1]):
            slot, device = new_task(C, _key(W, bucket, row, Y.item[i], 0)), Y.item[i]
            C.duration[slot] = S.owned[S.owned_ptr[bucket] + OF_TYPES + TYPE_COLUMNS * K.device_type[device] + Y.work[row]]
            C.resource[slot], C.resource_n[slot] = device, 1
    elif Y.how[row] == _SERVE:
        _serve(W, bucket, row)
    else:
        write_row(W, bucket, row)
    if C.used[SLOTS] - first > len(S.work):
        raise MemoryError(FULL)
    fill(S.work, begin - first, C.used[SLOTS] - first, row)


@compiled
def _serve(W, bucket, row):  # type: ignore[no-untyped-def]
    """Enter the updates of a region's partitions by their servers, whose host's cores take them in turn."""
    K, D, C, S = W.cluster, W.shards, W.state, W.scratch
    parameter, shard = S.t_res[bucket], S.bucket_shard[bucket]
    for part in range(min(W.templates.partitions[S.bucket_template[bucket]], D.rows[shard])):
        slot, server = new_task(C, _key(W, bucket, row, 0, part)), server_at(W, parameter, shard, part)
        bandwidth, row_seconds = K.core_bandwidth[server], K.row_seconds[server]
        C.duration[slot] = owner_ns(W, parameter, shard, S.p_rows[part], K.core_host[server], bandwidth, row_seconds)
        C.resource[slot], C.resource_n[slot] = server, 1
        if not K.serves_itself[server]:
            at = C.used[ARENA]
            if at + 1 > len(C.arena):
                raise MemoryError(STATE_FULL)
            C.arena[at] = K.core[server] + S.taken[K.host_device[server]] % K.cores[server]
            C.resource[slot], C.used[ARENA] = -1 - at, at + 1
            S.taken[K.host_device[server]] += 1


@compiled
def _end_backward(W, bucket, before, waited):  # type: ignore[no-untyped-def]
    """Let what follows the gradients wait for the last ``waited`` tasks from ``before`` on: the norm, or the updates of those that own
    some. Servers wait for themselves."""
    R, C, S, Y = W.groups, W.state, W.scratch, W.templates
    for k in range(waited):
        task, row = C.index[before + k], S.work[k]
        group = Y.item[Y.item_ptr[row]] if Y.apart[row] else S.t_res_n[bucket]
        if S.count[NORM] != NO_TASK:
            add_edge(S, task, S.count[NORM])
        elif Y.how[row] == _WORK:
            add_edge(S, task, C.resource[before + k])
        elif Y.partitions[S.bucket_template[bucket]] == 0:
            for i in range(R.sets.ptr[group + 1] - R.sets.ptr[group]):
                if Y.apart[row] or owns(W, bucket, i):
                    add_edge(S, task, R.sets.item[R.sets.ptr[group] + i])


@compiled
def _follow_updates(W, bucket, slot):  # type: ignore[no-untyped-def]
    """Let a task wait for the updates of a bucket's owners, or the copies back of those that hosts make."""
    R, S = W.groups, W.scratch
    group, away = S.t_res_n[bucket], W.templates.offloads[S.bucket_template[bucket]]
    for i in range(R.sets.ptr[group + 1] - R.sets.ptr[group]):
        if owns(W, bucket, i):
            device = R.sets.item[R.sets.ptr[group] + i]
            add_edge(S, S.lifting[device] if away else device, slot)


@compiled
def settled(C, S, device):  # type: ignore[no-untyped-def]
    """The task that says that no backward pass is left on a device: made when first asked for. ``settled``: by device, or ``NO_TASK``."""
    if S.settled[device] == NO_TASK:
        slot = S.settled[device] = new_task(C, task_key(UPDATE, device, 1, 0, 0, 0))
        C.duration[slot], C.resource[slot] = 1, device
    return S.settled[device]


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
