"""Bounds of the memory that synchronization takes for a parameter, beside what its users hold of it (compiled).

The counterpart of ``simulator.memory.parameters``. All-reduces without another wire format take nothing here.
"""

from __future__ import annotations

from soap.plan.syncs.amounts import COPIES, COUNT_BYTES
from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.memory_tables import (
    COLLECTED,
    COMPACT,
    HELD,
    LOOKUPS,
    REGIONS,
    SENT,
    TRAINABLE,
    MemoryTables,
)
from soap.simulator.compiled.rows import INDEX_BYTES, is_sparse
from soap.simulator.compiled.syncs.codes import (
    gathers_rows,
    has_server,
    is_compressed,
    is_dealt_out,
    is_gathered,
    is_local,
    offloads,
    partitions_of,
    sums_in_place,
    wire_bytes,
)
from soap.simulator.compiled.syncs.compressed import held_bytes
from soap.simulator.compiled.syncs.members import compresses, find_geometry, find_members, is_used
from soap.simulator.compiled.syncs.templates import find_template, own_bytes, part_bytes
from soap.simulator.compiled.variants import CELLS
from soap.simulator.compiled.world import World


@compiled
def cut_of(C, M, user):  # type: ignore[no-untyped-def]
    """The number of the set of regions into which a user cuts its parameter."""
    return M.cut[M.cut_ptr[C.variant[M.user[user]]] + M.user_operand[user]]


@compiled
def add_synchronized(W: World, M: MemoryTables, parameter: int, code: int, disjoint: bool) -> None:
    """Add a parameter's copies and buffers to the bound.

    ``disjoint``: the regions that users need are equal or disjoint.
    """
    G, V, K, C = W.graph, W.variants, W.cluster, W.state
    if is_compressed(code) or is_dealt_out(code):
        _add_by_shards(W, M, parameter)
        return
    devices, sparse = len(C.busy), is_sparse(G, parameter)
    fill(M.total, 0, devices, 0)
    fill(M.looked_up, 0, devices, 0)
    regions = 0
    for i in range(M.user_ptr[parameter], M.user_ptr[parameter + 1]):
        pieces = 1 if disjoint else _pieces(V, C, M, parameter, cut_of(C, M, i))
        _add_user(V, C, M, parameter, M.user[i], M.user_operand[i], sparse and disjoint and not sums_in_place(code), pieces)
        regions += V.rows[C.variant[M.user[i]], CELLS]
    values = indices = 0
    for device in range(devices):
        values += M.total[device]
        indices += M.looked_up[device] * INDEX_BYTES
    for device in range(devices):
        if sums_in_place(code):
            _add(M, device, 0, wire_bytes(code, M.total[device], M.itemsize[parameter]))
            continue
        if gathers_rows(code):
            _add(M, device, 0, COPIES * (values + indices))
            continue
        own, own_indices = M.total[device], 2 * M.looked_up[device] * INDEX_BYTES
        together = own + own_indices
        if is_local(code):
            together = 0
            for other in range(devices):
                if K.host_device[other] == K.host_device[device]:
                    together += M.total[other] + 2 * M.looked_up[other] * INDEX_BYTES
        # held: the rows, their gradient, and what the optimizer's call may take; sent: copies; collected: gradients of several tiles
        _add(M, device, 3 * own if sparse else 0, COPIES * (own + together) + own_indices)
        M.part[COLLECTED, device] += own
    if has_server(code):
        _add_servers(K, M, parameter, code, regions, disjoint, values, 2 * indices)


@compiled
def _add_by_shards(W, M, parameter):  # type: ignore[no-untyped-def]
    """Add what readers hold of compressed shards, and of shards that they own in parts."""
    D, S = W.shards, W.scratch
    if not is_used(W.graph, parameter):
        return
    find_geometry(W, parameter)
    geometry = S.geometry[parameter]
    for shard in range(D.ptr[geometry], D.ptr[geometry + 1]):
        if D.lowest[shard] < 0 and W.graph.trainable[parameter]:
            continue
        find_members(W, parameter, shard)
        template = find_template(W, parameter, shard)
        if W.templates.parts[template] > 0:
            _add_dealt_out(W, M, template, parameter, shard)
        elif compresses(W, W.state.sync[parameter]):
            for i in range(S.members[0]):
                _add(M, S.members[1 + i], 0, held_bytes(W, parameter, shard, i))


@compiled
def away_bytes(W: World, M: MemoryTables, code: int, device: int) -> int:
    """By how many bytes more a device holds for each byte of a trained parameter that it owns, if the host keeps the optimizer's state: it
    has no state; or, if it is a CPU and so in that memory, second copies of value and gradient as well."""
    if not offloads(code):
        return 0
    return 2 if W.cluster.serves_itself[device] else -M.fixed[1]


@compiled
def _add_dealt_out(W, M, template, parameter, shard):  # type: ignore[no-untyped-def]
    """Add what readers hold that own parts: buffers in which gradients and values arrive, but no states of what others own. If values are
    gathered for their uses, neither are others' values nor their gradients there all the time (``gathered_memory`` adds what is)."""
    S, size, code = W.scratch, W.shards.bytes[shard], W.state.sync[parameter]
    sharers, most = W.templates.sharers[template], 0
    gathered, even = is_gathered(code), W.templates.even[template] == 1
    for place in range(W.templates.parts[template] if even else 0):
        most = max(most, part_bytes(W, template, parameter, shard, place))
    for i in range(S.members[0]):
        device, own = S.members[1 + i], own_bytes(W, template, parameter, shard, i)
        if W.graph.trainable[parameter]:
            M.part[HELD, device] += away_bytes(W, M, code, device) * (own - size)
        if gathered:
            _add_part(M, device, own - size, W.graph.trainable[parameter])
        elif most > 0:  # of each region the largest part: at least what a bucket's owner of most has
            _add_owned(M, device, own - size, (2 * sharers + 1) * most - size)
        else:
            _add_owned(M, device, own - size, size + sharers * own)


@compiled
def _add_part(M, device, size, trainable):  # type: ignore[no-untyped-def]
    """Add bytes of values that are there all the time, with their gradients and states if there are some."""
    M.part[HELD, device] += size
    M.part[TRAINABLE, device] += size if trainable else 0


@compiled
def _add_owned(M, device, owned, buffers):  # type: ignore[no-untyped-def]
    """Add bytes of states and of gradients that stay, and of buffers."""
    M.part[HELD, device] += M.fixed[1] * owned
    M.part[SENT, device] += buffers


@compiled
def _add(M, device, held, sent):  # type: ignore[no-untyped-def]
    M.part[HELD, device] += held
    M.part[SENT, device] += sent


@compiled
def _pieces(V, C, M, parameter, cut):  # type: ignore[no-untyped-def]
    """The most parts that a region of this cut may consist of, because other users of the parameter cut it in other ways."""
    pieces = 1
    for i in range(M.user_ptr[parameter], M.user_ptr[parameter + 1]):
        other = cut_of(C, M, i)
        new = other != cut
        for before in range(M.user_ptr[parameter], i):
            new &= cut_of(C, M, before) != other
        if new:
            pieces = min(M.elements[parameter], pieces * V.rows[C.variant[M.user[i]], CELLS])
    return pieces


@compiled
def _add_user(V, C, M, parameter, op, operand, by_rows, pieces):  # type: ignore[no-untyped-def]
    """Add a user to ``total`` and ``looked_up``: by device, bytes of the parameter that its tiles have, and rows that they look up, once
    for each piece of a region."""
    row = C.variant[op]
    cells = V.rows[row, CELLS]
    for tile in range(C.tiles[op]):
        at, device = operand * cells + tile % cells, C.dev[C.dev_ptr[op] + tile]
        region = M.data[M.rows[row, REGIONS] + at]
        if region < 0:
            continue
        if M.rows[row, LOOKUPS] >= 0:
            M.looked_up[device] += M.data[M.rows[row, LOOKUPS] + at] * min(pieces, M.region_volume[region])
        whole = M.region_volume[region] * M.itemsize[parameter]
        M.total[device] += M.data[M.rows[row, COMPACT] + at] if by_rows else whole


@compiled
def _add_servers(K, M, parameter, code, regions, disjoint, values, indices):  # type: ignore[no-untyped-def]
    """Add the partitions that servers on CPUs own: of each of at most ``regions`` regions, a server has at most ``parts`` partitions."""
    count, servers, whole = partitions_of(code), len(K.server), M.elements[parameter] * M.itemsize[parameter]
    parts = (count + servers - 1) // servers
    kept = min(whole, whole * parts // count + 1 + parts * regions * M.row_bytes[parameter]) if disjoint else whole
    for i in range(servers):
        server = K.server[i]
        if K.serves_itself[server]:
            received = parts * regions * (COPIES * values + indices + COUNT_BYTES)
            if not disjoint:  # everything from all readers, with indices of their rows: there are no more rows than elements
                received = len(M.total) * (COPIES * whole + 2 * INDEX_BYTES * M.elements[parameter]) + COUNT_BYTES * M.elements[parameter]
            updating = 3 if M.fixed[1] > 1 else 1
            _add(M, server, (2 + M.fixed[1] + updating) * kept, received)
