"""Who reads which shard of a parameter under the current strategy, and through which tiles (compiled).

The counterpart of ``planning._make_cells``.
"""

from __future__ import annotations

from soap.simulator.compiled.arrays import sort
from soap.simulator.compiled.communication import find_list
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import FULL, STAMP, USES
from soap.simulator.compiled.state import ShardTables
from soap.simulator.compiled.syncs.codes import COMPRESSED, LOCAL
from soap.simulator.compiled.variants import CELLS, GEOMETRIES, LOOKUPS
from soap.simulator.compiled.world import World


@compiled
def find_geometries(W: World) -> None:
    """Fill ``geometry``: how each parameter is cut under the current strategy."""
    G, S = W.graph, W.scratch
    if len(G.parameter_dtype) > len(S.geometry):
        raise MemoryError(FULL)
    for parameter in range(len(G.parameter_dtype)):
        find_geometry(W, parameter)


@compiled
def find_geometry(W: World, parameter: int) -> None:
    """``find_geometries`` for one parameter."""
    G, D, S = W.graph, W.shards, W.scratch
    first, last = G.user_ptr[parameter], G.user_ptr[parameter + 1]
    if last == first:
        return  # it has no users
    if last - first == 1:
        S.geometry[parameter] = _own_geometry(W, first)
        return
    key = D.tied.missing[1 : 2 + last - first]  # built in place: ``find_list`` leaves it there if it is missing
    key[0] = parameter
    for use in range(first, last):
        key[1 + use - first] = D.cut[_own_geometry(W, use)]
    S.geometry[parameter] = D.tied_geometry[find_list(D.tied, key)]


@compiled
def _own_geometry(W, use):  # type: ignore[no-untyped-def]
    """The geometry by which an operator alone would cut a parameter. ``use``: place in ``GraphTables.user``."""
    G, V, C = W.graph, W.variants, W.state
    return V.data[V.rows[C.variant[G.user[use]], GEOMETRIES] + G.user_place[use]]


@compiled
def first_user_with_gradient(D: ShardTables, geometry: int) -> int:
    """``lowest`` of the first shard that gets a gradient; -1 if none does."""
    for shard in range(D.ptr[geometry], D.ptr[geometry + 1]):
        if D.lowest[shard] >= 0:
            return D.lowest[shard]
    return -1


@compiled
def find_members(W: World, parameter: int, shard: int) -> None:
    """Fill ``use_slot`` (of the backward pass), ``use_device``, ``use_lookups``, ``use_block``: the tiles that use a shard, replicas of a
    tile one after the other. Fill ``members``: the number of readers, then these devices, ascending."""
    D, S = W.shards, W.scratch
    first = D.ptr[S.geometry[parameter]]
    unread = D.use_ptr[shard] == D.use_ptr[shard + 1]  # a shard that no tile reads is on the first device of the first shard
    _gather_uses(W, parameter, first if unread else shard)
    S.count[STAMP] += 1
    n = 0
    for i in range(S.count[USES]):
        device = S.use_device[i]
        if S.mark[device] != S.count[STAMP]:
            S.mark[device] = S.count[STAMP]
            S.members[1 + n] = device
            n += 1
    sort(S.members, 1, 1 + n)
    S.members[0] = 1 if unread else n


@compiled
def _gather_uses(W, parameter, shard):  # type: ignore[no-untyped-def]
    G, D, S = W.graph, W.shards, W.scratch
    S.count[USES] = 0
    first = G.user_ptr[parameter]
    alone = G.user_ptr[parameter + 1] - first == 1
    for i in range(D.use_ptr[shard], D.use_ptr[shard + 1]):
        if alone:
            _add_use(W, first, D.use_place[i])
            continue
        use = first + D.use_user[i]
        own = D.ptr[_own_geometry(W, use)] + D.use_place[i]
        for j in range(D.use_ptr[own], D.use_ptr[own + 1]):
            _add_use(W, use, D.use_place[j])


@compiled
def _add_use(W, use, first):  # type: ignore[no-untyped-def]
    """Add the tile ``first`` of every replica of an operator. ``use``: place in ``GraphTables.user``."""
    G, V, C, S = W.graph, W.variants, W.state, W.scratch
    op = G.user[use]
    lookups = V.rows[C.variant[op], LOOKUPS]
    rows = V.data[lookups + G.user_place[use] * V.rows[C.variant[op], CELLS] + first] if lookups >= 0 else 0
    count, cells, n = C.tiles[op], V.rows[C.variant[op], CELLS], S.count[USES]
    if n + count // cells > len(S.use_slot):
        raise MemoryError(FULL)
    block = n
    for tile in range(first, count, cells):
        S.use_slot[n], S.use_device[n] = C.tile_slot[op] + count + tile, C.dev[C.dev_ptr[op] + tile]
        S.use_lookups[n], S.use_block[n] = rows, block
        n += 1
    S.count[USES] = n


@compiled
def find_leaders(W: World, code: int) -> None:
    """Fill ``leader``: for each reader, the place of the reader that communicates for it: its own, or with local aggregation that of the
    first one of its host; and ``peers``. Call it after ``find_members``."""
    K, S = W.cluster, W.scratch
    local, n = code & LOCAL, 0
    S.count[STAMP] += 1
    for i in range(S.members[0]):
        S.leader[i] = i
        host = K.host_device[S.members[1 + i]]
        if local and S.mark[host] == S.count[STAMP]:
            S.leader[i] = S.mark_value[host]
            continue
        if local:
            S.mark[host], S.mark_value[host] = S.count[STAMP], i
        n += 1
        S.peers[n] = S.members[1 + i]
    S.peers[0] = n


@compiled
def compresses(W: World, code: int) -> bool:
    """Whether a shard's gradients are compressed: if the method does that, and several peers exchange them. Call it after
    ``find_members``; then ``find_leaders`` need not be called."""
    if not code & COMPRESSED:
        return False
    find_leaders(W, code)
    return bool(W.scratch.peers[0] > 1)


@compiled
def is_trained(G, parameter):  # type: ignore[no-untyped-def]
    """Whether some operator uses the parameter, and it is not frozen."""
    return G.trainable[parameter] and is_used(G, parameter)


@compiled
def is_used(G, parameter):  # type: ignore[no-untyped-def]
    """Whether some operator uses the parameter."""
    return G.user_ptr[parameter] < G.user_ptr[parameter + 1]
