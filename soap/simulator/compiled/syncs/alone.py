"""Regions that travel by themselves (compiled): sparse all-gathers, and pushes, updates and pulls of what servers own. The counterpart of
``plan.syncs.parameter_server``, ``row_server`` and ``sparse_all_gather``."""

from __future__ import annotations

from soap.plan.syncs.seam import SERVE, Phase
from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.rows import is_sparse
from soap.simulator.compiled.scratch import NORM, TASKS, USES
from soap.simulator.compiled.state import ARENA, OTHER, SLOTS
from soap.simulator.compiled.syncs.clipping import NO_NORM
from soap.simulator.compiled.syncs.codes import is_alone
from soap.simulator.compiled.syncs.exchange import enter_before, new_row, wait_for_tiles
from soap.simulator.compiled.syncs.members import find_members, is_trained
from soap.simulator.compiled.syncs.pricing import adding_ns, price_ns, table_price_ns
from soap.simulator.compiled.syncs.server_traffic import added_bytes, added_rows, prepare, updated_bytes
from soap.simulator.compiled.syncs.templates import add_rows, find_template, phase_row, put_alone, server_at, write_row
from soap.simulator.compiled.task_keys import STATE_FULL, SYNC, set_key, task_key
from soap.simulator.compiled.world import World

_BEFORE_FORWARD, _AFTER_BACKWARD, _AFTER_UPDATE = int(Phase.BEFORE_FORWARD), int(Phase.AFTER_BACKWARD), int(Phase.AFTER_UPDATE)


@compiled
def add_alone(W: World, bucket: int, slot0: int) -> None:
    """Add the tasks of all these regions, in the order of the parameters, after the ``count[TASKS]`` tasks from ``slot0`` on. Needs the
    parameters' geometries. ``bucket``: the first one that is free."""
    G, D, C, S, Y = W.graph, W.shards, W.state, W.scratch, W.templates
    fill(S.taken, 0, len(S.taken), 0)
    for parameter in range(len(G.parameter_dtype)):
        if not is_alone(C.sync[parameter]) or not is_trained(G, parameter):
            continue
        geometry = S.geometry[parameter]
        for shard in range(D.ptr[geometry], D.ptr[geometry + 1]):
            if D.lowest[shard] < 0:
                continue
            find_members(W, parameter, shard)
            template = find_template(W, parameter, shard)
            if Y.partitions[template] > 0:
                _serve_region(W, bucket, template, parameter, shard, slot0)
            elif Y.limits[2 * template] == 0 and phase_row(Y, template, _AFTER_BACKWARD) >= 0:
                prepare(W, template, parameter, shard)
                put_alone(W, bucket, template, parameter, shard)
                slot = slot0 + S.count[TASKS]
                S.count[TASKS] += 1
                wait_for_tiles(C, S, slot, slot + 1)
                add_rows(W, bucket, _AFTER_BACKWARD, slot, slot0)


@compiled
def _serve_region(W, bucket, template, parameter, shard, slot0):  # type: ignore[no-untyped-def]
    """Add the tasks of one region: its push, the updates of its partitions, and the pull that follows them if there is one. If all devices
    learn the gradients' norm, that comes behind the push and before the updates (``clipping``). ``bucket``: free for use here."""
    K, D, C, S, Y = W.cluster, W.shards, W.state, W.scratch, W.templates
    count, number = prepare(W, template, parameter, shard), shard - D.ptr[S.geometry[parameter]]
    put_alone(W, bucket, template, parameter, shard)
    first, norm = slot0 + S.count[TASKS], S.count[NORM]
    base = C.used[ARENA]  # first the rows of the push, the updates and the pull; then slots of updates, pull and norm; then cores
    updates, pulls, cores = base + 6, base + 6 + count, base + 8 + count
    if first + count + 3 > len(C.key) or cores + count > len(C.arena):
        raise MemoryError(STATE_FULL)
    C.used[ARENA] = cores + count
    C.arena[pulls + 1] = norm
    pushes = 1 if write_row(W, bucket, phase_row(Y, template, _AFTER_BACKWARD), first) else 0
    if pushes:
        C.kind[first], C.owner[first], C.index[first], C.waits[first] = OTHER, -1, base, 0
    served = first + pushes
    for part in range(count):
        slot, server = served + part, server_at(W, parameter, shard, part)
        C.arena[updates + part] = slot
        set_key(C, slot, task_key(SYNC, parameter, SERVE, number, 0, part))
        C.latency[slot], C.overhead[slot] = 0, 0
        C.duration[slot] = _serve_ns(W, parameter, shard, part, server)
        C.resource[slot], C.resource_n[slot] = server, 1
        if not K.serves_itself[server]:
            C.arena[cores + part] = K.core[server] + S.taken[K.host_device[server]] % K.cores[server]
            S.taken[K.host_device[server]] += 1
            C.resource[slot] = -1 - (cores + part)
        C.waits[slot], C.index[slot], C.moved[slot] = pushes if norm == NO_NORM else 1, base + 2, 0
        C.alive[slot], C.kind[slot], C.owner[slot] = 1, OTHER, -1
    end, pull = served + count, 0
    row = phase_row(Y, template, _AFTER_UPDATE)
    if row >= 0 and write_row(W, bucket, row, end):
        C.kind[end], C.owner[end], C.index[end], C.waits[end] = OTHER, -1, base + 4, count
        C.arena[pulls] = end
        pull = 1
    C.arena[base], C.arena[base + 1] = updates, pulls
    if norm != NO_NORM:
        C.arena[base], C.arena[base + 1] = pulls + 1, pulls + 2
        C.waits[norm] += pushes
    C.arena[base + 2], C.arena[base + 3] = pulls, pulls + pull
    C.arena[base + 4], C.arena[base + 5] = cores, cores
    S.count[TASKS] += pushes + count + pull
    wait_for_tiles(C, S, first, first + pushes if pushes or norm != NO_NORM else end)


@compiled
def _serve_ns(W, parameter, shard, part, server):  # type: ignore[no-untyped-def]
    """Duration in ns of a server's work on one partition: adding up gradients, then the update."""
    G, K, D, S = W.graph, W.cluster, W.shards, W.scratch
    changed, host = updated_bytes(W, parameter, shard, part), K.core_host[server]
    if is_sparse(G, parameter):
        update = table_price_ns(W, host, changed, S.p_rows[part] * D.row_bytes[shard])
    else:
        update = price_ns(D, S, host, changed)
    added = added_bytes(W, parameter, shard, part)
    rows = added_rows(W, parameter, part)
    return adding_ns(added, rows, K.core_bandwidth[server], K.row_seconds[server]) + update


@compiled
def pull_region(W, bucket, template, parameter, shard):  # type: ignore[no-untyped-def]
    """Add the task that pulls the rows of a region before the forward pass, if anything travels. ``bucket``: free for use here."""
    C, S = W.state, W.scratch
    row = phase_row(W.templates, template, _BEFORE_FORWARD)
    if row < 0:
        return
    prepare(W, template, parameter, shard)
    put_alone(W, bucket, template, parameter, shard)
    if not write_row(W, bucket, row, C.used[SLOTS]):
        return
    followers = new_row(C, S.count[USES])
    for i in range(S.count[USES]):  # a tile's forward pass is ``tiles`` slots before its backward pass
        C.arena[followers + 2 + i] = S.use_slot[i] - C.tiles[C.owner[S.use_slot[i]]]
    enter_before(C, C.owner[S.use_slot[0]], followers)
