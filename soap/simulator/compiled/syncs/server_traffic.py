"""How many rows readers and servers have to do with (compiled). The counterpart of ``plan.syncs.amounts``, and of the updates of
``plan.syncs.parameter_server`` and ``sparse_all_gather``.

All functions are about one shard, after ``members.find_members``. Its partition i has ``S.p_rows[i]`` rows.
"""

from __future__ import annotations

from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.rows import count_lookups, count_together, is_sparse, part_of_rows, touched_by
from soap.simulator.compiled.scratch import FULL
from soap.simulator.compiled.syncs.members import find_leaders
from soap.simulator.compiled.world import World


@compiled
def prepare(W: World, template: int, parameter: int, shard: int) -> int:
    """Prepare a shard for the other functions, and its template's amounts of rows; returns its number of partitions.

    Fills ``leader``: for each reader, the place of its group's first reader; ``touched``: rows of the parameter that each reader touches,
    -1 if it is dense; ``together``: the same for each group, at its leader's place; ``p_rows``: by partition of the template.
    """
    G, D, S, partitions = W.graph, W.shards, W.scratch, W.templates.partitions[template]
    rows = D.rows[shard]
    count = min(partitions, rows)
    if max(partitions, S.members[0]) > len(S.p_rows) or S.members[0] > len(S.leader):
        raise MemoryError(FULL)
    for i in range(partitions):
        S.p_rows[i] = rows // count + (1 if i < rows % count else 0) if i < count else 0
    find_leaders(W, W.state.sync[parameter])
    sparse = is_sparse(G, parameter)
    if sparse:
        count_lookups(S)
        count_together(S)
    for i in range(S.members[0]):
        S.touched[i] = touched_by(G, parameter, S.lookups[i]) if sparse else -1
        if S.leader[i] == i:
            S.together[i] = touched_by(G, parameter, S.together[i]) if sparse else -1
    return count


@compiled
def _values(G, D, parameter, shard, touched, rows):  # type: ignore[no-untyped-def]
    """Bytes of ``rows`` rows of a region, or of those of them that are touched if the parameter is sparse."""
    return (rows if touched < 0 else part_of_rows(G, parameter, touched, rows)) * D.row_bytes[shard]


@compiled
def added_bytes(W: World, parameter: int, shard: int, part: int) -> int:
    """Bytes that a partition's server adds up."""
    G, D, S = W.graph, W.shards, W.scratch
    groups = added = 0
    for i in range(S.members[0]):
        if S.leader[i] == i:
            groups += 1
            added += _values(G, D, parameter, shard, S.together[i], S.p_rows[part])
    if groups < 2:
        return 0
    return added if is_sparse(G, parameter) else added - S.p_rows[part] * D.row_bytes[shard]


@compiled
def added_rows(W: World, parameter: int, part: int) -> int:
    """Rows that a partition's server adds up; 0 for a dense parameter."""
    G, S = W.graph, W.scratch
    rows = 0
    for i in range(S.members[0]):
        if S.leader[i] == i and S.together[i] >= 0:
            rows += part_of_rows(G, parameter, S.together[i], S.p_rows[part])
    return rows


@compiled
def updated_bytes(W: World, parameter: int, shard: int, part: int) -> int:
    """Bytes that a partition's server then updates."""
    G, D, S = W.graph, W.shards, W.scratch
    touched = -1
    if is_sparse(G, parameter):
        touched = touched_by(G, parameter, count_lookups(S))
    return _values(G, D, parameter, shard, touched, S.p_rows[part])


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
