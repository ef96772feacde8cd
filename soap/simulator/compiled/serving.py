"""Pulls, pushes and updates of what parameter servers keep, and gathered rows (compiled). The counterpart of ``synchronizing``.

Rows of sparse parameters are asked for, and pulled, before the forward pass: these tasks (``make_pulls``) are made anew where the operators
that look them up change. All others stand together behind the sums of gradients, each region's push, updates and pull one after the other.
"""

from __future__ import annotations

from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.communication import (
    MISSING,
    REDUCE_TRAFFIC,
    begin_joining,
    begin_links,
    exchange_overhead_ns,
    find_list,
    forget_sizes,
    hold_ends,
    join_flow,
    nanoseconds,
    round_ns,
    seek_list,
    total_flow,
)
from soap.simulator.compiled.fragment import CROWDED, FORWARD, SYNC, set_key, task_key
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.keepers import add_sync_edge, find_geometry, find_keepers, is_served
from soap.simulator.compiled.rows import INDEX_BYTES, is_sparse
from soap.simulator.compiled.scratch import FLOWS, PRICES, RESOURCES, TASKS, USES, Scratch
from soap.simulator.compiled.state import ARENA, LOW_BITS, OTHER, PULLS, SLOTS, SYNC_BUCKET, Groups, ShardTables, State
from soap.simulator.compiled.sync_codes import GATHERED, goes_by_rows, has_server, is_local
from soap.simulator.compiled.tables import ClusterTables, GraphTables
from soap.simulator.compiled.traffic import added_bytes, added_rows, gather_ns, prepare, pull_ns, push_ns, updated_bytes
from soap.simulator.compiled.variants import VariantTables

SUM, PUSH, SERVE, PULL = range(4)
"""Stages of a task's id, as in ``synchronizing``."""


@compiled
def serve(
    G: GraphTables, V: VariantTables, K: ClusterTables, R: Groups, D: ShardTables, C: State, S: Scratch, slot0: int
) -> None:
    """Add the tasks of all regions on servers, and of all gathered shards, behind the ``count[TASKS]`` that stand from ``slot0`` on, in the
    order of the parameters, whose geometries are known."""
    fill(S.taken, 0, len(S.taken), 0)
    for parameter in range(len(G.parameter_dtype)):
        if C.sync[parameter] == 0 or not _is_trained(G, parameter):
            continue
        geometry = S.geometry[parameter]
        for shard in range(D.ptr[geometry], D.ptr[geometry + 1]):
            if D.lowest[shard] < 0:
                continue
            find_keepers(G, V, D, C, S, parameter, shard)
            if is_served(G, C, S, parameter):
                _serve_shard(G, K, D, C, S, parameter, shard, shard - D.ptr[geometry], slot0)
            elif C.sync[parameter] == GATHERED and S.members[0] > 1:
                _gather(G, K, R, D, C, S, parameter, shard, shard - D.ptr[geometry], slot0 + S.count[TASKS])
                S.count[TASKS] += 1


@compiled
def _is_trained(G, parameter):  # type: ignore[no-untyped-def]
    first = G.user_ptr[parameter]
    return first < G.user_ptr[parameter + 1] and G.user_place[first] >= 0


@compiled
def _gather(G, K, R, D, C, S, parameter, shard, number, slot):  # type: ignore[no-untyped-def]
    """The task of giving each other rows, which the keepers' updates wait for."""
    group = find_list(R.sets, S.members[1 : 1 + S.members[0]])
    _begin_exchange(S)
    duration, moved = gather_ns(G, K, D, S, parameter, shard)
    _exchange(K, C, S, slot, task_key(SYNC, parameter, SUM, number, 0, 0), duration, moved)
    C.kind[slot], C.owner[slot], C.index[slot], C.waits[slot] = SYNC_BUCKET, -1, group, 0
    _after_tiles(C, S, slot, slot + 1)


@compiled
def _serve_shard(G, K, D, C, S, parameter, shard, number, slot0):  # type: ignore[no-untyped-def]
    """The tasks of one region: its push, the updates of its partitions, and the pull of a dense parameter."""
    count, sparse = prepare(G, K, D, S, parameter, shard, number, C.sync[parameter]), is_sparse(G, parameter)
    first = slot0 + S.count[TASKS]
    base = C.used[ARENA]  # rows of the push, the updates and the pull; the updates, the pull, the updates' cores
    updates, pulls, cores = base + 6, base + 6 + count, base + 7 + count
    if first + count + 3 > len(C.key) or cores + count > len(C.arena):
        raise MemoryError(CROWDED)
    C.used[ARENA] = cores + count
    _begin_exchange(S)
    duration, moved = push_ns(G, K, D, S, parameter, shard, count)
    pushes = 1 if duration > 0 else 0
    if pushes:
        _exchange(K, C, S, first, task_key(SYNC, parameter, PUSH, number, 0, 0), duration, moved)
        C.kind[first], C.owner[first], C.index[first], C.waits[first] = OTHER, -1, base, 0
    served = first + pushes
    for part in range(count):
        slot, server = served + part, S.p_server[part]
        C.arena[updates + part] = slot
        set_key(C, slot, task_key(SYNC, parameter, SERVE, number, 0, part))
        C.latency[slot], C.overhead[slot] = 0, 0
        C.duration[slot] = _serve_ns(G, K, D, S, parameter, shard, part)
        C.resource[slot], C.resource_n[slot] = server, 1
        if not K.serves_itself[server]:
            C.arena[cores + part] = K.core[server] + S.taken[K.host_device[server]] % K.cores[server]
            S.taken[K.host_device[server]] += 1
            C.resource[slot] = -1 - (cores + part)
        C.waits[slot], C.index[slot], C.moved[slot] = pushes, base + 2, 0
        C.alive[slot], C.kind[slot], C.owner[slot] = 1, OTHER, -1
    end, pull = served + count, 0
    if not sparse:
        _begin_exchange(S)
        duration, moved = pull_ns(G, K, D, S, parameter, shard, count)
        if duration > 0:
            _exchange(K, C, S, end, task_key(SYNC, parameter, PULL, number, 0, 0), duration, moved)
            C.kind[end], C.owner[end], C.index[end], C.waits[end] = OTHER, -1, base + 4, count
            C.arena[pulls] = end
            pull = 1
    C.arena[base], C.arena[base + 1] = updates, pulls
    C.arena[base + 2], C.arena[base + 3] = pulls, pulls + pull
    C.arena[base + 4], C.arena[base + 5] = cores, cores
    S.count[TASKS] += pushes + count + pull
    _after_tiles(C, S, first, first + 1 if pushes else end)


@compiled
def _after_tiles(C, S, first, last):  # type: ignore[no-untyped-def]
    """What waits for the backward passes of the shard's uses."""
    for i in range(S.count[USES]):
        if C.alive[S.use_slot[i]]:
            for slot in range(first, last):
                add_sync_edge(S, S.use_slot[i], slot)


@compiled
def _begin_exchange(S):  # type: ignore[no-untyped-def]
    begin_links(S)
    S.count[RESOURCES] = 0


@compiled
def _exchange(K, C, S, slot, key, duration, moved):  # type: ignore[no-untyped-def]
    """A collective, whose links are ``res``."""
    at, count = C.used[ARENA], S.count[RESOURCES]
    if at + count > len(C.arena) or slot + 1 > len(C.key):
        raise MemoryError(CROWDED)
    for i in range(count):
        C.arena[at + i] = S.res[i]
    C.used[ARENA] = at + count
    set_key(C, slot, key)
    C.duration[slot], C.latency[slot], C.moved[slot], C.alive[slot] = duration, 0, moved, 1
    C.resource[slot], C.resource_n[slot], C.overhead[slot] = -1 - at, count, exchange_overhead_ns(K, S, duration)


@compiled
def _serve_ns(G, K, D, S, parameter, shard, part):  # type: ignore[no-untyped-def]
    """``servers.serve_ns``."""
    server = S.p_server[part]
    changed, host = updated_bytes(G, D, S, parameter, shard, part), K.core_host[server]
    if is_sparse(G, parameter):
        update = table_price_ns(K, D, S, host, changed, S.p_rows[part] * D.row_bytes[shard])
    else:
        update = price_ns(D, S, host, changed)
    added = added_bytes(G, D, S, parameter, shard, part)
    rows = added_rows(G, D, S, parameter, part)
    return adding_ns(added, rows, K.core_bandwidth[server], K.row_seconds[server]) + update


@compiled
def adding_ns(added: int, rows: int, bandwidth: float, row_seconds: float) -> int:
    """``servers.adding_ns``."""
    return nanoseconds(added * REDUCE_TRAFFIC / bandwidth + rows * row_seconds) if added > 0 else 0


@compiled
def table_price_ns(K: ClusterTables, D: ShardTables, S: Scratch, owner: int, rows_bytes: int, table_bytes: int) -> int:
    """``costs.table_update_ns``."""
    of_rows = owner + K.hosts[0] + D.update_ns.shape[0]
    return price_ns(D, S, of_rows, rows_bytes if D.rows_alone[0] else table_bytes)


@compiled
def price_ns(D: ShardTables, S: Scratch, owner: int, size: int) -> int:
    """What updating so many bytes takes; ``owner``: as in ``ShardTables.price``. If that is not known yet, 0, and ``count[PRICES]`` grows:
    ``ask_prices`` is to be called."""
    missing = S.count[PRICES]
    if missing + 4 > len(D.price.missing):
        return 0
    entry = D.price.missing[1 + missing : 4 + missing]  # where it is to stand if it is missing
    entry[0], entry[1], entry[2] = owner, size >> LOW_BITS, size & ((1 << LOW_BITS) - 1)
    found = seek_list(D.price, entry)
    if found >= 0:
        return D.price_ns[found]
    S.count[PRICES] = missing + 3
    return 0


@compiled
def ask_prices(D: ShardTables, S: Scratch) -> None:
    """LookupError if prices were not known; all of them are then in ``price.missing``."""
    if S.count[PRICES] > 0:
        D.price.missing[0] = S.count[PRICES]
        S.count[PRICES] = 0
        raise LookupError(MISSING)


@compiled
def make_pulls(G: GraphTables, V: VariantTables, K: ClusterTables, D: ShardTables, C: State, S: Scratch) -> None:
    """Make the tasks anew that bring rows of sparse parameters, and the one before them that asks for rows. What waits for them is not
    counted: ``count_pulls``."""
    C.pull_slot[0], C.used[PULLS] = C.used[SLOTS], 0
    for parameter in range(len(G.parameter_dtype)):
        if not _is_asked_for(G, C, parameter):
            continue
        find_geometry(G, V, D, C, S, parameter)
        geometry = S.geometry[parameter]
        for shard in range(D.ptr[geometry], D.ptr[geometry + 1]):
            if has_server(C.sync[parameter]) and D.lowest[shard] >= 0:
                find_keepers(G, V, D, C, S, parameter, shard)
                _pull(G, K, D, C, S, parameter, shard, shard - D.ptr[geometry])
    _ask(G, V, K, D, C, S)


@compiled
def _is_asked_for(G, C, parameter):  # type: ignore[no-untyped-def]
    """Whether devices tell others which rows of a parameter they look up."""
    return goes_by_rows(C.sync[parameter]) and is_sparse(G, parameter) and _is_trained(G, parameter)


@compiled
def _ask(G, V, K, D, C, S):  # type: ignore[no-untyped-def]
    """The task of ``serving.asking``, behind the pulls, which wait for it."""
    _begin_exchange(S)
    duration = moved = 0
    for within in (True, False):  # those who speak for them, then those who keep rows
        stamp = begin_joining(S)
        for parameter in range(len(G.parameter_dtype)):
            code = C.sync[parameter]
            if not _is_asked_for(G, C, parameter) or (within and not (has_server(code) and is_local(code))):
                continue
            geometry = S.geometry[parameter]
            for shard in range(D.ptr[geometry], D.ptr[geometry + 1]):
                if D.lowest[shard] >= 0:
                    find_keepers(G, V, D, C, S, parameter, shard)
                    _join_asked(G, K, D, C, S, parameter, shard, shard - D.ptr[geometry], stamp, within)
        if S.count[FLOWS] > 0:
            counted_ns, counted = round_ns(K, S, 0), total_flow(S)
            hold_ends(S)
            forget_sizes(S)
            duration, moved = duration + counted_ns + round_ns(K, S, 0), moved + counted
    if duration == 0:
        return
    pulls = C.used[PULLS]
    row = _new_row(C, pulls)
    for i in range(pulls):
        C.arena[row + 2 + i] = C.pull_slot[0] + i
    slot = _add_before(K, C, S, task_key(FORWARD, 0, 0, 0, 0, 0), duration, moved, -1, row)
    C.overhead[slot] = 0


@compiled
def _join_asked(G, K, D, C, S, parameter, shard, number, stamp, within):  # type: ignore[no-untyped-def]
    """Who tells whom, for one shard. ``within``: those for whom others speak."""
    devices, code = len(K.device_type), C.sync[parameter]
    if not has_server(code):
        for i in range(S.members[0]):
            for j in range(S.members[0]):
                if j != i:
                    join_flow(S, stamp, devices, S.members[1 + i], S.members[1 + j], INDEX_BYTES)
        return
    count = prepare(G, K, D, S, parameter, shard, number, code)
    for i in range(S.members[0]):
        device = S.members[1 + i]
        if within and S.leader[i] != i:
            join_flow(S, stamp, devices, device, S.members[1 + S.leader[i]], INDEX_BYTES)
        elif not within and S.leader[i] == i:
            for part in range(count):
                if S.p_server[part] != device:
                    join_flow(S, stamp, devices, device, S.p_server[part], INDEX_BYTES)


@compiled
def _pull(G, K, D, C, S, parameter, shard, number):  # type: ignore[no-untyped-def]
    count = prepare(G, K, D, S, parameter, shard, number, C.sync[parameter])
    _begin_exchange(S)
    duration, moved = pull_ns(G, K, D, S, parameter, shard, count)
    if duration == 0:
        return
    row = _new_row(C, S.count[USES])
    for i in range(S.count[USES]):  # forward passes stand before backward passes
        C.arena[row + 2 + i] = S.use_slot[i] - C.tiles[C.owner[S.use_slot[i]]]
    _add_before(K, C, S, task_key(SYNC, parameter, PULL, number, 0, 0), duration, moved, C.owner[S.use_slot[0]], row)


@compiled
def _new_row(C, count):  # type: ignore[no-untyped-def]
    """A row of the arena for so many slots that wait for a task; they are to be written behind its two pointers."""
    row = C.used[ARENA]
    if row + 2 + count > len(C.arena):
        raise MemoryError(CROWDED)
    C.arena[row], C.arena[row + 1] = row + 2, row + 2 + count
    C.used[ARENA] = row + 2 + count
    return row


@compiled
def _add_before(K, C, S, key, duration, moved, owner, row):  # type: ignore[no-untyped-def]
    """A task before the forward pass; its slot."""
    slot = C.used[SLOTS]
    _exchange(K, C, S, slot, key, duration, moved)
    C.kind[slot], C.owner[slot], C.index[slot], C.waits[slot] = OTHER, owner, row, 0
    C.used[SLOTS] = slot + 1
    C.used[PULLS] += 1
    return slot


@compiled
def count_pulls(C: State, sign: int) -> None:
    """Add (1) or take away (-1) what waits for pulled rows."""
    for slot in range(C.pull_slot[0], C.pull_slot[0] + C.used[PULLS]):
        row = C.index[slot]
        for i in range(C.arena[row], C.arena[row + 1]):
            C.waits[C.arena[i]] += sign
