"""At least what each device holds at its peak, as a sum over what a strategy makes and moves there (compiled).

Everything counts as held at once: what tiles make and keep, what devices fetch, send and sum, parameters with their gradients and states,
and what synchronization takes at most, however it goes about it. Only gradients between operators are counted where most of them wait. So
no order of tasks holds more (``memory.sweep``), and chains need ask about no strategy of which this fits.
"""

from __future__ import annotations

from typing import NamedTuple

from soap.plan.syncs.amounts import COPIES, COUNT_BYTES
from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.delivery import deliver
from soap.simulator.compiled.effort import OF_TYPES, PEER_HOLDS, TYPE_COLUMNS, WHOLE
from soap.simulator.compiled.fetches import is_remote
from soap.simulator.compiled.graph_arrays import Ints, LongRows, Longs
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.machine_code import entry
from soap.simulator.compiled.marks import holds_on_host, marked_bytes, runs_again
from soap.simulator.compiled.rows import INDEX_BYTES
from soap.simulator.compiled.scratch import FETCHES, FULL, HOLDINGS, REDUCTIONS
from soap.simulator.compiled.second_runs import is_gathered_again, is_summed_again
from soap.simulator.compiled.syncs.codes import BY_ROWS, COMPRESSED, GATHERED, OFFLOADED, PARTED, SERVED
from soap.simulator.compiled.syncs.members import compresses, find_geometry, find_members
from soap.simulator.compiled.syncs.templates import find_effort
from soap.simulator.compiled.variants import AWAY, CELLS
from soap.simulator.compiled.world import World

KEPT, MADE, PRODUCTS, WORK, REGIONS = range(5)
COLUMNS = 5
"""Columns of ``SumTables.rows``: where values begin in ``data``. By tile, in bytes: what it keeps, its outputs included; its outputs; what
its products make beside them; what is there while it runs. By [parameter operand, tile]: number of the region that it needs, -1 if none."""

HELD, TRAINED, VALUES, MOVED, COLLECTED, LARGEST_TILE, LARGEST_ADDED = range(7)
PARTS = 7
"""Rows of ``SumTables.part``, in bytes by device: all the time; of parameters that it trains; of tiles, sums and fetches; of what comes and
goes; of sums of parameters' gradients; of the tile that takes most while it runs, and of the largest addition of two gradients."""

SHARED_TIMES, GATHERED_TIMES, REPEATED_TIMES, ALONE_TIMES = 4, 7, 4, 6
"""How many times what a device reads of a parameter it holds at most for synchronization, beside value, gradient and states: where readers
own parts (what it sends and receives of gradients and of values, padded: ``sharded_state``), where these are gathered for their uses, too
(for both passes, in a buffer and in their places), and more with micro-batches (gradients of two before are under way), and where it
travels by rows, or to servers and back."""

FITS, UNKNOWN = range(2)
"""Verdicts. FITS: every device has as much as it needs at most. UNKNOWN: some device has less, and may fit."""


class SumTables(NamedTuple):
    """Tables, and working arrays, of the sum.

    ``rows``: by variant (see its columns). ``region_volume``: elements, by region of a parameter. ``cut[cut_ptr[variant] + operand]``: the
    number of the set of regions into which a parameter operand is cut. ``cut_volume``: elements of these regions together; -1 if they
    overlap. ``user``, ``user_operand``: by parameter, from ``user_ptr`` on: the operators that use it, and as which of their parameter
    operands. ``elements``, ``itemsize``, ``row_bytes``: by parameter. ``fixed``: bytes of the batch and of constants that a device holds at
    most; states of the optimizer per parameter; whether hosts may lack memory for servers, and for what devices keep there. ``limit``:
    bytes of memory, by device, without what is allowed for beyond what is simulated.

    Working arrays. ``part``: see its rows. ``step``: [device, operator], changes of the bytes of gradients that wait between operators.
    ``seen``: a stamp, then [region, device]. ``read``: bytes of a parameter, by device. ``total``: the sum, in bytes by device.
    """

    rows: LongRows
    data: Longs
    cut: Ints
    cut_ptr: Longs
    cut_volume: Longs
    region_volume: Longs
    user_ptr: Ints
    user: Ints
    user_operand: Ints
    elements: Longs
    itemsize: Longs
    row_bytes: Longs
    fixed: Longs
    limit: Longs
    part: LongRows
    step: Longs
    seen: Longs
    read: Longs
    total: Longs


@entry
def sum_memory(W: World, M: SumTables) -> int:
    """Fill ``total`` for the strategy that the state holds; returns FITS or UNKNOWN, the latter also where hosts may lack memory."""
    C, operators = W.state, len(W.graph.backward)
    fits = True
    fill(M.step, 0, len(M.step), 0)
    for row in range(PARTS):
        fill(M.part[row], 0, len(C.busy), 0)
    for parameter in range(len(M.user_ptr) - 1):
        _add_parameter(W, M, parameter)
        fits &= not (M.fixed[2] != 0 and C.sync[parameter] & SERVED) and not (M.fixed[3] != 0 and C.sync[parameter] & OFFLOADED)
    for op in range(operators):
        _add_tiles(W, M, op)
        deliver(W, op)
        _add_moved(W, M, op)
        _add_sums(W, M, op)
        fits &= not (M.fixed[3] != 0 and holds_on_host(C, C.marked[op]))
    for device in range(len(C.busy)):
        waiting = most = 0
        for i in range(operators + 1):
            waiting += M.step[device * (operators + 2) + i]
            most = max(most, waiting)
        part, moved = M.part, M.fixed[0] + M.part[MOVED, device]
        passes = part[VALUES, device] + most + part[COLLECTED, device] + part[LARGEST_TILE, device] + part[LARGEST_ADDED, device]
        M.total[device] = moved + part[HELD, device] + (1 + M.fixed[1]) * part[TRAINED, device] + max(passes, part[TRAINED, device])
        fits &= M.total[device] <= M.limit[device]
    return FITS if fits else UNKNOWN


@compiled
def _add_tiles(W, M, op):  # type: ignore[no-untyped-def]
    V, C, part = W.variants, W.state, M.part
    row = M.rows[C.variant[op]]
    cells, away = V.rows[C.variant[op], CELLS], V.rows[C.variant[op], AWAY]
    for tile in range(C.tiles[op]):
        device, cell = C.dev[C.dev_ptr[op] + tile], tile % cells
        made, product = M.data[row[MADE] + cell], M.data[row[PRODUCTS] + cell]
        part[VALUES, device] += M.data[row[KEPT] + cell] + made * (runs_again(C, op) + C.divided[op])
        part[VALUES, device] += marked_bytes(C, op, made, product, V.away[away + cell], W.cluster.serves_itself[device])
        part[LARGEST_TILE, device] = max(part[LARGEST_TILE, device], M.data[row[WORK] + cell])


@compiled
def _add_moved(W, M, op):  # type: ignore[no-untyped-def]
    """Add what an operator's readers fetch, what is sent for that and comes back, and gradients of both, which wait from the last reader's
    backward pass to the operator's own."""
    G, S, part = W.graph, W.scratch, M.part
    if S.count[HOLDINGS] > len(S.work):
        raise MemoryError(FULL)
    fill(S.work, 0, S.count[HOLDINGS], 1)
    times = 2 if is_gathered_again(W, op) else 1
    for fetch in range(S.count[FETCHES]):
        out, device = G.output_ptr[op] + S.f_out[fetch], S.f_dev[fetch]
        itemsize, gradient, region, remote = G.output_itemsize[out], G.output_gradient[out], 0, False
        for piece in range(S.f_piece[fetch], S.f_piece[fetch + 1]):
            region += S.p_volume[piece] * itemsize
            if is_remote(S, piece):
                remote, source, size = True, S.h_dev[S.p_hold[piece]], S.p_volume[piece] * itemsize
                part[MOVED, source] += size * (times + gradient)
                _wait(G, M, op, source, size * gradient)
                S.work[S.p_hold[piece]] = 2
        if remote:
            part[VALUES, device] += (1 + times) * region
            part[MOVED, device] += region * gradient
            _wait(G, M, op, device, region * gradient)
        elif S.f_piece[fetch + 1] - S.f_piece[fetch] > 1:
            consumer = S.f_first[fetch]
            while consumer >= 0:
                part[VALUES, device] += region
                consumer = S.c_next[consumer]
    for hold in range(S.count[HOLDINGS]):
        out, device, box = G.output_ptr[op] + S.h_out[hold], S.h_dev[hold], S.h_box[hold]
        size = (W.variants.box_volume[box] if box >= 0 else S.cell_volume[-2 - box]) * G.output_itemsize[out] * G.output_gradient[out]
        part[LARGEST_ADDED, device] = max(part[LARGEST_ADDED, device], 2 * size)
        _wait(G, M, op, device, size * (S.work[hold] + (S.h_red[hold] >= 0)))


@compiled
def _add_sums(W, M, op):  # type: ignore[no-untyped-def]
    """Add sums of partial results, or cells of them with what is sent and received for these."""
    G, S, part = W.graph, W.scratch, M.part
    times = 2 if is_summed_again(W, op) else 1
    for red in range(S.count[REDUCTIONS]):
        out, first, count = G.output_ptr[op] + S.r_out[red], S.r_dev_ptr[red], S.r_dev_ptr[red + 1] - S.r_dev_ptr[red]
        whole = W.variants.box_volume[S.r_box[red]]
        for i in range(count):
            device, cut = S.r_dev[first + i], S.r_cells[red] >= 0
            part[VALUES, device] += times * whole * G.output_partial_itemsize[out]
            if cut:
                cell = S.cell_volume[S.r_cells[red] + i]
                part[MOVED, device] += count * cell * (times * G.output_partial_itemsize[out] + G.output_itemsize[out])
            _wait(G, M, op, device, (1 + cut) * whole * G.output_itemsize[out] * G.output_gradient[out])


@compiled
def _wait(G, M, op, device, size):  # type: ignore[no-untyped-def]
    """Gradients of an operator's outputs wait on a device."""
    first, last = device * (len(G.backward) + 2), G.reader_ptr[op + 1] - 1
    if last >= G.reader_ptr[op]:
        M.step[first + op] += size
        M.step[first + G.reader[last] + 1] -= size


@compiled
def _add_parameter(W, M, parameter):  # type: ignore[no-untyped-def]
    """Add what devices hold of a parameter: regions that their tiles read; with their gradients, states and what synchronization takes."""
    G, K, C, part = W.graph, W.cluster, W.state, M.part
    first, last, devices = M.user_ptr[parameter], M.user_ptr[parameter + 1], len(C.busy)
    if first == last:
        return
    code, whole, trained = C.sync[parameter], M.elements[parameter] * M.itemsize[parameter], G.trainable[parameter]
    rows = whole // max(1, M.row_bytes[parameter])
    rest, joined, regions = _read(W, M, parameter, first, last)
    everywhere, indices = 0, 2 * INDEX_BYTES * rows * regions * (code & BY_ROWS != 0)
    for device in range(devices):
        everywhere += M.read[device]
    for device in range(devices):
        held, padded = min(M.read[device], whole), 0
        part[HELD, device] += held + rest
        part[COLLECTED, device] += held * trained if joined or code & SERVED else 0
        if code & GATHERED or (trained and code & PARTED):
            padded = held + regions * devices * M.row_bytes[parameter] if held > 0 else 0
            times = GATHERED_TIMES + REPEATED_TIMES * (W.order.count[0] > 1) if code & GATHERED else SHARED_TIMES
            part[MOVED, device] += padded * times
        if not trained:
            continue
        part[TRAINED, device] += held + rest
        part[HELD, device] += COUNT_BYTES * (1 + regions) * devices
        part[HELD, device] += 2 * (held + rest) if code & OFFLOADED and K.serves_itself[device] else 0
        if code & (BY_ROWS | SERVED):
            part[MOVED, device] += ALONE_TIMES * held + COPIES * (everywhere + indices)
    if trained and code & SERVED:
        for i in range(len(K.server)):
            if K.serves_itself[K.server[i]]:  # a server may own all of it
                part[MOVED, K.server[i]] += (5 + M.fixed[1]) * whole + 2 * COPIES * (devices * whole + indices) + COUNT_BYTES * regions
    if trained and code & COMPRESSED:
        _add_compressed(W, M, parameter)


@compiled
def _read(W, M, parameter, first, last):  # type: ignore[no-untyped-def]
    """Fill ``read`` with the bytes of a parameter's distinct regions that each device reads. Returns (bytes that no tile may read, which
    belong to one of the devices; whether regions are put together of several parts; their number at most)."""
    V, C, part = W.variants, W.state, M.part
    devices, cut, same, most, regions = len(C.busy), _cut_of(C, M, first), True, 0, 0
    for i in range(first, last):
        same &= _cut_of(C, M, i) == cut
        most = max(most, M.cut_volume[_cut_of(C, M, i)])
        regions += V.rows[C.variant[M.user[i]], CELLS]
    joined = not same or M.cut_volume[cut] < 0
    fill(M.read, 0, devices, 0)
    M.seen[0] += 2
    for i in range(first, last):
        op, itemsize = M.user[i], M.itemsize[parameter]
        cells = V.rows[C.variant[op], CELLS]
        at = M.rows[C.variant[op], REGIONS] + M.user_operand[i] * cells
        for tile in range(C.tiles[op]):
            region, device = M.data[at + tile % cells], C.dev[C.dev_ptr[op] + tile]
            if region < 0:
                continue
            size, place = M.region_volume[region] * itemsize, 1 + region * devices + device
            if joined or C.sync[parameter] & BY_ROWS:  # each tile has a copy
                part[VALUES, device] += size
            if M.seen[place] < M.seen[0]:
                M.read[device] += size
                M.seen[place] = M.seen[0]
            elif M.seen[place] == M.seen[0]:
                part[COLLECTED, device] += size * W.graph.trainable[parameter]
                M.seen[place] += 1
    return (M.elements[parameter] - max(0, most)) * M.itemsize[parameter], joined, regions


@compiled
def _cut_of(C, M, user):  # type: ignore[no-untyped-def]
    return M.cut[M.cut_ptr[C.variant[M.user[user]]] + M.user_operand[user]]


@compiled
def _add_compressed(W, M, parameter):  # type: ignore[no-untyped-def]
    """Add what readers hold of compressed shards."""
    D, S = W.shards, W.scratch
    find_geometry(W, parameter)
    for shard in range(D.ptr[S.geometry[parameter]], D.ptr[S.geometry[parameter] + 1]):
        find_members(W, parameter, shard)
        if D.lowest[shard] >= 0 and compresses(W, W.state.sync[parameter]):
            for place in range(S.members[0]):
                M.part[MOVED, S.members[1 + place]] += _held_bytes(W, find_effort(W, parameter, shard), D.bytes[shard], place)


@compiled
def _held_bytes(W, effort, size, place):  # type: ignore[no-untyped-def]
    """Bytes that a reader of a compressed shard holds for it, at most. ``place``: its place among the readers. Call it after
    ``compresses``. The counterpart of ``CompressedSum.buffers``."""
    D, S, others = W.shards, W.scratch, 0
    if S.leader[place] != place:
        return COPIES * size
    for i in range(S.members[0]):
        others += 1 if S.leader[i] == place else 0
    held = D.effort[effort + OF_TYPES + TYPE_COLUMNS * W.cluster.device_type[S.members[1 + place]] + PEER_HOLDS]
    if S.peers[0] < S.members[0]:
        held += COPIES * (others - 1) * size + D.effort[effort + WHOLE]
    return held
