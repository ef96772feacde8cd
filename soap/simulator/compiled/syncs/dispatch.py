"""Which method synchronizes a shard (compiled): the one place that leads from a parameter's code to the method's own tasks."""

from __future__ import annotations

from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.rows import is_sparse
from soap.simulator.compiled.scratch import TASKS
from soap.simulator.compiled.syncs.codes import gathers_rows, has_server, sums_in_place
from soap.simulator.compiled.syncs.members import find_members, is_trained
from soap.simulator.compiled.syncs.parameter_server import serve_region
from soap.simulator.compiled.syncs.sparse_all_gather import add_gather
from soap.simulator.compiled.world import World


@compiled
def owned_by_servers(W: World, parameter: int) -> bool:
    """Whether servers keep a shard that gets a gradient, after ``find_members``. What one device reads needs none, unless by rows."""
    G, C, S = W.graph, W.state, W.scratch
    return has_server(C.sync[parameter]) and (S.members[0] > 1 or is_sparse(G, parameter))


@compiled
def add_owners_tasks(W: World, slot0: int) -> None:
    """Add the tasks of all regions on servers, and of all gathered shards, behind the ``count[TASKS]`` that stand from ``slot0`` on, in the
    order of the parameters, whose geometries are known."""
    G, D, C, S = W.graph, W.shards, W.state, W.scratch
    fill(S.taken, 0, len(S.taken), 0)
    for parameter in range(len(G.parameter_dtype)):
        if sums_in_place(C.sync[parameter]) or not is_trained(G, parameter):
            continue
        geometry = S.geometry[parameter]
        for shard in range(D.ptr[geometry], D.ptr[geometry + 1]):
            if D.lowest[shard] < 0:
                continue
            find_members(W, parameter, shard)
            if owned_by_servers(W, parameter):
                serve_region(W, parameter, shard, shard - D.ptr[geometry], slot0)
            elif gathers_rows(C.sync[parameter]) and S.members[0] > 1:
                add_gather(W, parameter, shard, shard - D.ptr[geometry], slot0 + S.count[TASKS])
                S.count[TASKS] += 1
