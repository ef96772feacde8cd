"""Memory of what an operator leaves on devices, and of bringing that to its readers (compiled): the operator's share of what
``simulator.memory.transit`` and ``simulator.memory.peaks`` count. The scratch must hold the operator's delivery."""

from __future__ import annotations

from soap.simulator.compiled.carriers import BROADCAST, MESSAGE
from soap.simulator.compiled.fetches import is_remote
from soap.simulator.compiled.graph_arrays import GraphTables
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.memory_tables import ACTIVATIONS, LARGEST_ADDED, LARGEST_SENT, LARGEST_SUM, SENT_BETWEEN, MemoryTables
from soap.simulator.compiled.scratch import CARRIERS, FETCHES, FULL, HOLDINGS, REDUCTIONS, Scratch
from soap.simulator.compiled.world import World
from soap.simulator.memory.peaks import ADDING_COPIES


@compiled
def _volume(V, S, box):  # type: ignore[no-untyped-def]
    """Elements of a region or cell."""
    return V.box_volume[box] if box >= 0 else S.cell_volume[-2 - box]


@compiled
def add_fetches(G: GraphTables, S: Scratch, M: MemoryTables, op: int) -> None:
    """Add the operator's share of ``transit.fetched_bytes``."""
    first = G.output_ptr[op]
    for fetch in range(S.count[FETCHES]):
        begin, end, device = S.f_piece[fetch], S.f_piece[fetch + 1], S.f_dev[fetch]
        itemsize = G.output_itemsize[first + S.f_out[fetch]]
        remote, apart, region = 0, end - begin > 1, 0
        for piece in range(begin, end):
            region += S.p_volume[piece]
            if is_remote(S, piece):
                carrier = S.p_carrier[piece]
                alone = S.k_pattern[carrier] == BROADCAST
                alone |= S.k_pattern[carrier] == MESSAGE and S.k_part[carrier + 1] - S.k_part[carrier] == 1
                apart |= not alone
                remote += S.p_volume[piece]
        if apart:
            M.part[ACTIVATIONS, device] += remote * itemsize
        if remote > 0:
            M.part[ACTIVATIONS, device] += region * itemsize
        elif end - begin > 1:
            consumer = S.f_first[fetch]
            while consumer >= 0:
                M.part[ACTIVATIONS, device] += region * itemsize
                consumer = S.c_next[consumer]


@compiled
def add_sent(W: World, M: MemoryTables, op: int) -> None:
    """Add the operator's share of ``transit.sent_bytes``, without sums."""
    G, V, S = W.graph, W.variants, W.scratch
    first = G.output_ptr[op]
    for carrier in range(S.count[CARRIERS]):
        begin, end, pattern = S.k_part[carrier], S.k_part[carrier + 1], S.k_pattern[carrier]
        told = begin + 1 if pattern == BROADCAST else end
        before, together = -1, 0
        for i in range(begin, end):
            piece = S.part[i]
            fetch, hold = S.p_fetch[piece], S.p_hold[piece]
            out = first + S.f_out[fetch]
            size = S.p_volume[piece] * G.output_itemsize[out]
            whole = S.p_volume[piece] == _volume(V, S, S.h_box[hold])
            together += size
            if i < told and (told - begin > 1 or not whole):
                M.part[SENT_BETWEEN, S.h_dev[hold]] += size
            if G.output_gradient[out]:
                M.part[SENT_BETWEEN, S.f_dev[fetch]] += size
                if told - begin > 1:
                    M.part[SENT_BETWEEN, S.h_dev[hold]] += size
            if pattern != MESSAGE and fetch != before:
                for other in range(S.f_piece[fetch], S.f_piece[fetch + 1]):
                    if not is_remote(S, other):
                        M.part[SENT_BETWEEN, S.f_dev[fetch]] += S.p_volume[other] * G.output_itemsize[out]
                        together += S.p_volume[other] * G.output_itemsize[out]
            before = fetch
        for i in range(begin, end):
            for device in (S.h_dev[S.p_hold[S.part[i]]], S.f_dev[S.p_fetch[S.part[i]]]):
                M.part[LARGEST_SENT, device] = max(M.part[LARGEST_SENT, device], together)
    for fetch in range(S.count[FETCHES]):
        out, remote, local = first + S.f_out[fetch], False, 0
        for piece in range(S.f_piece[fetch], S.f_piece[fetch + 1]):
            remote |= is_remote(S, piece)
            local += 0 if is_remote(S, piece) else S.p_volume[piece]
        if remote and G.output_gradient[out]:
            M.part[SENT_BETWEEN, S.f_dev[fetch]] += local * G.output_itemsize[out]


@compiled
def add_sums(W: World, M: MemoryTables, op: int) -> None:
    """Add sums of partial results: the sums or cells, what the reduce-scatters send, and the buffers that are summed."""
    G, V, S = W.graph, W.variants, W.scratch
    part = M.part
    for red in range(S.count[REDUCTIONS]):
        out = G.output_ptr[op] + S.r_out[red]
        itemsize = G.output_partial_itemsize[out]
        first, count = S.r_dev_ptr[red], S.r_dev_ptr[red + 1] - S.r_dev_ptr[red]
        size = V.box_volume[S.r_box[red]] * itemsize
        for i in range(count):
            device = S.r_dev[first + i]
            if S.r_cells[red] >= 0:
                cell = S.cell_volume[S.r_cells[red] + i] * itemsize
                part[ACTIVATIONS, device] += count * cell
                back = S.cell_volume[S.r_cells[red] + i] * G.output_itemsize[out]
                part[SENT_BETWEEN, device] += size + (count * back if G.output_gradient[out] else 0)
                part[LARGEST_SENT, device] = max(part[LARGEST_SENT, device], size, count * back)
            else:
                part[ACTIVATIONS, device] += size
            if count > 1:
                part[LARGEST_SUM, device] = max(part[LARGEST_SUM, device], size)


@compiled
def add_holdings(W: World, M: MemoryTables, op: int) -> None:
    """Add the gradients that wait between operators, as in ``peaks._frontier_bytes``, and additions of two gradients."""
    G, V, S = W.graph, W.variants, W.scratch
    width = len(G.backward) + 2
    if S.count[HOLDINGS] + S.count[REDUCTIONS] > len(S.work):
        raise MemoryError(FULL)
    latest = S.work  # for each holding its last reader; then the same for each reduction that leaves cells
    for i in range(S.count[HOLDINGS] + S.count[REDUCTIONS]):
        latest[i] = -1
    _add_regions(G, S, M, op, latest, width)
    for hold in range(S.count[HOLDINGS]):
        out, device, red, reader = G.output_ptr[op] + S.h_out[hold], S.h_dev[hold], S.h_red[hold], latest[hold]
        if not G.output_gradient[out]:
            continue
        size = _volume(V, S, S.h_box[hold]) * G.output_itemsize[out]
        M.part[LARGEST_ADDED, device] = max(M.part[LARGEST_ADDED, device], ADDING_COPIES * size)
        if reader >= 0:
            _add_life(M, device * width, op, reader, size if red < 0 else 2 * size)
            if red >= 0 and S.r_cells[red] >= 0:
                latest[S.count[HOLDINGS] + red] = max(latest[S.count[HOLDINGS] + red], reader)
    for red in range(S.count[REDUCTIONS]):
        reader = latest[S.count[HOLDINGS] + red]
        if reader >= 0:
            size = 2 * V.box_volume[S.r_box[red]] * G.output_itemsize[G.output_ptr[op] + S.r_out[red]]
            for i in range(S.r_dev_ptr[red], S.r_dev_ptr[red + 1]):
                _add_life(M, S.r_dev[i] * width, op, reader, size)


@compiled
def _add_regions(G, S, M, op, latest, width):  # type: ignore[no-untyped-def]
    """Add the gradients of fetched regions and of their remote pieces. Fill ``latest``: the last reader of each holding."""
    for fetch in range(S.count[FETCHES]):
        out = G.output_ptr[op] + S.f_out[fetch]
        if not G.output_gradient[out]:
            continue
        itemsize, consumer, first, last, region = G.output_itemsize[out], S.f_first[fetch], width, -1, 0
        while consumer >= 0:
            reader = G.reader[G.reader_ptr[op] + S.c_slot[consumer]]
            first, last = min(first, reader), max(last, reader)
            consumer = S.c_next[consumer]
        for piece in range(S.f_piece[fetch], S.f_piece[fetch + 1]):
            hold = S.p_hold[piece]
            latest[hold] = max(latest[hold], last)
            region += S.p_volume[piece]
            if is_remote(S, piece):
                first = op
                _add_life(M, S.h_dev[hold] * width, op, last, S.p_volume[piece] * itemsize)
        _add_life(M, S.f_dev[fetch] * width, first, last, region * itemsize)


@compiled
def _add_life(M, row, first, last, size):  # type: ignore[no-untyped-def]
    M.step[row + first] += size
    M.step[row + last + 1] -= size
