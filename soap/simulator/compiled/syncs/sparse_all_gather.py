"""Sparse all-gathers: all readers send each other the rows of their gradients (compiled). See ``plan.syncs.sparse_all_gather``."""

from __future__ import annotations

from soap.plan.syncs.seam import SUM
from soap.simulator.compiled.chunks import cut_sum
from soap.simulator.compiled.communication import begin_joining, find_list, join_flow
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.rows import INDEX_BYTES, count_lookups, part_of_rows, touched_by
from soap.simulator.compiled.scratch import TASKS
from soap.simulator.compiled.state import SYNC_BUCKET
from soap.simulator.compiled.syncs.exchange import add_exchange, begin_exchange, round_of_flows, wait_for_tiles
from soap.simulator.compiled.task_keys import SYNC, task_key
from soap.simulator.compiled.world import World


@compiled
def add_gather(W, parameter, shard, number, slot0):  # type: ignore[no-untyped-def]
    """Add the task of a sparse all-gather, which the readers' updates wait for, after the ``count[TASKS]`` tasks from ``slot0`` on."""
    R, C, S = W.groups, W.state, W.scratch
    slot = slot0 + S.count[TASKS]
    S.count[TASKS] += 1
    group = find_list(R.sets, S.members[1 : 1 + S.members[0]])
    begin_exchange(S)
    duration, moved = gather_ns(W, parameter, shard)
    add_exchange(W, slot, task_key(SYNC, parameter, SUM, number, 0, 0), duration, moved)
    C.kind[slot], C.owner[slot], C.index[slot], C.waits[slot] = SYNC_BUCKET, -1, group, 0
    wait_for_tiles(C, S, slot, slot + 1)
    cut_sum(R, C, S, slot, slot0)


@compiled
def gather_ns(W: World, parameter: int, shard: int) -> tuple[int, int]:
    """(duration in ns, bytes) of the sparse all-gather of a shard's gradient. Its links are added to ``res``."""
    G, K, D, S = W.graph, W.cluster, W.shards, W.scratch
    count_lookups(S)
    stamp, devices = begin_joining(S), len(K.device_type)
    for i in range(S.members[0]):
        rows = part_of_rows(G, parameter, touched_by(G, parameter, S.lookups[i]), D.rows[shard])
        size = rows * (D.row_bytes[shard] + INDEX_BYTES)
        for j in range(S.members[0]):
            if j != i:
                join_flow(S, stamp, devices, S.members[1 + i], S.members[1 + j], size)
    return round_of_flows(K, S, 0)


@compiled
def gathered_bytes(W: World, parameter: int, shard: int) -> int:
    """Bytes of a gathered shard that each reader updates: the rows that any reader touches. Call it after ``find_members``."""
    G, D, S = W.graph, W.shards, W.scratch
    touched = touched_by(G, parameter, count_lookups(S))
    return part_of_rows(G, parameter, touched, D.rows[shard]) * D.row_bytes[shard]


@compiled
def gathered_rows(W: World, parameter: int, shard: int) -> int:
    """Rows that each reader adds up, its own and those of the others; 0 if there are no others. Call it after ``gathered_bytes``."""
    G, D, S = W.graph, W.shards, W.scratch
    rows = 0
    for i in range(S.members[0] if S.members[0] > 1 else 0):
        rows += part_of_rows(G, parameter, touched_by(G, parameter, S.lookups[i]), D.rows[shard])
    return rows
