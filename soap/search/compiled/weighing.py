"""Rough cost of a candidate beside its neighbours (compiled): ``space_arrays.rough_ns`` plus transfers along edges."""

from __future__ import annotations

from soap.search.compiled.memory import ESTIMATES
from soap.search.compiled.space_arrays import GridTables, SearchTables
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.world import World


@compiled
def own_ns(Q: GridTables, op: int, grid: int) -> float:
    """Rough cost of an operator's grid without neighbours, ns."""
    return Q.estimate[Q.estimate_ptr[op] + grid - Q.grid_ptr[Q.space[op]]]


@compiled
def rough_cost_ns(W: World, Z: SearchTables, op: int, slot: int) -> float:
    """Rough cost of a candidate, given the neighbours' configurations, ns."""
    K = W.cluster
    Q, N, X = Z.grids, Z.neighbours, Z.chain
    found = own_ns(Q, op, X.c_grid[slot])
    for edge in range(N.edge_ptr[op], N.edge_ptr[op + 1]):
        neighbour = N.neighbour[edge]
        if X.grid[neighbour] >= 0:
            first, at = slot * len(X.order), neighbour * len(X.order)
            found += edge_ns(Z, K, op, edge, X.c_grid[slot], X.c_dev, first, X.grid[neighbour], X.held, at)
    return found


@compiled
def edge_ns(Z, K, op, edge, mine, own, own_at, theirs, other, other_at):  # type: ignore[no-untyped-def]
    """Time of the transfers along an edge, ns: twice (forward and backward) that of the device that waits longest. ``mine``: the operator's
    grid, on ``own[own_at:]``; ``theirs``: the neighbour's, on ``other[other_at:]``."""
    Q, N, X = Z.grids, Z.neighbours, Z.chain
    X.at[ESTIMATES] += 1  # earlier stamps no longer count
    neighbour, reads = N.neighbour[edge], N.reads[edge]
    reader, writer = (mine, theirs) if reads else (theirs, mine)
    for tile in range(Q.tiles[writer]):
        device = _device(own, own_at, other, other_at, not reads, tile)
        X.where[device], X.stamp[device] = tile, X.at[ESTIMATES]
    need, unshared = 1.0, float(Q.tiles[writer]) / Q.replicas[writer]
    for pair in range(N.pair_ptr[edge], N.pair_ptr[edge + 1]):
        need /= _parts(Q, N, reader, pair, reads)
        unshared /= _parts(Q, N, writer, pair, not reads)
    worst = 0.0
    for tile in range(Q.tiles[reader]):
        device = _device(own, own_at, other, other_at, reads, tile)
        local = 0.0
        if X.stamp[device] == X.at[ESTIMATES]:
            local = _overlap(Q, N, op, neighbour, edge, reader, writer, reads, tile, X.where[device]) / unshared
        if local < need:
            source = _device(own, own_at, other, other_at, not reads, tile % Q.tiles[writer])
            if source == device:
                source = _device(own, own_at, other, other_at, not reads, (tile + 1) % Q.tiles[writer])
            worst = max(worst, (need - local) * K.seconds_per_byte[source, device])
    return 2e9 * worst * N.bytes[edge]


@compiled
def _device(own, own_at, other, other_at, mine, tile):  # type: ignore[no-untyped-def]
    return own[own_at + tile] if mine else other[other_at + tile]


@compiled
def _parts(Q, N, grid, pair, mine):  # type: ignore[no-untyped-def]
    """The number of parts into which a grid cuts the dimension of a pair."""
    return Q.degree[Q.degree_ptr[grid] + (N.mine[pair] if mine else N.theirs[pair])]


@compiled
def _overlap(Q, N, op, neighbour, edge, reader, writer, reads, tile, other):  # type: ignore[no-untyped-def]
    """The share of the data on an edge that a reading tile needs and a writing tile has."""
    share = 1.0
    read_by, read_from = (op, neighbour) if reads else (neighbour, op)
    for pair in range(N.pair_ptr[edge], N.pair_ptr[edge + 1]):
        a, b = _parts(Q, N, reader, pair, reads), _parts(Q, N, writer, pair, not reads)
        i = _coordinate(Q, reader, read_by, N.mine[pair] if reads else N.theirs[pair], tile)
        j = _coordinate(Q, writer, read_from, N.theirs[pair] if reads else N.mine[pair], other)
        share *= max(0.0, min((i + 1) / a, (j + 1) / b) - max(i / a, j / b))
    return share


@compiled
def _coordinate(Q, grid, op, factor, tile):  # type: ignore[no-untyped-def]
    factors = Q.size_ptr[op + 1] - Q.size_ptr[op]
    for other in range(factors - 1, factor, -1):
        tile //= Q.degree[Q.degree_ptr[grid] + other]
    return tile % Q.degree[Q.degree_ptr[grid] + factor]
