"""Suggestions: configurations that fit an operator's neighbours, or that reference strategies give it (compiled). The counterpart of
``search.alignment``."""

from __future__ import annotations

from soap.search.compiled.candidates import FIRST_LISTED, log_weight
from soap.search.compiled.memory import MOST_LISTED
from soap.search.compiled.space_arrays import NO_WEIGHT, SearchTables
from soap.simulator.compiled.jit import compiled


@compiled
def list_candidates(Z: SearchTables, op: int) -> int:
    """List what references give an operator, and what its neighbours suggest. Returns how many. The list must not depend on the operator's
    own configuration: the move's detailed balance rests on that."""
    N, X = Z.neighbours, Z.chain
    n = list_references(Z, op)
    for edge in range(N.edge_ptr[op], N.edge_ptr[op + 1]):
        neighbour = N.neighbour[edge]
        if X.grid[neighbour] >= 0:
            n = list_aligned(Z, op, edge, X.grid[neighbour], X.held, neighbour * len(X.order), n)
    return n


@compiled
def list_references(Z: SearchTables, op: int) -> int:
    """List what references give an operator. Returns how many."""
    Q, N, X = Z.grids, Z.neighbours, Z.chain
    n = 0
    for reference in range(N.reference_ptr[op], N.reference_ptr[op + 1]):
        if n < MOST_LISTED:
            slot = FIRST_LISTED + n
            for i in range(N.dev_ptr[reference], N.dev_ptr[reference + 1]):
                X.c_dev[slot * len(X.order) + i - N.dev_ptr[reference]] = N.dev[i]
            X.c_grid[slot] = N.grid[reference]
            X.c_log[slot] = log_weight(Q, X, op, N.grid[reference], slot * len(X.order))
            n += 1
    return n


@compiled
def list_aligned(Z, op, edge, source, devices, first, n):  # type: ignore[no-untyped-def]
    """List ``alignment.aligned_with`` of a neighbour with grid ``source`` on ``devices[first:]``, behind ``n`` suggestions. Returns the new
    number of suggestions."""
    Q, N = Z.grids, Z.neighbours
    tiles, sizes, factors = Q.tiles[source], Q.size_ptr[op], Q.size_ptr[op + 1] - Q.size_ptr[op]
    shared, fits = 1, True
    for pair in range(N.pair_ptr[edge], N.pair_ptr[edge + 1]):
        degree = Q.degree[Q.degree_ptr[source] + N.theirs[pair]]
        shared *= degree
        fits &= degree <= Q.size[sizes + N.mine[pair]]
    rest = tiles // shared
    if fits:
        n = _follow(Z, op, edge, source, devices, first, rest, -1, n)
        if rest > 1:
            n = _follow(Z, op, edge, source, devices, first, 1, -1, n)
            for factor in range(factors):
                if Q.size[sizes + factor] >= rest and not _is_shared(Q, N, edge, source, factor):
                    n = _follow(Z, op, edge, source, devices, first, rest, factor, n)
    if shared > 1:
        for factor in range(-1, factors):
            if factor < 0 or Q.size[sizes + factor] >= tiles:
                n = _single_axis(Z, op, devices, first, tiles, factor, n)
    return n


@compiled
def _is_shared(Q, N, edge, source, factor):  # type: ignore[no-untyped-def]
    found = False
    for pair in range(N.pair_ptr[edge], N.pair_ptr[edge + 1]):
        found |= N.mine[pair] == factor and Q.degree[Q.degree_ptr[source] + N.theirs[pair]] > 1
    return found


@compiled
def _find_grid(Q, N, op, edge, source, replicas, extra, length):  # type: ignore[no-untyped-def]
    """The grid with these ``replicas``, the neighbour's degrees for shared factors (if ``edge`` >= 0) and ``length`` parts of the factor
    ``extra``; -1 if the space does not have it."""
    space, factors = Q.space[op], Q.size_ptr[op + 1] - Q.size_ptr[op]
    key = replicas
    for factor in range(factors):
        key = (key * 31 + _degree(Q, N, edge, source, factor, extra, length)) & 0x3FFFFFFF
    place = key & Q.lookup_mask[space]
    while True:
        grid = Q.lookup[Q.lookup_ptr[space] + place]
        if grid < 0:
            return -1
        equal = Q.replicas[grid] == replicas
        for factor in range(factors):
            equal &= Q.degree[Q.degree_ptr[grid] + factor] == _degree(Q, N, edge, source, factor, extra, length)
        if equal:
            return grid
        place = (place + 1) & Q.lookup_mask[space]


@compiled
def _degree(Q, N, edge, source, factor, extra, length):  # type: ignore[no-untyped-def]
    if factor == extra:
        return length
    degree = 1
    if edge >= 0:
        for pair in range(N.pair_ptr[edge], N.pair_ptr[edge + 1]):
            if N.mine[pair] == factor:
                degree = Q.degree[Q.degree_ptr[source] + N.theirs[pair]]
    return degree


@compiled
def _follow(Z, op, edge, source, devices, start, rest, extra, n):  # type: ignore[no-untyped-def]
    """``alignment._follow``. ``rest``: how many cells of the neighbour's other axes are kept; 1 drops them. Returns the new number of
    suggestions."""
    Q, N, X = Z.grids, Z.neighbours, Z.chain
    neighbour = N.neighbour[edge]
    grid = _find_grid(Q, N, op, edge, source, rest if extra < 0 else 1, extra, rest)
    if grid < 0 or n >= MOST_LISTED:
        return n
    first = (FIRST_LISTED + n) * len(X.order)
    axes, theirs = Q.size_ptr[op + 1] - Q.size_ptr[op], Q.size_ptr[neighbour + 1] - Q.size_ptr[neighbour]
    for tile in range(Q.tiles[grid]):
        left, stride, from_tile = tile, 1, 0
        other = 0
        for factor in range(axes - 1, -1, -1):
            degree = Q.degree[Q.degree_ptr[grid] + factor]
            cell, left = left % degree, left // degree
            if factor == extra:
                other = cell
        if extra < 0:
            other = left  # the replica
        for axis in range(theirs, -1, -1):  # the neighbour's axes, last one first; 0: its replicas
            length = Q.replicas[source] if axis == 0 else Q.degree[Q.degree_ptr[source] + axis - 1]
            mine = _follower(Q, N, edge, source, axis - 1)
            if mine >= 0:
                from_tile += stride * _cell(Q, grid, axes, tile, mine)
            else:
                from_tile += stride * (other % length if rest > 1 else 0)
                other //= length
            stride *= length
        X.c_dev[first + tile] = devices[start + from_tile]
    return _keep(Q, X, op, grid, n)


@compiled
def _follower(Q, N, edge, source, theirs):  # type: ignore[no-untyped-def]
    """The operator's own factor that follows a split factor of the neighbour; -1 if there is none."""
    mine = -1
    if theirs >= 0 and Q.degree[Q.degree_ptr[source] + theirs] > 1:
        for pair in range(N.pair_ptr[edge], N.pair_ptr[edge + 1]):
            if N.theirs[pair] == theirs:
                mine = N.mine[pair]
    return mine


@compiled
def _cell(Q, grid, axes, tile, factor):  # type: ignore[no-untyped-def]
    """A tile's coordinate along a factor."""
    for other in range(axes - 1, factor, -1):
        tile //= Q.degree[Q.degree_ptr[grid] + other]
    return tile % Q.degree[Q.degree_ptr[grid] + factor]


@compiled
def _single_axis(Z, op, devices, start, tiles, factor, n):  # type: ignore[no-untyped-def]
    """Suggest all of the neighbour's devices for one factor (-1: for replicas). Returns the new number of suggestions."""
    Q, N, X = Z.grids, Z.neighbours, Z.chain
    grid = _find_grid(Q, N, op, -1, 0, tiles if factor < 0 else 1, factor, tiles)
    if grid < 0 or n >= MOST_LISTED:
        return n
    first = (FIRST_LISTED + n) * len(X.order)
    for tile in range(tiles):
        X.c_dev[first + tile] = devices[start + tile]
    return _keep(Q, X, op, grid, n)


@compiled
def _keep(Q, X, op, grid, n):  # type: ignore[no-untyped-def]
    """Keep the suggestion if it has a weight. Returns the new number of suggestions."""
    slot = FIRST_LISTED + n
    X.c_grid[slot] = grid
    X.c_log[slot] = log_weight(Q, X, op, grid, slot * len(X.order))
    return n if X.c_log[slot] == NO_WEIGHT else n + 1
