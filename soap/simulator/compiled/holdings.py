"""What an operator leaves on devices, and which regions of it are read on which device (compiled).

The counterpart of ``planning._reductions``, ``_holdings`` and ``_gather_reads``. ``scattering`` then turns some sums into reduce-scatters.
"""

from __future__ import annotations

from soap.simulator.compiled.arrays import sort
from soap.simulator.compiled.hashing import hash_place
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import CONSUMERS, FETCHES, FULL, HOLDINGS, REDUCTIONS, STAMP, Scratch
from soap.simulator.compiled.state import State
from soap.simulator.compiled.variants import CELLS, GROUP_BOXES, GROUP_OF, GROUPS, OUTPUTS, READS, VariantTables
from soap.simulator.compiled.world import World


@compiled
def tile_count(V: VariantTables, C: State, op: int) -> int:
    """Number of tiles of an operator, replicas included."""
    return C.tiles[op]


@compiled
def make_holdings(W: World, op: int) -> None:
    """Make an operator's reductions, all as all-reduces, and its holdings."""
    G, V, C, S = W.graph, W.variants, W.state, W.scratch
    row = V.rows[C.variant[op]]
    cells, replicas, groups = row[CELLS], C.replicas[op], row[GROUPS]
    outputs = G.output_ptr[op + 1] - G.output_ptr[op]
    devices = C.dev_ptr[op]
    if max(cells * replicas, groups * replicas) * outputs + 1 > len(S.hold_of):
        raise MemoryError(FULL)
    S.count[REDUCTIONS] = 0
    S.count[HOLDINGS] = 0
    S.r_dev_ptr[0] = 0
    S.r_hold[0] = 0
    if groups == 0:
        for out in range(outputs):
            for tile in range(cells * replicas):
                box = V.data[row[OUTPUTS] + out * cells + tile % cells]
                S.hold_of[out * cells * replicas + tile] = -1
                if box >= 0:
                    S.hold_of[out * cells * replicas + tile] = add_holding(S, box, out, C.dev[devices + tile], tile, -1)
        return
    _group_members(V, S, row)
    for out in range(outputs):
        for replica in range(replicas):
            for group in range(groups):
                place = (out * replicas + replica) * groups + group
                box = V.data[row[GROUP_BOXES] + out * groups + group]
                S.red_of[place] = -1
                if box >= 0:
                    S.red_of[place] = _add_reduction(C, S, op, cells, out, replica, group, box)
    for red in range(S.count[REDUCTIONS]):
        hold_sum(C, S, op, cells, red)


@compiled
def add_holding(S: Scratch, box: int, out: int, device: int, tile: int, red: int) -> int:
    """Add a holding; returns its number."""
    n = S.count[HOLDINGS]
    if n + 2 > len(S.h_box):
        raise MemoryError(FULL)
    S.h_box[n], S.h_out[n], S.h_dev[n], S.h_tile[n], S.h_red[n] = box, out, device, tile, red
    S.count[HOLDINGS] = n + 1
    return n


@compiled
def _group_members(V: VariantTables, S: Scratch, row) -> None:  # type: ignore[no-untyped-def]
    """Fill ``member``: the tiles of one replica by group, ascending."""
    cells, groups = row[CELLS], row[GROUPS]
    for group in range(groups + 1):
        S.member_ptr[group] = 0
    for cell in range(cells):
        S.member_ptr[V.data[row[GROUP_OF] + cell] + 1] += 1
    for group in range(groups):
        S.member_ptr[group + 1] += S.member_ptr[group]
        S.work[group] = S.member_ptr[group]
    for cell in range(cells):
        group = V.data[row[GROUP_OF] + cell]
        S.member[S.work[group]] = cell
        S.work[group] += 1


@compiled
def _add_reduction(C: State, S: Scratch, op: int, cells: int, out: int, replica: int, group: int, box: int) -> int:
    n = S.count[REDUCTIONS]
    if n + 2 > len(S.r_out):
        raise MemoryError(FULL)
    S.r_out[n], S.r_rep[n], S.r_group[n], S.r_box[n], S.r_cells[n], S.r_task[n], S.r_back[n] = out, replica, group, box, -1, -1, -1
    first = S.r_dev_ptr[n]
    last = first
    S.count[STAMP] += 1
    if first + (S.member_ptr[group + 1] - S.member_ptr[group]) > len(S.r_dev):
        raise MemoryError(FULL)
    for i in range(S.member_ptr[group], S.member_ptr[group + 1]):
        device = C.dev[C.dev_ptr[op] + replica * cells + S.member[i]]
        if S.mark[device] != S.count[STAMP]:
            S.mark[device] = S.count[STAMP]
            S.r_dev[last] = device
            last += 1
    sort(S.r_dev, first, last)
    S.r_dev_ptr[n + 1] = last
    S.count[REDUCTIONS] = n + 1
    return n


@compiled
def hold_sum(C: State, S: Scratch, op: int, cells: int, red: int) -> None:
    """Add the holdings of a sum: on each of its devices the whole sum, or the device's cell (``r_cells``: number of the first cell)."""
    group, first = S.r_group[red], S.r_dev_ptr[red]
    count = S.r_dev_ptr[red + 1] - first
    S.r_hold[red] = S.count[HOLDINGS]
    S.count[STAMP] += 1
    for i in range(S.member_ptr[group + 1] - 1, S.member_ptr[group] - 1, -1):  # downwards, so that a device's lowest tile is left
        tile = S.r_rep[red] * cells + S.member[i]
        device = C.dev[C.dev_ptr[op] + tile]
        S.mark[device] = S.count[STAMP]
        S.mark_value[device] = tile
    for i in range(count):
        device = S.r_dev[first + i]
        box = S.r_box[red]
        if S.r_cells[red] >= 0:
            if S.cell_volume[S.r_cells[red] + i] == 0:
                continue
            box = -2 - (S.r_cells[red] + i)
        add_holding(S, box, S.r_out[red], device, S.mark_value[device], red)
    S.r_hold[red + 1] = S.count[HOLDINGS]


@compiled
def gather_reads(W: World, op: int) -> None:
    """Make the fetches: distinct regions of the operator's outputs on each device that reads them, in the order of their first readers,
    each with all its readers."""
    G, V, C, S = W.graph, W.variants, W.state, W.scratch
    S.count[FETCHES] = 0
    S.count[CONSUMERS] = 0
    S.count[STAMP] += 1
    mask, outputs = len(S.hash_key) - 1, G.output_ptr[op + 1] - G.output_ptr[op]
    for slot in range(G.reader_ptr[op + 1] - G.reader_ptr[op]):
        reader = G.reader[G.reader_ptr[op] + slot]
        row = V.rows[C.variant[reader]]
        cells = row[CELLS]
        first, last = G.read_ptr[reader], G.read_ptr[reader + 1]
        for tile in range(cells * C.replicas[reader]):
            device = C.dev[C.dev_ptr[reader] + tile]
            for k in range(first, last):
                if G.read_producer[k] != op:
                    continue
                box = V.data[row[READS] + (k - first) * cells + tile % cells]
                if box >= 0:
                    key = (box * len(C.busy) + device) * outputs + G.read_output[k]
                    place = hash_place(key, mask)
                    while S.hash_stamp[place] == S.count[STAMP] and S.hash_key[place] != key:
                        place = (place + 1) & mask
                    if S.hash_stamp[place] != S.count[STAMP]:
                        S.hash_stamp[place], S.hash_key[place] = S.count[STAMP], key
                        S.hash_value[place] = _add_fetch(S, G.read_output[k], box, device)
                    _add_consumer(S, S.hash_value[place], slot, tile, G.read_operand[k])


@compiled
def _add_fetch(S: Scratch, out: int, box: int, device: int) -> int:
    n = S.count[FETCHES]
    if n + 2 > len(S.f_out):
        raise MemoryError(FULL)
    S.f_out[n], S.f_box[n], S.f_dev[n], S.f_first[n], S.f_last[n] = out, box, device, -1, -1
    S.count[FETCHES] = n + 1
    return n


@compiled
def _add_consumer(S: Scratch, fetch: int, slot: int, tile: int, operand: int) -> None:
    n = S.count[CONSUMERS]
    if n + 2 > len(S.c_slot):
        raise MemoryError(FULL)
    S.c_slot[n], S.c_tile[n], S.c_operand[n], S.c_next[n] = slot, tile, operand, -1
    if S.f_last[fetch] < 0:
        S.f_first[fetch] = n
    else:
        S.c_next[S.f_last[fetch]] = n
    S.f_last[fetch] = n
    S.count[CONSUMERS] = n + 1
