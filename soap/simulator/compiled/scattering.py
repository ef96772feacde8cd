"""Which sums are reduce-scatters instead of all-reduces (compiled). The counterpart of ``plan.planning`` and ``planning._scattered``."""

from __future__ import annotations

from soap.simulator.compiled.fetches import add_box, common_volume, edge
from soap.simulator.compiled.holdings import hold_sum
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import CELL_BOXES, FETCHES, FULL, HOLDINGS, REDUCTIONS, STAMP
from soap.simulator.compiled.variants import CELLS, GRIDS
from soap.simulator.compiled.world import World


@compiled
def scatter_sums(W: World, op: int) -> bool:
    """Leave sums in cells where that moves fewer bytes to the readers. True if any sum is. Needs the fetches."""
    V, C, S = W.variants, W.state, W.scratch
    row = V.rows[C.variant[op]]
    any_cells = False
    if C.replicas[op] > 1:
        return False  # a device's readers may take their values from another replica's sum
    for red in range(S.count[REDUCTIONS]):
        if S.r_dev_ptr[red + 1] - S.r_dev_ptr[red] > 1:
            rank = V.data[V.data[row[GRIDS] + S.r_out[red]]]
            if rank > 0:
                S.r_cells[red] = _choose(V, S, red, rank)
                any_cells |= S.r_cells[red] >= 0
    if any_cells:
        S.count[HOLDINGS] = 0
        for red in range(S.count[REDUCTIONS]):
            hold_sum(C, S, op, row[CELLS], red)
    return any_cells


@compiled
def _choose(V, S, red, rank):  # type: ignore[no-untyped-def]
    """Number of the first cell (there is one per device); -1 if an all-reduce is better."""
    first = S.r_dev_ptr[red]
    count = S.r_dev_ptr[red + 1] - first
    box = S.r_box[red]
    S.count[STAMP] += 1
    for i in range(count):
        S.mark[S.r_dev[first + i]] = S.count[STAMP]
        S.mark_value[S.r_dev[first + i]] = i
    base = S.count[CELL_BOXES]
    for _ in range(count):  # hulls of what each device reads; volume -1 if it reads nothing
        S.cell_volume[add_box(S, rank)] = -1
    for fetch in range(S.count[FETCHES]):
        device = S.f_dev[fetch]
        if S.f_out[fetch] != S.r_out[red] or S.mark[device] != S.count[STAMP] or common_volume(V, S, S.f_box[fetch], box, rank) == 0:
            continue
        hull = base + S.mark_value[device]
        at = S.cell_ptr[hull]
        for dim in range(rank):
            start = max(edge(V, S, S.f_box[fetch], 2 * dim), edge(V, S, box, 2 * dim))
            stop = min(edge(V, S, S.f_box[fetch], 2 * dim + 1), edge(V, S, box, 2 * dim + 1))
            if S.cell_volume[hull] < 0:
                S.cell[at + 2 * dim], S.cell[at + 2 * dim + 1] = start, stop
            else:
                S.cell[at + 2 * dim] = min(S.cell[at + 2 * dim], start)
                S.cell[at + 2 * dim + 1] = max(S.cell[at + 2 * dim + 1], stop)
        S.cell_volume[hull] = 1
    if not (_as_they_are(V, S, base, count, box, rank) or _cut_along_one(V, S, base, count, box, rank)):
        return -1
    for i in range(count):
        S.order[i] = (count - 1) * S.cell_volume[base + i]
    for fetch in range(S.count[FETCHES]):
        device = S.f_dev[fetch]
        if S.f_out[fetch] == S.r_out[red] and S.mark[device] == S.count[STAMP]:
            size = common_volume(V, S, S.f_box[fetch], box, rank)
            if size > 0:
                i = S.mark_value[device]
                S.order[i] += size - _common_of_three(V, S, S.f_box[fetch], box, -2 - (base + i), rank)
    worst = 0
    for i in range(count):
        worst = max(worst, S.order[i])
    return base if count * worst < 2 * (count - 1) * V.box_volume[box] else -1


@compiled
def _common_of_three(V, S, a, b, c, rank):  # type: ignore[no-untyped-def]
    volume = 1
    for dim in range(rank):
        start = max(edge(V, S, a, 2 * dim), edge(V, S, b, 2 * dim), edge(V, S, c, 2 * dim))
        stop = min(edge(V, S, a, 2 * dim + 1), edge(V, S, b, 2 * dim + 1), edge(V, S, c, 2 * dim + 1))
        if stop <= start:
            return 0
        volume *= stop - start
    return volume


@compiled
def _volume(S, cell, rank):  # type: ignore[no-untyped-def]
    volume = 1
    for dim in range(rank):
        volume *= max(0, S.cell[S.cell_ptr[cell] + 2 * dim + 1] - S.cell[S.cell_ptr[cell] + 2 * dim])
    return volume


@compiled
def _make_empty(V, S, cell, box, rank):  # type: ignore[no-untyped-def]
    for dim in range(rank):
        start = edge(V, S, box, 2 * dim)
        S.cell[S.cell_ptr[cell] + 2 * dim], S.cell[S.cell_ptr[cell] + 2 * dim + 1] = start, start
    S.cell_volume[cell] = 0


@compiled
def _as_they_are(V, S, base, count, box, rank):  # type: ignore[no-untyped-def]
    """True if the hulls are disjoint and together make up the box; they are then the cells."""
    total = 0
    for i in range(count):
        if S.cell_volume[base + i] >= 0:
            total += _volume(S, base + i, rank)
    if total != V.box_volume[box]:
        return False
    for i in range(count):
        for k in range(i):
            both = S.cell_volume[base + i] >= 0 and S.cell_volume[base + k] >= 0
            if both and common_volume(V, S, -2 - (base + i), -2 - (base + k), rank) > 0:
                return False
    for i in range(count):
        if S.cell_volume[base + i] < 0:
            _make_empty(V, S, base + i, box, rank)
        else:
            S.cell_volume[base + i] = _volume(S, base + i, rank)
    return True


@compiled
def _cut_along_one(V, S, base, count, box, rank):  # type: ignore[no-untyped-def]
    """Cut cells along the dimension in which most reads differ, in the order of the reads. Borders are in the middle of overlaps and gaps.
    False if that is impossible."""
    found = 0
    for i in range(count):
        if S.cell_volume[base + i] >= 0:
            S.order[found] = i
            found += 1
    if found == 0:
        return False
    chosen, most = 0, -1
    for dim in range(rank):
        distinct = 0
        for a in range(found):
            new = True
            for b in range(a):
                new &= not _same_interval(S, base + S.order[a], base + S.order[b], dim)
            distinct += new
        if distinct > most:
            chosen, most = dim, distinct
    for a in range(1, found):  # insertion sort by the interval
        i, b = S.order[a], a
        while b > 0 and _interval_before(S, base + i, base + S.order[b - 1], chosen):
            S.order[b] = S.order[b - 1]
            b -= 1
        S.order[b] = i
    for a in range(found - 1):
        here, there = S.cell_ptr[base + S.order[a]] + 2 * chosen, S.cell_ptr[base + S.order[a + 1]] + 2 * chosen
        if S.cell[here] >= S.cell[there] or S.cell[here + 1] >= S.cell[there + 1]:
            return False
    if found + count > len(S.work):
        raise MemoryError(FULL)
    start = edge(V, S, box, 2 * chosen)
    for a in range(found):
        stop = edge(V, S, box, 2 * chosen + 1)
        if a + 1 < found:
            here, there = S.cell_ptr[base + S.order[a]] + 2 * chosen, S.cell_ptr[base + S.order[a + 1]] + 2 * chosen
            stop = (S.cell[here + 1] + S.cell[there]) // 2
        S.work[2 * a], S.work[2 * a + 1] = start, stop
        start = stop
    for i in range(count):
        if S.cell_volume[base + i] < 0:
            _make_empty(V, S, base + i, box, rank)
    for a in range(found):
        cell = base + S.order[a]
        for dim in range(rank):
            for side in range(2):
                S.cell[S.cell_ptr[cell] + 2 * dim + side] = S.work[2 * a + side] if dim == chosen else edge(V, S, box, 2 * dim + side)
        S.cell_volume[cell] = _volume(S, cell, rank)
    return True


@compiled
def _same_interval(S, a, b, dim):  # type: ignore[no-untyped-def]
    p, q = S.cell_ptr[a] + 2 * dim, S.cell_ptr[b] + 2 * dim
    return S.cell[p] == S.cell[q] and S.cell[p + 1] == S.cell[q + 1]


@compiled
def _interval_before(S, a, b, dim):  # type: ignore[no-untyped-def]
    p, q = S.cell_ptr[a] + 2 * dim, S.cell_ptr[b] + 2 * dim
    return S.cell[p] < S.cell[q] or (S.cell[p] == S.cell[q] and S.cell[p + 1] < S.cell[q + 1])
