"""Lowers the synchronization of parameters after the backward pass, and the devices' updates (compiled).

The counterpart of ``plan.syncs.bucketing`` and ``communication.synchronizing``. In ``State`` the buckets' sums and scatters come first,
then the tasks of other methods, which the methods' own files in ``syncs`` add.
"""

from __future__ import annotations

from soap.simulator.communication.offloading import OFFLOADING_NS
from soap.simulator.compiled.chunks import cut_sums
from soap.simulator.compiled.graph_arrays import GraphTables
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.marks import runs_again
from soap.simulator.compiled.scratch import EDGES, EXPECTED, PACKED, PACKED_SHARDS, PRICES, STAMP, TASKS
from soap.simulator.compiled.second_runs import weights_slot
from soap.simulator.compiled.state import (
    ARENA,
    NEVER,
    SLOTS,
    SYNC_BUCKET,
    SYNC_DEVICE,
    SYNC_NORM,
    SYNCS,
    UPDATE_DEVICE,
    Groups,
    State,
)
from soap.simulator.compiled.syncs.all_reduce import finish_bucket, join_bucket
from soap.simulator.compiled.syncs.clipping import begin_norm, finish_norm
from soap.simulator.compiled.syncs.codes import gathers_rows, is_compressed, is_in_buckets, offloads
from soap.simulator.compiled.syncs.compressed import add_compressed
from soap.simulator.compiled.syncs.dispatch import add_owners_tasks, owned_by_servers
from soap.simulator.compiled.syncs.even_parts import is_even
from soap.simulator.compiled.syncs.members import (
    compresses,
    find_geometries,
    find_geometry,
    find_members,
    first_user_with_gradient,
)
from soap.simulator.compiled.syncs.offloading import offload
from soap.simulator.compiled.syncs.packing import pack
from soap.simulator.compiled.syncs.pricing import adding_ns, ask_prices, table_price_ns
from soap.simulator.compiled.syncs.sharded_state import (
    finish_scatter,
    gather_values,
    is_scattered,
    owned_by_readers,
    part_adding_ns,
    part_bytes,
    part_ns,
    part_of_place,
    sharers,
)
from soap.simulator.compiled.syncs.sparse_all_gather import gathered_bytes, gathered_rows
from soap.simulator.compiled.task_keys import STATE_FULL, UPDATE, set_key, task_key
from soap.simulator.compiled.world import World


@compiled
def begin_updates(C: State) -> None:
    """Set up the devices' updates in the first slots."""
    devices = len(C.busy)
    for device in range(devices):
        set_key(C, device, task_key(UPDATE, device, 0, 0, 0, 0))
        C.duration[device], C.resource[device], C.resource_n[device] = 0, device, 1
        C.waits[device], C.alive[device], C.kind[device], C.owner[device], C.index[device] = NEVER, 0, UPDATE_DEVICE, -1, device
    C.used[SLOTS] = devices
    C.used[SYNCS] = 0
    C.sync_slot[0] = devices


@compiled
def count_backward(G: GraphTables, C: State, op: int, sign: int) -> None:
    """Count (1) or stop counting (-1) an operator's tiles: their time on their devices, and what these devices' updates wait for."""
    count = C.tiles[op]
    for tile in range(count):
        device, slot = C.dev[C.dev_ptr[op] + tile], C.tile_slot[op] + tile
        C.busy[device] += sign * C.duration[slot]
        if C.alive[slot + count]:
            own = backward_ns(C, op, tile)
            C.busy[device] += sign * own
            if not is_certain(G, C, op):
                C.doubtful[device] += sign * own
            C.waits[device] += sign


@compiled
def backward_ns(C: State, op: int, tile: int) -> int:
    """How long a tile of an operator computes behind the forward pass, if it has a backward pass."""
    count = C.tiles[op]
    slot = C.tile_slot[op] + tile
    own = C.duration[slot + count] + (C.duration[slot + 3 * count] if runs_again(C.marked[op]) else 0)
    return own + (C.duration[weights_slot(C, op) + tile] if C.divided[op] else 0)


@compiled
def is_certain(G: GraphTables, C: State, op: int) -> bool:
    """Whether all tiles of an operator have a backward pass, however others are configured."""
    return G.solid[op] == 1 and C.replicas[op] == 1


@compiled
def count_sums(R: Groups, C: State, sign: int) -> None:
    """Count (1) or stop counting (-1) the sums of gradients in what the devices' updates wait for."""
    for slot in range(C.sync_slot[0], C.sync_slot[0] + C.used[SYNCS]):
        if C.kind[slot] == SYNC_BUCKET:  # a sum or a sparse all-gather: no update waits for parameter servers
            for i in range(R.sets.ptr[C.index[slot]], R.sets.ptr[C.index[slot] + 1]):
                C.waits[R.sets.item[i]] += sign
        elif C.kind[slot] == SYNC_DEVICE:
            C.waits[C.index[slot]] += sign
        elif C.kind[slot] == SYNC_NORM:
            for device in range(len(C.busy)):
                C.waits[device] += sign


@compiled
def synchronize(W: World) -> None:
    """Make all sums of gradients and updates anew."""
    G, R, D, C, S = W.graph, W.groups, W.shards, W.state, W.scratch
    devices = len(C.busy)
    slot0 = C.used[SLOTS]
    S.count[EDGES] = S.count[TASKS] = S.count[PRICES] = S.count[PACKED] = S.count[PACKED_SHARDS] = 0
    S.count[STAMP] += 1
    opened = S.count[STAMP]
    for device in range(devices):
        S.update[device] = S.offloaded[device] = S.on_host[device] = 0
    find_geometries(W)
    for op in range(len(G.backward) - 1, -1, -1):
        for k in range(G.parameter_ptr[op + 1] - G.parameter_ptr[op]):
            parameter = G.parameter[G.parameter_ptr[op] + k]
            geometry = S.geometry[parameter]
            first_lowest = first_user_with_gradient(D, geometry)
            if first_lowest < 0:
                continue
            first_user = G.user_ptr[parameter]
            for shard in range(D.ptr[geometry], D.ptr[geometry + 1]):
                lowest = D.lowest[shard]
                if lowest < 0:  # an idle shard has an update, which is counted with the parameter's first shard
                    if G.user[first_user + first_lowest] == op:
                        find_members(W, parameter, shard)
                        _add_update(W, parameter, shard)
                elif G.user[first_user + lowest] == op:
                    _synchronize_shard(W, parameter, shard, opened, slot0)
    buckets = S.count[TASKS]
    for bucket in range(buckets):
        if is_scattered(W, bucket):
            finish_scatter(W, bucket, slot0 + bucket, slot0)
        else:
            finish_bucket(W, bucket, slot0 + bucket)
    gather_values(W, buckets, slot0)
    begin_norm(W, slot0)
    add_owners_tasks(W, slot0)
    cut_sums(R, C, S, slot0, buckets)  # what follows is not cut
    finish_norm(W, slot0)
    add_compressed(W, slot0, buckets)
    ask_prices(D, S)
    _install(W, slot0)
    for device in range(devices):
        if C.alive[device] and S.update[device] == 0:
            C.waits[device] += NEVER
        elif not C.alive[device] and S.update[device] > 0:
            C.waits[device] -= NEVER
        C.alive[device] = 1 if S.update[device] > 0 else 0
        C.duration[device] = S.update[device]
    count_sums(R, C, 1)


@compiled
def _synchronize_shard(W, parameter, shard, opened, slot0):  # type: ignore[no-untyped-def]
    """Add a shard's updates on its owners, and put it into a bucket. A shard that servers own gets neither here, and a gathered one no
    bucket. Their tasks, and those of compressed buckets, come after all sums."""
    find_members(W, parameter, shard)
    if not owned_by_servers(W, parameter):
        _add_update(W, parameter, shard)
        code = W.state.sync[parameter]
        if compresses(W, code):
            pack(W, parameter, shard)
        elif W.scratch.members[0] > 1 and (is_in_buckets(code) or is_compressed(code)):
            join_bucket(W, parameter, shard, opened, slot0)


@compiled
def expect_updates(W: World, op: int) -> None:
    """Subtract from ``floor`` the devices' updates of an operator's parameters, each parameter once per ``count[EXPECTED]``."""
    G, D, S = W.graph, W.shards, W.scratch
    S.count[PRICES] = 0
    for k in range(G.parameter_ptr[op], G.parameter_ptr[op + 1]):
        parameter = G.parameter[k]
        if S.expected[parameter] == S.count[EXPECTED]:
            continue
        S.expected[parameter] = S.count[EXPECTED]
        find_geometry(W, parameter)
        geometry = S.geometry[parameter]
        if first_user_with_gradient(D, geometry) < 0:
            continue
        for shard in range(D.ptr[geometry], D.ptr[geometry + 1]):
            find_members(W, parameter, shard)
            if owned_by_readers(W, parameter, shard):
                _expect_parts(W, parameter, shard)
            elif D.lowest[shard] < 0 or not owned_by_servers(W, parameter):
                own, rows = _gathered(W, parameter, shard)
                away = offloads(W.state.sync[parameter])
                for i in range(1, 1 + S.members[0]):
                    S.floor[S.members[i]] -= OFFLOADING_NS if away else _update_ns(W, S.members[i], shard, own, rows)
    ask_prices(D, S)


@compiled
def _add_update(W, parameter, shard):  # type: ignore[no-untyped-def]
    """Add the updates of a shard on its owners, if these are readers."""
    S = W.scratch
    if owned_by_readers(W, parameter, shard):
        others = 0 if is_even(W) else sharers(S) - 1
        for place in range(S.members[0]):
            part, device = part_of_place(W, parameter, shard, place), S.members[1 + place]
            if part >= 0 and offloads(W.state.sync[parameter]):
                offload(W, device, part_bytes(W, shard, part))
                S.update[device] += part_adding_ns(W, shard, part, device, others)
            elif part >= 0:
                S.update[device] += part_ns(W, shard, part, device, others)
        return
    own, rows = _gathered(W, parameter, shard)
    for i in range(S.members[0]):
        device = S.members[1 + i]
        if offloads(W.state.sync[parameter]):
            offload(W, device, W.shards.bytes[shard])
        else:
            S.update[device] += _update_ns(W, device, shard, own, rows)


@compiled
def _expect_parts(W, parameter, shard):  # type: ignore[no-untyped-def]
    """Subtract from ``floor`` the updates of a shard's parts, each on the reader that owns it."""
    S, away = W.scratch, offloads(W.state.sync[parameter])
    others = 0 if is_even(W) else sharers(S) - 1
    for place in range(S.members[0]):
        part, device = part_of_place(W, parameter, shard, place), S.members[1 + place]
        if part >= 0:
            if away:
                S.floor[device] -= part_adding_ns(W, shard, part, device, others) + OFFLOADING_NS
            else:
                S.floor[device] -= part_ns(W, shard, part, device, others)


@compiled
def _gathered(W, parameter, shard):  # type: ignore[no-untyped-def]
    """(bytes that each reader updates, rows that it adds up for that) of a shard with a sparse all-gather; else (-1, 0)."""
    D, C = W.shards, W.state
    if not gathers_rows(C.sync[parameter]) or D.lowest[shard] < 0:
        return -1, 0
    return gathered_bytes(W, parameter, shard), gathered_rows(W, parameter, shard)


@compiled
def _update_ns(W, device, shard, gathered, rows):  # type: ignore[no-untyped-def]
    K, D = W.cluster, W.shards
    kind = K.device_type[device]
    if gathered < 0:
        return D.update_ns[kind, shard]
    update = table_price_ns(W, K.hosts[0] + kind, gathered, D.bytes[shard])
    row_seconds = K.row_seconds[device] if K.serves_itself[device] else 0.0
    return adding_ns(rows * D.row_bytes[shard], rows, K.memory_bandwidth[device], row_seconds) + update


@compiled
def _install(W, slot0):  # type: ignore[no-untyped-def]
    """Copy the edges from the scratch to the state, by operator and tile."""
    C, S = W.state, W.scratch
    base, edges = C.used[ARENA], S.count[EDGES]
    at = base
    for op in range(len(C.sync_row) - 1):
        C.sync_row[op] = -1
    for i in range(edges):
        op = C.owner[S.e_src[i]]
        if C.sync_row[op] < 0:
            C.sync_row[op] = at
            at += C.tiles[op] + 1
            if at + edges > len(C.arena):
                raise MemoryError(STATE_FULL)
            C.arena[C.sync_row[op] : at] = 0
    for i in range(edges):
        C.arena[C.sync_row[C.owner[S.e_src[i]]] + C.index[S.e_src[i]] + 1] += 1
    fill = at
    for op in range(len(C.sync_row) - 1):
        if C.sync_row[op] >= 0:
            row = C.sync_row[op]
            C.arena[row] = fill
            for tile in range(C.tiles[op]):
                C.arena[row + tile + 1] += C.arena[row + tile]
            fill = C.arena[row + C.tiles[op]]
    if fill > len(C.arena):
        raise MemoryError(STATE_FULL)
    for i in range(edges):  # a row's pointer advances while the row is filled, and is put back afterwards
        row = C.sync_row[C.owner[S.e_src[i]]] + C.index[S.e_src[i]]
        C.arena[C.arena[row]] = S.e_dst[i]
        C.arena[row] += 1
        C.waits[S.e_dst[i]] += 1
    for op in range(len(C.sync_row) - 1):
        if C.sync_row[op] >= 0:
            row = C.sync_row[op]
            for tile in range(C.tiles[op] - 1, 0, -1):
                C.arena[row + tile] = C.arena[row + tile - 1]
            C.arena[row] = at
            at = C.arena[row + C.tiles[op]]
    C.used[ARENA] = fill
    C.sync_slot[0], C.used[SYNCS] = slot0, S.count[TASKS]
    C.used[SLOTS] = slot0 + S.count[TASKS]
