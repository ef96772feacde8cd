"""Who keeps which shard of a parameter at present (compiled). The counterpart of ``planning._make_cells`` with its devices."""

from __future__ import annotations

from soap.simulator.compiled.arrays import sort
from soap.simulator.compiled.communication import find_list
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import EDGES, FULL, STAMP, Scratch
from soap.simulator.compiled.state import ShardTables, State
from soap.simulator.compiled.tables import GraphTables
from soap.simulator.compiled.variants import CELLS, GEOMETRIES, VariantTables


@compiled
def find_geometry(G: GraphTables, V: VariantTables, D: ShardTables, C: State, op: int, k: int) -> int:
    """How the k-th of an operator's parameters is cut at present."""
    parameter = G.parameter[G.parameter_ptr[op] + k]
    first, last = G.user_ptr[parameter], G.user_ptr[parameter + 1]
    if last - first == 1:
        return V.data[V.rows[C.variant[op], GEOMETRIES] + k]
    key = D.tied.missing[1 : 2 + last - first]  # where it is to stand if it is missing
    key[0] = parameter
    for i in range(first, last):
        key[1 + i - first] = C.variant[G.user[i]]
    return D.tied_geometry[find_list(D.tied, key)]


@compiled
def first_user_with_gradient(D: ShardTables, geometry: int) -> int:
    """``lowest`` of the first shard that gets a gradient; -1 if none does."""
    for shard in range(D.ptr[geometry], D.ptr[geometry + 1]):
        if D.lowest[shard] >= 0:
            return D.lowest[shard]
    return -1


@compiled
def find_keepers(
    G: GraphTables, V: VariantTables, D: ShardTables, C: State, S: Scratch, parameter: int, geometry: int, shard: int
) -> None:
    """``members``: number of devices that keep a shard, then the devices, ascending."""
    read = shard
    if D.use_ptr[shard] == D.use_ptr[shard + 1]:
        read = D.ptr[geometry]  # what no tile reads is kept by the first device of the first shard
    S.count[STAMP] += 1
    n = 0
    for i in range(D.use_ptr[read], D.use_ptr[read + 1]):
        op = G.user[G.user_ptr[parameter] + D.use_user[i]]
        cells = V.rows[C.variant[op], CELLS]
        for tile in range(D.use_tile[i], C.tiles[op], cells):
            device = C.dev[C.dev_ptr[op] + tile]
            if S.mark[device] != S.count[STAMP]:
                S.mark[device] = S.count[STAMP]
                S.members[1 + n] = device
                n += 1
    sort(S.members, 1, 1 + n)
    S.members[0] = n if read == shard else 1


@compiled
def is_served(C: State, S: Scratch, parameter: int) -> bool:
    """Whether a parameter server updates a shard that gets a gradient, after ``find_keepers``. What one device keeps needs none."""
    return C.partitions[parameter] > 0 and S.members[0] > 1


@compiled
def add_sync_edge(S: Scratch, source: int, target: int) -> None:
    """The task in slot ``target`` waits for the backward pass of a tile."""
    n = S.count[EDGES]
    if n + 1 > len(S.e_src):
        raise MemoryError(FULL)
    S.e_src[n], S.e_dst[n] = source, target
    S.count[EDGES] = n + 1
