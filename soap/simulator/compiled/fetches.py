"""Which holdings each region that is read is assembled from, nearest first (compiled). The counterpart of ``coverage``."""

from __future__ import annotations

from soap.simulator.compiled.hashing import hash_join, hash_place
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import BOUNDS, CELL_BOXES, FETCHES, FULL, HOLDINGS, PIECES, STAMP, Scratch
from soap.simulator.compiled.variants import CELLS, GRIDS, GROUPS, VariantTables
from soap.simulator.compiled.world import World

UNCOVERED = "a region that is read is computed by no tile"


@compiled
def edge(V: VariantTables, S: Scratch, box: int, i: int) -> int:
    """The i-th bound (start, stop, start, …) of a region or cell."""
    if box >= 0:
        return V.bounds[V.box_ptr[box] + i]
    return S.cell[S.cell_ptr[-2 - box] + i]


@compiled
def common_volume(V: VariantTables, S: Scratch, a: int, b: int, rank: int) -> int:
    """Elements that two regions have in common."""
    volume = 1
    for dim in range(rank):
        start = max(edge(V, S, a, 2 * dim), edge(V, S, b, 2 * dim))
        stop = min(edge(V, S, a, 2 * dim + 1), edge(V, S, b, 2 * dim + 1))
        if stop <= start:
            return 0
        volume *= stop - start
    return volume


@compiled
def contains_box(V: VariantTables, S: Scratch, outer: int, inner: int, rank: int) -> bool:
    """Whether region ``outer`` contains region ``inner``."""
    for dim in range(rank):
        if edge(V, S, outer, 2 * dim) > edge(V, S, inner, 2 * dim) or edge(V, S, outer, 2 * dim + 1) < edge(V, S, inner, 2 * dim + 1):
            return False
    return True


@compiled
def add_box(S: Scratch, rank: int) -> int:
    """Make room for a region's bounds; returns its number among the cells. The caller fills ``cell`` from ``cell_ptr[number]`` on."""
    n = S.count[CELL_BOXES]
    if n + 2 > len(S.cell_volume) or S.count[BOUNDS] + 2 * rank > len(S.cell):
        raise MemoryError(FULL)
    S.cell_ptr[n] = S.count[BOUNDS]
    S.count[BOUNDS] += 2 * rank
    S.count[CELL_BOXES] = n + 1
    return n


@compiled
def cover_all(W: World, op: int, scattered: bool) -> None:
    """Find the pieces of every fetch. ``scattered``: some sums are left in cells, so the outputs' grids do not apply.

    ValueError if a region is not covered.
    """
    V, C, S = W.variants, W.state, W.scratch
    S.count[PIECES] = 0
    S.f_piece[0] = 0
    row = V.rows[C.variant[op]]
    for fetch in range(S.count[FETCHES]):
        grid = V.data[row[GRIDS] + S.f_out[fetch]]
        replicas = 1 if C.replicas[op] > 1 and _begins_backward(W, op, fetch) else C.replicas[op]
        if scattered or V.data[grid + 1] == 0:
            _cover_by_scan(W, op, fetch, V.data[grid], replicas * row[CELLS])
        else:
            _cover_by_grid(W, op, row, fetch, grid, replicas)
        S.f_piece[fetch + 1] = S.count[PIECES]
        total = 0
        for piece in range(S.f_piece[fetch], S.f_piece[fetch + 1]):
            total += S.p_volume[piece]
        if total != V.box_volume[S.f_box[fetch]]:
            raise ValueError(UNCOVERED)


@compiled
def _begins_backward(W: World, op: int, fetch: int) -> bool:
    """``PlanBuilder._begins_backward`` of the consumers of an operator's fetch."""
    G, V, C, S = W.graph, W.variants, W.state, W.scratch
    consumer = S.f_first[fetch]
    while consumer >= 0:
        reader = G.reader[G.reader_ptr[op] + S.c_slot[consumer]]
        if G.epilogue[reader] and S.c_tile[consumer] < V.rows[C.variant[reader]][CELLS]:
            return True
        consumer = S.c_next[consumer]
    return False


@compiled
def _cover_by_grid(W, op, row, fetch, grid, replicas):  # type: ignore[no-untyped-def]
    """If the holdings' distinct regions are disjoint: bisection per dimension finds those that overlap, each from its nearest holder among
    so many replicas."""
    V, K, S = W.variants, W.cluster, W.scratch
    box, device, out = S.f_box[fetch], S.f_dev[fetch], S.f_out[fetch]
    rank = V.data[grid]
    tail = grid + 3 + 2 * rank
    held, ptr, holders = V.data[tail], V.data[tail + 1], V.data[tail + 2]
    low, high, place = S.odometer[:rank], S.odometer[rank : 2 * rank], S.odometer[2 * rank : 3 * rank]
    at = V.box_ptr[box]
    for dim in range(rank):
        count, intervals = V.data[grid + 3 + 2 * dim], V.data[grid + 4 + 2 * dim]
        start, stop = V.bounds[at + 2 * dim], V.bounds[at + 2 * dim + 1]
        a, b = 0, count  # first interval that ends after the start
        while a < b:
            middle = (a + b) // 2
            if V.data[intervals + 2 * middle + 1] <= start:
                a = middle + 1
            else:
                b = middle
        low[dim] = a
        b = count
        while a < b:  # first interval that begins at the stop or after it
            middle = (a + b) // 2
            if V.data[intervals + 2 * middle] < stop:
                a = middle + 1
            else:
                b = middle
        high[dim] = a
        if low[dim] >= a:
            return
        place[dim] = low[dim]
    found = 0
    while True:
        flat = 0
        for dim in range(rank):
            flat = flat * V.data[grid + 3 + 2 * dim] + place[dim]
        distinct = V.data[held + flat]
        if distinct >= 0:
            best = _nearest(W, op, row, device, out, replicas, V.data[ptr + distinct], V.data[ptr + distinct + 1], holders)
            _insert(K, S, device, best, found)
            found += 1
        dim = rank - 1
        while dim >= 0:
            place[dim] += 1
            if place[dim] < high[dim]:
                break
            place[dim] = low[dim]
            dim -= 1
        if dim < 0:
            break
    for i in range(found):
        hold = S.order[i]
        _add_piece(S, fetch, hold, common_volume(V, S, box, S.h_box[hold], rank), -1)


@compiled
def _nearest(W, op, row, device, out, among, first, last, holders):  # type: ignore[no-untyped-def]
    """Of all holdings of one region ``among`` the first replicas, the first by (distance, tile, place)."""
    V, K, C, S = W.variants, W.cluster, W.state, W.scratch
    cells, replicas, groups = row[CELLS], C.replicas[op], row[GROUPS]
    best = -1
    for replica in range(among):
        for i in range(first, last):
            member = V.data[holders + i]
            if groups == 0:
                hold = S.hold_of[(out * replicas + replica) * cells + member]
                if best < 0 or _before(K, S, device, hold, best):
                    best = hold
            else:
                red = S.red_of[(out * replicas + replica) * groups + member]
                for hold in range(S.r_hold[red], S.r_hold[red + 1]):
                    if best < 0 or _before(K, S, device, hold, best):
                        best = hold
    return best


@compiled
def _before(K, S, device, a, b):  # type: ignore[no-untyped-def]
    near_a, near_b = K.distance[S.h_dev[a], device], K.distance[S.h_dev[b], device]
    if near_a != near_b:
        return near_a < near_b
    if S.h_tile[a] != S.h_tile[b]:
        return S.h_tile[a] < S.h_tile[b]
    return a < b


@compiled
def _insert(K, S, device, hold, found):  # type: ignore[no-untyped-def]
    """Keep ``order[:found]`` sorted by (distance, tile, place)."""
    if found + 1 > len(S.order):
        raise MemoryError(FULL)
    i = found
    while i > 0 and _before(K, S, device, hold, S.order[i - 1]):
        S.order[i] = S.order[i - 1]
        i -= 1
    S.order[i] = hold


@compiled
def _cover_by_scan(W, op, fetch, rank, tiles):  # type: ignore[no-untyped-def]
    """For any holdings of the first ``tiles``: take the region from one on the device that has all of it; else from all that overlap,
    nearest first."""
    V, K, S = W.variants, W.cluster, W.scratch
    box, device, out = S.f_box[fetch], S.f_dev[fetch], S.f_out[fetch]
    best, found = -1, 0
    for hold in range(S.count[HOLDINGS]):
        if S.h_out[hold] != out or S.h_tile[hold] >= tiles:
            continue
        here = S.h_dev[hold] == device and contains_box(V, S, S.h_box[hold], box, rank)
        if here and (best < 0 or _before(K, S, device, hold, best)):
            best = hold
        if common_volume(V, S, box, S.h_box[hold], rank) > 0:
            _insert(K, S, device, hold, found)
            found += 1
    if best >= 0:
        _add_piece(S, fetch, best, V.box_volume[box], -1)
        return
    whole = add_box(S, rank)
    for i in range(2 * rank):
        S.cell[S.cell_ptr[whole] + i] = V.bounds[V.box_ptr[box] + i]
    half = len(S.work) // 2
    S.work[0], missing = whole, 1  # first half: the missing regions; second half: those still missing after one more holding
    for i in range(found):
        hold, rest = S.order[i], 0
        for k in range(missing):
            if rest + 2 * rank + 1 > half:
                raise MemoryError(FULL)
            size = common_volume(V, S, -2 - S.work[k], S.h_box[hold], rank)
            if size > 0:
                rest = _take(V, S, fetch, hold, S.work[k], size, rank, rest)
            else:
                S.work[half + rest] = S.work[k]
                rest += 1
        missing = rest
        for k in range(missing):
            S.work[k] = S.work[half + k]
        if missing == 0:
            return


@compiled
def _take(V, S, fetch, hold, region, size, rank, rest):  # type: ignore[no-untyped-def]
    """Take what a holding has of a missing region. Append the rest, cut as by ``regions.subtract``, to the second half of ``work``; returns
    the number of regions there."""
    half = len(S.work) // 2
    taken = add_box(S, rank)
    for i in range(2 * rank):
        S.cell[S.cell_ptr[taken] + i] = S.cell[S.cell_ptr[region] + i]
    for dim in range(rank):
        start = max(edge(V, S, -2 - taken, 2 * dim), edge(V, S, S.h_box[hold], 2 * dim))
        stop = min(edge(V, S, -2 - taken, 2 * dim + 1), edge(V, S, S.h_box[hold], 2 * dim + 1))
        for side in range(2):
            low = S.cell[S.cell_ptr[taken] + 2 * dim] if side == 0 else stop
            high = start if side == 0 else S.cell[S.cell_ptr[taken] + 2 * dim + 1]
            if low < high:
                part = add_box(S, rank)
                for i in range(2 * rank):
                    S.cell[S.cell_ptr[part] + i] = S.cell[S.cell_ptr[taken] + i]
                S.cell[S.cell_ptr[part] + 2 * dim], S.cell[S.cell_ptr[part] + 2 * dim + 1] = low, high
                S.work[half + rest] = part
                rest += 1
        S.cell[S.cell_ptr[taken] + 2 * dim], S.cell[S.cell_ptr[taken] + 2 * dim + 1] = start, stop
    _add_piece(S, fetch, hold, size, taken)
    return rest


@compiled
def _add_piece(S, fetch, hold, volume, box):  # type: ignore[no-untyped-def]
    """Add a piece. ``box``: number of the cell with its bounds; -1 if it is the common part of the fetch and the holding."""
    n = S.count[PIECES]
    if n + 2 > len(S.p_hold):
        raise MemoryError(FULL)
    S.p_hold[n], S.p_fetch[n], S.p_volume[n], S.p_box[n], S.p_carrier[n] = hold, fetch, volume, box, -1
    S.count[PIECES] = n + 1


@compiled
def piece_edge(V: VariantTables, S: Scratch, piece: int, i: int) -> int:
    """The i-th bound of a piece."""
    if S.p_box[piece] >= 0:
        return S.cell[S.cell_ptr[S.p_box[piece]] + i]
    a, b = edge(V, S, S.f_box[S.p_fetch[piece]], i), edge(V, S, S.h_box[S.p_hold[piece]], i)
    return max(a, b) if i % 2 == 0 else min(a, b)


@compiled
def is_remote(S: Scratch, piece: int) -> bool:
    """Whether a piece comes from another device."""
    return S.h_dev[S.p_hold[piece]] != S.f_dev[S.p_fetch[piece]]


@compiled
def identify(V: VariantTables, S: Scratch, out: int, rank: int) -> None:
    """Set ``p_id`` of an output's remote pieces: equal if and only if they are the same region of the same holding."""
    S.count[STAMP] += 1
    mask = len(S.hash_key) - 1
    for piece in range(S.count[PIECES]):
        if S.f_out[S.p_fetch[piece]] != out or not is_remote(S, piece):
            continue
        key = S.p_hold[piece]
        for i in range(2 * rank):
            key = hash_join(key, piece_edge(V, S, piece, i))
        place = hash_place(key, mask)
        while S.hash_stamp[place] == S.count[STAMP] and not same_piece(V, S, piece, S.hash_value[place], rank):
            place = (place + 1) & mask
        if S.hash_stamp[place] != S.count[STAMP]:
            S.hash_stamp[place], S.hash_value[place] = S.count[STAMP], piece
        S.p_id[piece] = S.hash_value[place]


@compiled
def same_piece(V: VariantTables, S: Scratch, a: int, b: int, rank: int) -> bool:
    """Whether two pieces are the same region of the same holding."""
    if S.p_hold[a] != S.p_hold[b]:
        return False
    for i in range(2 * rank):
        if piece_edge(V, S, a, i) != piece_edge(V, S, b, i):
            return False
    return True
