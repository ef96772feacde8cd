"""How many rows readers and owners have to do with (compiled). The counterpart of ``plan.syncs.amounts``, and of the updates of
``plan.syncs.parameter_server`` and ``sparse_all_gather``.

All functions are about one shard, after ``members.find_members``. Its partition i has ``S.p_rows[i]`` rows.
"""

from __future__ import annotations

from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.rows import count_lookups, count_together, is_sparse, part_of_rows, touched_by
from soap.simulator.compiled.scratch import FULL, TOUCHED
from soap.simulator.compiled.syncs.members import find_leaders
from soap.simulator.compiled.syncs.pricing import adding_ns, price_ns, table_price_ns
from soap.simulator.compiled.world import World


@compiled
def prepare(W: World, template: int, parameter: int, shard: int) -> None:
    """Prepare a shard for ``owner_ns``, and its template's amounts of rows.

    Fills ``leader``: for each reader, the place of its group's first reader; ``touched``: rows of the parameter that each reader touches,
    -1 if it is dense; ``together``: the same for each group, at its leader's place; ``count[TOUCHED]``: for all; ``p_rows``: by partition
    of the template.
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
    S.count[TOUCHED] = -1
    if sparse:
        S.count[TOUCHED] = touched_by(G, parameter, count_lookups(S))
        count_together(S)
    for i in range(S.members[0]):
        S.touched[i] = touched_by(G, parameter, S.lookups[i]) if sparse else -1
        if S.leader[i] == i:
            S.together[i] = touched_by(G, parameter, S.together[i]) if sparse else -1


@compiled
def owner_ns(W, parameter, shard, rows, owner, bandwidth, row_seconds):  # type: ignore[no-untyped-def]
    """What an owner of so many of a shard's rows takes to add up what groups of readers give it, and to update them: of a sparse parameter
    those that they touch. ``owner``: as in ``ShardTables.price``."""
    G, D, S = W.graph, W.shards, W.scratch
    groups, added, row_bytes = 0, 0, D.row_bytes[shard]
    for i in range(S.members[0]):
        if S.leader[i] == i:
            groups += 1
            added += part_of_rows(G, parameter, S.together[i], rows) if S.count[TOUCHED] >= 0 else rows
    if S.count[TOUCHED] < 0:  # added onto the first group's
        return adding_ns((added - rows) * row_bytes, 0, bandwidth, row_seconds) + price_ns(D, S, owner, rows * row_bytes)
    added = added if groups > 1 else 0
    update = table_price_ns(W, owner, part_of_rows(G, parameter, S.count[TOUCHED], rows) * row_bytes, rows * row_bytes)
    return adding_ns(added * row_bytes, added, bandwidth, row_seconds) + update
