"""Which method synchronizes a shard (compiled): the only place that goes from a parameter's code to the method's own tasks."""

from __future__ import annotations

from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.rows import is_sparse
from soap.simulator.compiled.syncs.codes import gathers_rows, has_server, is_compressed, is_in_buckets
from soap.simulator.compiled.syncs.members import find_members, is_trained
from soap.simulator.compiled.syncs.parameter_server import serve_region
from soap.simulator.compiled.syncs.sparse_all_gather import add_gather
from soap.simulator.compiled.world import World


@compiled
def owned_by_servers(W: World, parameter: int) -> bool:
    """Whether servers own a shard that gets a gradient. A dense shard with a single reader needs no server. Call it after
    ``find_members``."""
    G, C, S = W.graph, W.state, W.scratch
    return has_server(C.sync[parameter]) and (S.members[0] > 1 or is_sparse(G, parameter))


@compiled
def add_owners_tasks(W: World, slot0: int) -> None:
    """Add the tasks of all regions on servers, and all sparse all-gathers, in the order of the parameters, after the ``count[TASKS]`` tasks
    from ``slot0`` on. Needs the parameters' geometries."""
    G, D, C, S = W.graph, W.shards, W.state, W.scratch
    fill(S.taken, 0, len(S.taken), 0)
    for parameter in range(len(G.parameter_dtype)):
        if is_in_buckets(C.sync[parameter]) or is_compressed(C.sync[parameter]) or not is_trained(G, parameter):
            continue
        geometry = S.geometry[parameter]
        for shard in range(D.ptr[geometry], D.ptr[geometry + 1]):
            if D.lowest[shard] < 0:
                continue
            find_members(W, parameter, shard)
            if owned_by_servers(W, parameter):
                serve_region(W, parameter, shard, shard - D.ptr[geometry], slot0)
            elif gathers_rows(C.sync[parameter]) and S.members[0] > 1:
                add_gather(W, parameter, shard, shard - D.ptr[geometry], slot0)
