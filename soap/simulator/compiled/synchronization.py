"""Lowers the synchronization of parameters after the backward pass, and the devices' updates (compiled).

The counterpart of ``plan.syncs.bucketing`` and ``communication.synchronizing``. Which tasks there are says the template of each shard.
"""

from __future__ import annotations

from soap.plan.syncs.seam import Phase
from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.graph_arrays import GraphTables
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.marks import runs_again
from soap.simulator.compiled.scratch import EDGES, EXPECTED, PACKED_SHARDS, PRICES, STAMP, TASKS, USES
from soap.simulator.compiled.second_runs import weights_slot
from soap.simulator.compiled.state import NEVER, SLOTS, SYNCS, UPDATE_DEVICE, State
from soap.simulator.compiled.syncs.clipping import add_norm, wait_for_gradients, wait_for_passes
from soap.simulator.compiled.syncs.exchange import add_edge, count_rows, install, wait_for_tiles
from soap.simulator.compiled.syncs.members import find_geometries, find_geometry, find_members, first_user_with_gradient
from soap.simulator.compiled.syncs.offloading import add_offloads
from soap.simulator.compiled.syncs.pricing import ask_prices
from soap.simulator.compiled.syncs.server_traffic import prepare
from soap.simulator.compiled.syncs.templates import (
    NO_TASK,
    add_rows,
    find_template,
    is_alone,
    of_micro_batch,
    phase_row,
    put_alone,
    put_into_bucket,
)
from soap.simulator.compiled.syncs.updates import add_update
from soap.simulator.compiled.task_keys import UPDATE, set_key, task_key
from soap.simulator.compiled.world import World

_AFTER_BACKWARD = int(Phase.AFTER_BACKWARD)


@compiled
def begin_updates(C: State) -> None:
    """Set up the devices' updates in the first slots."""
    devices = len(C.busy)
    for device in range(devices):
        set_key(C, device, task_key(UPDATE, device, 0, 0, 0, 0))
        C.duration[device], C.resource[device], C.resource_n[device] = 0, device, 1
        C.waits[device], C.alive[device], C.kind[device], C.owner[device] = NEVER, 0, UPDATE_DEVICE, -1
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
def synchronize(W: World) -> None:
    """Make all sums of gradients and updates anew."""
    G, D, C, S = W.graph, W.shards, W.state, W.scratch
    devices, begin = len(C.busy), C.used[SLOTS]
    S.count[EDGES] = S.count[TASKS] = S.count[PRICES] = S.count[PACKED_SHARDS] = 0
    S.count[STAMP] += 1
    opened = S.count[STAMP]
    for device in range(devices):
        S.update[device] = S.offloaded[device] = S.on_host[device] = S.taken[device] = 0
    fill(S.settled, 0, len(S.settled), NO_TASK)
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
                    _synchronize_shard(W, parameter, shard, opened)
    buckets, gradients = S.count[TASKS], S.count[EDGES]
    add_offloads(W)
    add_norm(W)
    for bucket in range(buckets):
        add_rows(W, bucket)
    wait_for_gradients(W, buckets, gradients)
    for parameter in range(len(G.parameter_dtype)):
        if S.alone[parameter] == opened:
            _add_alone(W, buckets, parameter)
    wait_for_passes(W)
    ask_prices(D, S)
    install(C, S, C.sync_row, 0, begin, devices)
    C.sync_slot[0], C.used[SYNCS] = begin, C.used[SLOTS] - begin
    for device in range(devices):
        if C.alive[device] and S.update[device] == 0:
            C.waits[device] += NEVER
        elif not C.alive[device] and S.update[device] > 0:
            C.waits[device] -= NEVER
        C.alive[device] = 1 if S.update[device] > 0 else 0
        C.duration[device] = S.update[device]
    count_rows(C, begin, C.used[SYNCS], 1)


@compiled
def _synchronize_shard(W, parameter, shard, opened):  # type: ignore[no-untyped-def]
    """Add a shard's updates on its owners, unless servers own it, and put it into a bucket if it does not travel alone; note if it does."""
    C, S, Y = W.state, W.scratch, W.templates
    find_members(W, parameter, shard)
    template = find_template(W, parameter, shard)
    if Y.partitions[template] == 0:
        add_update(W, template, parameter, shard, False)
    if is_alone(Y, template):
        S.alone[parameter] = opened
    elif phase_row(Y, template, _AFTER_BACKWARD) >= 0:
        bucket = put_into_bucket(W, template, parameter, shard, opened)
        for i in range(S.count[USES]):
            if C.alive[S.use_slot[i]]:
                add_edge(S, S.use_slot[i], of_micro_batch(W, bucket, S.use_slot[i]))


@compiled
def _add_alone(W, bucket, parameter):  # type: ignore[no-untyped-def]
    """Add the tasks of a parameter's shards that travel alone. ``bucket``: free for use here."""
    D, C, S, Y = W.shards, W.state, W.scratch, W.templates
    geometry = S.geometry[parameter]
    for shard in range(D.ptr[geometry], D.ptr[geometry + 1]):
        if D.lowest[shard] < 0:
            continue
        find_members(W, parameter, shard)
        template = find_template(W, parameter, shard)
        if is_alone(Y, template):
            prepare(W, template, parameter, shard)
            put_alone(W, bucket, template, parameter, shard)
            add_rows(W, bucket)
            wait_for_tiles(C, S, S.first_task[bucket], S.first_task[bucket] + S.first_count[bucket])


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
