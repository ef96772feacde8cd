"""How much travels between readers and servers (compiled). The counterpart of ``plan.syncs.amounts`` and ``plan.syncs.parameter_server``.

All functions are about one shard, after ``members.find_members``. Its partition i has ``S.p_rows[i]`` rows, on the device
``S.p_server[i]``.
"""

from __future__ import annotations

from soap.simulator.compiled.communication import begin_joining, join_flow
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.rows import INDEX_BYTES, count_lookups, count_together, is_sparse, part_of_rows, touched_by
from soap.simulator.compiled.scratch import FULL
from soap.simulator.compiled.syncs.codes import partitions_of
from soap.simulator.compiled.syncs.exchange import round_of_flows
from soap.simulator.compiled.syncs.members import find_leaders
from soap.simulator.compiled.world import World


@compiled
def prepare(W: World, parameter: int, shard: int, number: int, code: int) -> int:
    """Prepare a shard for the other functions; returns its number of partitions.

    Fills ``leader``: for each reader, the place of its group's first reader; ``touched``: rows of the parameter that each reader touches,
    -1 if it is dense; ``together``: the same for each group, at its leader's place; ``p_rows`` and ``p_server``: by partition.
    """
    G, K, D, S = W.graph, W.cluster, W.shards, W.scratch
    rows, servers = D.rows[shard], len(K.server)
    count = min(partitions_of(code), rows)
    if max(count, S.members[0]) > len(S.p_rows) or S.members[0] > len(S.leader):
        raise MemoryError(FULL)
    for i in range(count):
        S.p_rows[i] = rows // count + (1 if i < rows % count else 0)
        S.p_server[i] = K.server[(G.first_server[parameter] + number + i) % servers]
    find_leaders(W, code)
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
def _indices(G, parameter, touched, rows):  # type: ignore[no-untyped-def]
    return 0 if touched < 0 else part_of_rows(G, parameter, touched, rows) * INDEX_BYTES


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
def pull_ns(W: World, parameter: int, shard: int, count: int) -> tuple[int, int]:
    """(duration in ns, bytes) of a pull from ``count`` partitions; zeros if nothing travels. Its links are added to ``res``."""
    K, S = W.cluster, W.scratch
    _with_servers(W, parameter, shard, count, True)
    duration, moved = round_of_flows(K, S, 0)
    _inside(W, parameter, shard, True)
    inner_ns, inner = round_of_flows(K, S, 0)
    return duration + inner_ns, moved + inner


@compiled
def push_ns(W: World, parameter: int, shard: int, count: int) -> tuple[int, int]:
    """(duration in ns, bytes) of a push to ``count`` partitions; zeros if nothing travels. Its links are added to ``res``."""
    K, S = W.cluster, W.scratch
    most = _inside(W, parameter, shard, False)
    inner_ns, inner = round_of_flows(K, S, most)
    _with_servers(W, parameter, shard, count, False)
    duration, moved = round_of_flows(K, S, 0)
    return duration + inner_ns, moved + inner


@compiled
def _with_servers(W, parameter, shard, count, pull):  # type: ignore[no-untyped-def]
    """Begin a round of the flows between servers and leaders."""
    G, K, D, S = W.graph, W.cluster, W.shards, W.scratch
    stamp, devices = begin_joining(S), len(K.device_type)
    for part in range(count):
        server, rows = S.p_server[part], S.p_rows[part]
        for i in range(S.members[0]):
            device = S.members[1 + i]
            if S.leader[i] != i or device == server:
                continue
            size = _values(G, D, parameter, shard, S.together[i], rows)
            if not pull:
                join_flow(S, stamp, devices, device, server, size)
                continue
            join_flow(S, stamp, devices, server, device, size)
            if S.together[i] >= 0:
                join_flow(S, stamp, devices, device, server, _indices(G, parameter, S.together[i], rows))


@compiled
def _inside(W, parameter, shard, pull):  # type: ignore[no-untyped-def]
    """Begin a round of the flows between leaders and the other readers of their groups. Returns the most bytes pushed to one leader."""
    G, K, D, S = W.graph, W.cluster, W.shards, W.scratch
    stamp, devices, rows = begin_joining(S), len(K.device_type), D.rows[shard]
    for i in range(S.members[0]):
        S.received[i] = 0
    most = 0
    for i in range(S.members[0]):
        place = S.leader[i]
        if place == i:
            continue
        device, leader = S.members[1 + i], S.members[1 + place]
        size = _values(G, D, parameter, shard, S.touched[i], rows)
        if not pull:
            join_flow(S, stamp, devices, device, leader, size)
            S.received[place] += size
            most = max(most, S.received[place])
            continue
        join_flow(S, stamp, devices, leader, device, size)
        if S.touched[i] >= 0:
            join_flow(S, stamp, devices, device, leader, _indices(G, parameter, S.touched[i], rows))
    return most
