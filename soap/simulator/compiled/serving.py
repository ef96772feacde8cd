"""Parameter servers: pushes, updates on hosts' cores, and pulls (compiled). The counterpart of ``servers`` and ``lowering._serve``.

The tasks of one shard stand together in ``State``: first its pushes, then its updates, then its pulls. All pushes have one row in the
arena (the updates), and so have all updates (the pulls). Pulls are waited for by nobody.
"""

from __future__ import annotations

from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.communication import MISSING, REDUCE_TRAFFIC, nanoseconds, seek_list, transfer_ns
from soap.simulator.compiled.fragment import CROWDED, SYNC, task_key
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.keepers import add_sync_edge, find_keepers, is_served
from soap.simulator.compiled.scratch import STAMP, TASKS, USES, Scratch
from soap.simulator.compiled.state import ARENA, LOW_BITS, OTHER, ShardTables, State
from soap.simulator.compiled.tables import ClusterTables, GraphTables
from soap.simulator.compiled.variants import VariantTables

PUSH, UPDATE_PARTITION, PULL = 1, 2, 3
"""Stages of a task's id, as in ``lowering``."""


@compiled
def serve(G: GraphTables, V: VariantTables, K: ClusterTables, D: ShardTables, C: State, S: Scratch, slot0: int) -> None:
    """Add the tasks of all served shards behind the ``count[TASKS]`` that stand from ``slot0`` on, in the order of the parameters, whose
    geometries are known.

    LookupError if updates on cores are not known yet; all of them are then in ``core_size.missing``.
    """
    fill(S.taken, 0, len(S.taken), 0)
    missing = 0
    for parameter in range(len(G.parameter_dtype)):
        if C.partitions[parameter] == 0 or G.user_ptr[parameter] == G.user_ptr[parameter + 1] or G.user_place[G.user_ptr[parameter]] < 0:
            continue
        geometry = S.geometry[parameter]
        for shard in range(D.ptr[geometry], D.ptr[geometry + 1]):
            if D.lowest[shard] >= 0:
                find_keepers(G, V, D, C, S, parameter, shard)
                if is_served(C, S, parameter):
                    missing = _serve_shard(G, K, D, C, S, parameter, shard, shard - D.ptr[geometry], slot0, missing)
    if missing > 0:
        D.core_size.missing[0] = missing
        raise LookupError(MISSING)


@compiled
def _serve_shard(G, K, D, C, S, parameter, shard, number, slot0, missing):  # type: ignore[no-untyped-def]
    """The tasks of one shard, of whose keepers (``members``) the first one's host serves."""
    size, home = D.bytes[shard], S.members[1]
    itemsize = G.parameter_itemsize[parameter]
    elements = size // itemsize
    count = min(C.partitions[parameter], elements)
    first_push = slot0 + S.count[TASKS]
    first_update, gradients = _number_pushes(C, S, first_push)
    first_pull, end = first_update + count, first_update + count + S.members[0] - 1
    base = C.used[ARENA]  # rows of pushes, updates and pulls; the updates, the pulls, the updates' cores
    updates, pulls, cores = base + 6, base + 6 + count, base + 6 + count + end - first_pull
    if end + 1 > len(C.key) or cores + count > len(C.arena):
        raise MemoryError(CROWDED)
    C.arena[base], C.arena[base + 1] = updates, pulls
    C.arena[base + 2], C.arena[base + 3] = pulls, cores
    C.arena[base + 4], C.arena[base + 5] = cores, cores
    C.used[ARENA] = cores + count
    S.count[TASKS] += end - first_push
    for i in range(1, S.members[0]):
        device = S.members[1 + i]
        if S.mark[device] == S.count[STAMP]:
            _message(K, C, S.pushed[device], task_key(SYNC, parameter, PUSH, number, 0, device), device, home, size, base, 0)
        pull = first_pull + i - 1
        C.arena[pulls + i - 1] = pull
        _message(K, C, pull, task_key(SYNC, parameter, PULL, number, 0, device), home, device, size, base + 4, count)
    for index in range(count):
        slot = first_update + index
        part = (elements // count + (1 if index < elements % count else 0)) * itemsize
        duration, missing = _serve_ns(K, D, home, part, gradients, missing)
        C.arena[updates + index] = slot
        C.arena[cores + index] = K.core[home] + S.taken[K.host_device[home]] % K.cores[home]
        S.taken[K.host_device[home]] += 1
        C.key[slot], C.duration[slot] = task_key(SYNC, parameter, UPDATE_PARTITION, number, 0, index), duration
        C.resource[slot], C.resource_n[slot] = -1 - (cores + index), 1
        C.waits[slot], C.index[slot], C.moved[slot] = first_update - first_push, base + 2, 0
    for slot in range(first_push, end):
        C.alive[slot], C.kind[slot], C.owner[slot] = 1, OTHER, -1
    _wait_for_gradients(C, S, home, first_update, count)
    return missing


@compiled
def _number_pushes(C, S, slot):  # type: ignore[no-untyped-def]
    """Slots of the pushes (``pushed``) of the devices that have a gradient: they are marked. The next slot, and the number of gradients."""
    S.count[STAMP] += 1
    stamp = S.count[STAMP]
    for i in range(S.count[USES]):
        if C.alive[S.use_slot[i]]:
            S.mark[S.use_device[i]] = stamp
    gradients = 0
    for i in range(S.members[0]):
        device = S.members[1 + i]
        if S.mark[device] == stamp:
            gradients += 1
            if i > 0:
                S.pushed[device] = slot
                slot += 1
    return slot, gradients


@compiled
def _wait_for_gradients(C, S, home, first_update, updates):  # type: ignore[no-untyped-def]
    """Pushes wait for their devices' tiles; gradients on the server's own device are waited for by the updates."""
    for i in range(S.count[USES]):
        device = S.use_device[i]
        if C.alive[S.use_slot[i]]:
            first, last = (first_update, first_update + updates) if device == home else (S.pushed[device], S.pushed[device] + 1)
            for slot in range(first, last):
                add_sync_edge(S, S.use_slot[i], slot)


@compiled
def _message(K, C, slot, key, source, target, size, row, waits):  # type: ignore[no-untyped-def]
    devices = len(K.device_type)
    pair = source * devices + target
    C.key[slot], C.duration[slot] = key, transfer_ns(K, source, target, size)
    C.resource[slot], C.resource_n[slot] = devices + K.route_ptr[pair], K.route_ptr[pair + 1] - K.route_ptr[pair]
    C.waits[slot], C.index[slot], C.moved[slot] = waits, row, size


@compiled
def _serve_ns(K, D, home, size, gradients, missing):  # type: ignore[no-untyped-def]
    """``servers.serve_ns``, and how much of ``core_size.missing`` is taken: by updates of a size that is not known yet."""
    if missing + 4 > len(D.core_size.missing):
        return 0, missing
    entry = D.core_size.missing[1 + missing : 4 + missing]  # where it is to stand if it is missing
    entry[0], entry[1], entry[2] = K.core_host[home], size >> LOW_BITS, size & ((1 << LOW_BITS) - 1)
    found = seek_list(D.core_size, entry)
    if found < 0:
        return 0, missing + 3
    if gradients < 2:
        return D.core_update_ns[found], missing
    adding = nanoseconds((gradients - 1) * size * REDUCE_TRAFFIC / K.core_bandwidth[home])
    return adding + D.core_update_ns[found], missing
