"""Plays templates of synchronizations (compiled): buckets of regions, and the tasks that the rows of a bucket's template become.

A template says which devices move which amounts (``plan.syncs.seam.Template``); here these get their bytes and prices. The counterpart of
``seam.steps_of`` and of ``communication.synchronizing``. A bucket's ``t_bytes`` are all its gradients; what each of its template's parts
has of it is in ``owned``, from ``owned_ptr[bucket]`` on. Of a compressed bucket, ``owned`` are the sums of its shards' columns in
``effort``; these are ``packed_first[bucket]``, then ``packed_next`` of each, to ``packed_last``: ``packed_parameter``, ``packed_shard``.
"""

from __future__ import annotations

from soap.plan.syncs.seam import How, Of, Phase
from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.chunks import cut_sum
from soap.simulator.compiled.communication import add_flow, allreduce, begin_joining, find_list, join_flow, parted_ns, sum_overhead_ns
from soap.simulator.compiled.effort import MESSAGES, OF_TYPES, SETTINGS, TYPE_COLUMNS
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.rows import INDEX_BYTES, part_of_rows
from soap.simulator.compiled.scratch import FULL, PACKED_SHARDS, TASKS
from soap.simulator.compiled.state import OTHER, SYNC_BUCKET, ShardTables, SyncTemplates
from soap.simulator.compiled.syncs.exchange import add_exchange, begin_exchange, new_row, round_of_flows
from soap.simulator.compiled.syncs.members import compresses
from soap.simulator.compiled.task_keys import STATE_FULL, SYNC, set_key, task_key
from soap.simulator.compiled.world import World

_SUM, _EXCHANGE, _AFTER_BACKWARD = int(How.SUM), int(How.EXCHANGE), int(Phase.AFTER_BACKWARD)
_VALUES, _INDICES, _MESSAGE = int(Of.VALUES), int(Of.INDICES), int(Of.MESSAGE)


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
def part_bytes(W: World, template: int, parameter: int, shard: int, place: int) -> int:
    """Bytes of a region's part that the readers in this place of their copies own: parts are dealt out like cards (``placement``). In a
    folded plan the largest of the parts for whose owners a reader stands (``represented``)."""
    D, Y = W.shards, W.templates
    count, first = Y.sharers[template], W.graph.first_reader[parameter] + shard - D.ptr[W.scratch.geometry[parameter]]
    rows, longer, at = D.rows[shard] // count, D.rows[shard] % count, Y.first_part[template] + place
    for i in range(Y.place_ptr[at], Y.place_ptr[at + 1] if longer > 0 else Y.place_ptr[at]):
        if (Y.place[i] - first) % count < longer:
            return (rows + 1) * D.row_bytes[shard]
    return rows * D.row_bytes[shard]


@compiled
def own_bytes(W: World, template: int, parameter: int, shard: int, i: int) -> int:
    """Bytes of a region that reader ``i`` owns."""
    Y = W.templates
    if Y.parts[template] == 0:
        return W.shards.bytes[shard]
    return part_bytes(W, template, parameter, shard, Y.inside[Y.inside_ptr[template] + i])


@compiled
def put_into_bucket(W: World, template: int, parameter: int, shard: int, opened: int) -> int:
    """Put a shard into the open bucket of its template and dtype, frozen ones apart; returns the bucket. ``opened``: a stamp."""
    G, D, S, Y = W.graph, W.shards, W.scratch, W.templates
    place = (template * G.dtypes[0] + G.parameter_dtype[parameter]) * 2 + G.trainable[parameter]
    if place >= len(S.bucket_stamp):
        raise MemoryError(FULL)
    if S.bucket_stamp[place] != opened:
        S.bucket_stamp[place], S.bucket_of[place], S.bucket_limit[place] = opened, -1, Y.limits[2 * template]
    is_packed = compresses(W, W.state.sync[parameter])
    bucket, parts = S.bucket_of[place], effort_columns(D) if is_packed else Y.parts[template]
    if bucket < 0:
        bucket = S.count[TASKS]
        first = S.owned_ptr[bucket]
        if bucket + 2 > len(S.t_key) or first + parts > len(S.owned):
            raise MemoryError(FULL)
        S.bucket_template[bucket], S.t_bytes[bucket] = template, 0
        S.t_res_n[bucket], S.t_res[bucket] = Y.readers[template], parameter
        S.bucket_region[bucket] = shard - D.ptr[S.geometry[parameter]]
        fill(S.owned, first, first + parts, 0)
        S.owned_ptr[bucket + 1], S.packed_first[bucket] = first + parts, -1
        S.count[TASKS] = bucket + 1
        S.bucket_of[place] = bucket
    S.t_bytes[bucket] += D.bytes[shard]
    if is_packed:
        _pack(W, bucket, parameter, shard)
    for part in range(0 if is_packed else parts):
        S.owned[S.owned_ptr[bucket] + part] += part_bytes(W, template, parameter, shard, part)
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
def bucket_bytes(W: World, bucket: int) -> int:
    """Bytes of a reader's buffer of all gradients, or of all values that it gathers, with padding if its parts are even."""
    S, Y = W.scratch, W.templates
    template = S.bucket_template[bucket]
    return Y.sharers[template] * largest_part(W, bucket) if Y.even[template] else S.t_bytes[bucket]


@compiled
def put_alone(W: World, bucket: int, template: int, parameter: int, shard: int) -> None:
    """Make a bucket of one shard, for ``write_row``. Call ``prepare`` before that if its amounts are those of rows."""
    D, S, Y = W.shards, W.scratch, W.templates
    if bucket + 1 > len(S.t_key):
        raise MemoryError(FULL)
    S.bucket_template[bucket], S.t_bytes[bucket], S.bucket_shard[bucket] = template, D.bytes[shard], shard
    S.t_res_n[bucket], S.t_res[bucket] = Y.readers[template], parameter
    S.bucket_region[bucket] = shard - D.ptr[S.geometry[parameter]]


@compiled
def _amount(W, bucket, amount):  # type: ignore[no-untyped-def]
    """Bytes of an amount, as they travel."""
    S, Y = W.scratch, W.templates
    template = S.bucket_template[bucket]
    if amount > Y.parts[template]:
        return _rows_bytes(W, bucket, Y.amount_ptr[template] + amount - Y.parts[template] - 1)
    if amount > 0:
        return S.owned[S.owned_ptr[bucket] + amount - 1]
    bits, size = Y.wire_bits[template], S.t_bytes[bucket]
    return size if bits == 0 else (size // W.graph.parameter_itemsize[S.t_res[bucket]] * bits + 7) // 8


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
def write_row(W: World, bucket: int, row: int, slot: int) -> bool:
    """Write the task of a bucket's row into a slot, but for what waits for it, and whether it takes place."""
    K, R, C, S, Y = W.cluster, W.groups, W.state, W.scratch, W.templates
    first, last = Y.item_ptr[row], Y.item_ptr[row + 1]
    key = task_key(SYNC, S.t_res[bucket], Y.stage[row], S.bucket_region[bucket], Y.first[row], 0)
    if Y.how[row] == _SUM:
        size, group = _amount(W, bucket, Y.amount[row]), Y.item[first]
        if size == 0:
            return False
        if slot + 1 > len(C.key):
            raise MemoryError(STATE_FULL)
        members = R.sets.ptr[group + 1] - R.sets.ptr[group]
        duration, way = allreduce(R, group, size)
        set_key(C, slot, key)
        C.duration[slot], C.resource[slot], C.resource_n[slot] = duration, R.resource[way], R.resource_n[way]
        C.latency[slot], C.overhead[slot], C.moved[slot] = 0, sum_overhead_ns(K, members, duration), 2 * (R.members[group] - 1) * size
        return True
    begin_exchange(S)
    if Y.how[row] == _EXCHANGE:
        duration, moved = _rounds(W, bucket, row)
        if duration == 0:
            return False
    else:
        duration, moved = 0, 0
        sharers = Y.sharers[S.bucket_template[bucket]]
        size = sharers * largest_part(W, bucket)
        for i in range(first, last):
            duration, moved = max(duration, parted_ns(R, S, Y.item[i], size)), moved + (sharers - 1) * size
    add_exchange(W, slot, key, duration, moved)
    return True


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
def add_rows(W: World, bucket: int, phase: int, slot: int, slot0: int) -> None:
    """Add the tasks of a bucket's rows of a phase: the first one in ``slot``, the others behind the ``count[TASKS]`` tasks from ``slot0``
    on. Behind the backward pass the owners' updates wait for the last ones."""
    R, C, S, Y = W.groups, W.state, W.scratch, W.templates
    last = Y.row_ptr[S.bucket_template[bucket] + 1]
    row, before, waited, large = phase_row(Y, S.bucket_template[bucket], phase), slot, 0, False
    while 0 <= row < last and Y.phase[row] == phase:
        end = row + 1
        while Y.apart[row] and end < last and Y.phase[end] == phase and Y.apart[end]:
            end += 1
        first, count = slot if waited == 0 else slot0 + S.count[TASKS], 0
        for own in range(row, end):
            if write_row(W, bucket, own, first + count):
                C.waits[first + count], C.alive[first + count], C.owner[first + count] = waited, 1, -1
                if phase == _AFTER_BACKWARD:
                    C.kind[first + count] = SYNC_BUCKET
                    C.index[first + count] = Y.item[Y.item_ptr[own]] if Y.apart[own] else _owners(W, bucket)
                else:
                    C.kind[first + count], C.index[first + count] = OTHER, new_row(C, 0)
                count += 1
        if count > 0:
            if waited > 0:
                S.count[TASKS] += count
                _follow(C, before, waited, first, count)
                _cut_large(R, C, S, before, waited if large else 0, slot0)
            before, waited, large = first, count, Y.large[row] == 1
        row = end
    _cut_large(R, C, S, before, waited if large else 0, slot0)


@compiled
def _cut_large(R, C, S, first, count, slot0):  # type: ignore[no-untyped-def]
    for slot in range(first, first + count):
        cut_sum(R, C, S, slot, slot0)


@compiled
def _follow(C, before, waited, first, count):  # type: ignore[no-untyped-def]
    """Let ``count`` tasks from ``first`` on wait for the ``waited`` ones from ``before`` on."""
    behind = new_row(C, count)
    for k in range(count):
        C.arena[behind + 2 + k] = first + k
    for slot in range(before, before + waited):
        C.kind[slot], C.index[slot] = OTHER, behind


@compiled
def _owners(W, bucket):  # type: ignore[no-untyped-def]
    """The set of a bucket's readers that own some of it."""
    R, S = W.groups, W.scratch
    group, count = S.t_res_n[bucket], 0
    first, readers = R.sets.ptr[group], R.sets.ptr[group + 1] - R.sets.ptr[group]
    for i in range(readers):
        if owns(W, bucket, i):
            count += 1
            S.members[count] = R.sets.item[first + i]
    return group if count == readers else find_list(R.sets, S.members[1 : 1 + count])


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
def _pack(W, bucket, parameter, shard):  # type: ignore[no-untyped-def]
    """Add a shard to a bucket. Call it after ``compresses``."""
    D, S = W.shards, W.scratch
    at, entry, first = find_effort(W, parameter, shard), S.count[PACKED_SHARDS], S.owned_ptr[bucket]
    if entry + 1 > len(S.packed_next):
        raise MemoryError(FULL)
    S.packed_parameter[entry], S.packed_shard[entry], S.packed_next[entry] = parameter, shard, -1
    S.count[PACKED_SHARDS] = entry + 1
    if S.packed_first[bucket] < 0:
        S.packed_first[bucket] = entry
    else:
        S.packed_next[S.packed_last[bucket]] = entry
    S.packed_last[bucket] = entry
    for column in range(effort_columns(D)):
        S.owned[first + column] += D.effort[at + column]
