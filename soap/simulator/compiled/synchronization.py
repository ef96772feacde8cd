"""Lowers the synchronization of parameters after the backward pass, and the devices' updates (compiled).

The counterpart of ``plan.syncs.bucketing`` and ``communication.synchronizing``. In ``State`` the buckets' sums and scatters come first,
then the tasks of other methods, which the methods' own files in ``syncs`` add.
"""

from __future__ import annotations

from soap.plan.syncs.seam import Phase
from soap.simulator.compiled.graph_arrays import GraphTables
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.marks import runs_again
from soap.simulator.compiled.scratch import EDGES, EXPECTED, PACKED_SHARDS, PRICES, STAMP, TASKS
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
from soap.simulator.compiled.syncs.alone import add_alone
from soap.simulator.compiled.syncs.clipping import begin_norm, finish_norm
from soap.simulator.compiled.syncs.compressed import add_compressed
from soap.simulator.compiled.syncs.exchange import wait_for_tiles
from soap.simulator.compiled.syncs.members import (
    find_geometries,
    find_geometry,
    find_members,
    first_user_with_gradient,
)
from soap.simulator.compiled.syncs.pricing import ask_prices
from soap.simulator.compiled.syncs.templates import add_rows, find_template, phase_row, put_into_bucket
from soap.simulator.compiled.syncs.updates import add_update, bring_values
from soap.simulator.compiled.task_keys import STATE_FULL, UPDATE, set_key, task_key
from soap.simulator.compiled.world import World

_AFTER_BACKWARD = int(Phase.AFTER_BACKWARD)


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
    own = C.duration[slot + count] + (C.duration[slot + C.marks.again_block[C.marked[op]] * count] if runs_again(C, op) else 0)
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
    S.count[EDGES] = S.count[TASKS] = S.count[PRICES] = S.count[PACKED_SHARDS] = 0
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
                        add_update(W, find_template(W, parameter, shard), parameter, shard, False)
                elif G.user[first_user + lowest] == op:
                    _synchronize_shard(W, parameter, shard, opened, slot0)
    buckets = S.count[TASKS]
    for bucket in range(buckets):
        if S.packed_first[bucket] < 0:
            add_rows(W, bucket, _AFTER_BACKWARD, slot0 + bucket, slot0)
    bring_values(W, buckets, slot0)
    begin_norm(W, slot0)
    add_alone(W, buckets, slot0)
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
    """Add a shard's updates on its owners, and put it into a bucket. A shard that servers own gets neither here. Their tasks, and those of
    compressed buckets, come after all sums."""
    C, S = W.state, W.scratch
    find_members(W, parameter, shard)
    template = find_template(W, parameter, shard)
    if W.templates.partitions[template] > 0:
        return
    add_update(W, template, parameter, shard, False)
    if W.templates.limits[2 * template] > 0 and phase_row(W.templates, template, _AFTER_BACKWARD) >= 0:
        bucket = put_into_bucket(W, template, parameter, shard, opened)
        if S.packed_first[bucket] < 0:
            wait_for_tiles(C, S, slot0 + bucket, slot0 + bucket + 1)


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
            template = find_template(W, parameter, shard)
            if W.templates.partitions[template] == 0:
                add_update(W, template, parameter, shard, True)
    ask_prices(D, S)


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
