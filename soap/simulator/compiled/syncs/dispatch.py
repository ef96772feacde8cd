"""Regions that travel by themselves (compiled): those on servers, and sparse all-gathers."""

from __future__ import annotations

from soap.plan.syncs.seam import Phase
from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import TASKS
from soap.simulator.compiled.syncs.codes import is_alone
from soap.simulator.compiled.syncs.exchange import wait_for_tiles
from soap.simulator.compiled.syncs.members import find_members, is_trained
from soap.simulator.compiled.syncs.parameter_server import serve_region
from soap.simulator.compiled.syncs.server_traffic import prepare
from soap.simulator.compiled.syncs.templates import add_rows, find_template, phase_row, put_alone
from soap.simulator.compiled.world import World

_AFTER_BACKWARD = int(Phase.AFTER_BACKWARD)


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
                serve_region(W, bucket, template, parameter, shard, slot0)
            elif Y.limits[2 * template] == 0 and phase_row(Y, template, _AFTER_BACKWARD) >= 0:
                prepare(W, template, parameter, shard)
                put_alone(W, bucket, template, parameter, shard)
                slot = slot0 + S.count[TASKS]
                S.count[TASKS] += 1
                wait_for_tiles(C, S, slot, slot + 1)
                add_rows(W, bucket, _AFTER_BACKWARD, slot, slot0)
