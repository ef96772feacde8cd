"""An upper bound of each device's peak memory in any order of its tasks, for the strategies of a search (compiled).

The exact bound is ``memory.peaks``. The sums here are the same, except that the exact one finds in the whole plan what is held only once.
So this one is larger where operators read the same part of the batch, where a parameter's users cut it differently (their regions are
counted one by one), for buckets, and for what servers own. A strategy of which it says that it fits does; about others ask the exact model.
"""

from __future__ import annotations

from soap.plan.syncs.bucketing import BUCKET_BYTES
from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.delivery import deliver
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.machine_code import entry
from soap.simulator.compiled.marks import held_bytes, holds_on_host, runs_again
from soap.simulator.compiled.memory_tables import (
    ACTIVATIONS,
    ASSEMBLED,
    COLLECTED,
    COLLECTED_AT_ONCE,
    COLLECTED_TWICE,
    COMPACT,
    FITS,
    GRADIENTS,
    HELD,
    KEPT,
    LARGEST_ADDED,
    LARGEST_GRADIENT,
    LARGEST_SHARD,
    LARGEST_SUM,
    LARGEST_TILE,
    MADE,
    PARAMETER_GRADIENTS,
    PARTS,
    PRODUCTS,
    READ,
    REGIONS,
    SENT,
    SENT_BETWEEN,
    TRAINABLE,
    UNKNOWN,
    MemoryTables,
)
from soap.simulator.compiled.rows import is_sparse
from soap.simulator.compiled.syncs.codes import has_server, is_as_it_travels, is_gathered, offloads, sums_in_place
from soap.simulator.compiled.syncs.gathered_memory import add_gathered
from soap.simulator.compiled.syncs.memory import add_synchronized, away_bytes, cut_of
from soap.simulator.compiled.transit import add_fetches, add_holdings, add_sent, add_sums
from soap.simulator.compiled.variants import AWAY, CELLS
from soap.simulator.compiled.variants import PARTS as PARTS_OF
from soap.simulator.compiled.world import World


@entry
def bound_memory(W: World, M: MemoryTables) -> int:
    """Fill ``total`` for the strategy that the state holds; returns FITS or UNKNOWN."""
    G, K, C, S = W.graph, W.cluster, W.state, W.scratch
    devices, operators = len(C.busy), len(G.backward)
    fill(M.step, 0, len(M.step), 0)
    for row in range(PARTS):
        fill(M.part[row], 0, devices, 0)
    for parameter in range(len(M.user_ptr) - 1):
        _parameter(W, M, parameter)
    add_gathered(W, M)
    for op in range(operators):
        _tiles(W, M, op)
        deliver(W, op)
        add_fetches(G, S, M, op)
        add_sent(W, M, op)
        add_sums(W, M, op)
        add_holdings(W, M, op)
    fits = _hosts_fit(M, C)
    for device in range(devices):
        _sum_up(K, M, operators, device)
        fits &= M.total[device] <= M.limit[device]
    return FITS if fits else UNKNOWN


@compiled
def _hosts_fit(M, C):  # type: ignore[no-untyped-def]
    """Whether hosts certainly have enough memory for the strategy."""
    return not (M.fixed[2] != 0 and _any_servers(C)) and not (M.fixed[3] != 0 and _any_offloads(C))


@compiled
def _any_servers(C):  # type: ignore[no-untyped-def]
    found = False
    for code in C.sync:
        found |= has_server(code)
    return found


@compiled
def _any_offloads(C):  # type: ignore[no-untyped-def]
    found = False
    for code in C.sync:
        found |= offloads(code)
    for mark in C.marked:
        found |= holds_on_host(C, mark)
    return found


@compiled
def _sum_up(K, M, operators, device):  # type: ignore[no-untyped-def]
    level = peak = 0
    for i in range(operators + 1):
        level += M.step[device * (operators + 2) + i]
        peak = max(peak, level)
    part, states = M.part, M.fixed[1]
    backward = peak + part[LARGEST_TILE, device] + part[LARGEST_ADDED, device] + 2 * part[LARGEST_GRADIENT, device]
    backward += part[COLLECTED, device] + part[COLLECTED_TWICE, device] + part[SENT, device] + part[SENT_BETWEEN, device]
    held, trainable, work = part[HELD, device], part[TRAINABLE, device], M.fixed[0] + part[ACTIVATIONS, device] + backward
    bucket = min(trainable, BUCKET_BYTES + part[LARGEST_SHARD, device])
    updating = max(trainable, 3 * part[LARGEST_SHARD, device]) if states > 1 and K.serves_itself[device] else trainable
    M.total[device] = held + (1 + states) * trainable + max(work + max(part[LARGEST_SUM, device], bucket), updating)


@compiled
def _parameter(W, M, parameter):  # type: ignore[no-untyped-def]
    """Add what devices hold of a parameter because of all its users."""
    G, V, C = W.graph, W.variants, W.state
    first, last = M.user_ptr[parameter], M.user_ptr[parameter + 1]
    if first == last:
        return
    code = C.sync[parameter] if M.trainable[parameter] or is_gathered(C.sync[parameter]) else 0
    devices, itemsize, part = len(C.busy), M.itemsize[parameter], M.part
    cut, same, covered = cut_of(C, M, first), True, False
    for i in range(first, last):
        own = cut_of(C, M, i)
        same &= own == cut
        covered |= M.cut_volume[own] == M.elements[parameter]
    disjoint = same and M.cut_volume[cut] >= 0
    by_rows = has_server(code) and is_sparse(G, parameter)
    if not sums_in_place(code) or not is_as_it_travels(code):
        add_synchronized(W, M, parameter, code, disjoint)
    fill(M.total, 0, devices, 0)
    M.seen[0] += 1
    stamp = M.seen[0]
    for i in range(first, last):
        op, operand = M.user[i], M.user_operand[i]
        cells, parts = V.rows[C.variant[op], CELLS], W.order.count[0]
        each = max(1, cells // V.rows[C.variant[op], PARTS_OF])  # tiles of a micro-batch
        at = M.rows[C.variant[op], REGIONS] + operand * cells
        for tile in range(C.tiles[op]):
            region, device = M.data[at + tile % cells], C.dev[C.dev_ptr[op] + tile]
            if region < 0:
                continue
            size = M.region_volume[region] * itemsize
            place, reader = 1 + region * devices + device, i * parts + tile % cells // each
            if not disjoint:
                part[ACTIVATIONS, device] += size
                part[ASSEMBLED, device] += size
            if by_rows and G.backward[op]:
                continue
            if M.seen[place] < 2 * stamp:
                M.seen[place], M.seen_by[place] = 2 * stamp, reader
                M.total[device] += size
                continue
            collected = size if disjoint and M.trainable[parameter] else 0
            if M.seen[place] == 2 * stamp:
                M.seen[place] += 1
                part[COLLECTED_TWICE, device] += collected
            if M.seen_by[place] >= 0 and (M.seen_by[place] // parts != i or M.seen_by[place] == reader):
                part[COLLECTED_AT_ONCE, device] += collected
                reader = -1  # of several it is one sum
            M.seen_by[place] = reader if M.seen_by[place] >= 0 else -1
    whole = M.elements[parameter] * itemsize
    rest = 0  # what no tile reads is held by one of the devices, so the upper bound adds it to each
    if M.trainable[parameter] and not covered:
        rest = whole - (M.cut_volume[cut] * itemsize if disjoint else 0)
    for device in range(devices):
        held = min(M.total[device], whole)
        part[HELD, device] += held + rest
        if M.trainable[parameter]:
            part[TRAINABLE, device] += held + rest
            part[HELD, device] += away_bytes(W, M, code, device) * (held + rest)
            part[LARGEST_SHARD, device] = max(part[LARGEST_SHARD, device], held, rest)
            part[COLLECTED, device] += 0 if disjoint else held
            part[COLLECTED, device] += held if has_server(code) else 0


@compiled
def _tiles(W, M, op):  # type: ignore[no-untyped-def]
    V, K, C = W.variants, W.cluster, W.state
    row = C.variant[op]
    cells, part = V.rows[row, CELLS], M.part
    kept, read, gradients, own = M.rows[row, KEPT], M.rows[row, READ], M.rows[row, GRADIENTS], M.rows[row, PARAMETER_GRADIENTS]
    has_rows = M.rows[row, COMPACT] >= 0
    made, away = M.rows[row, MADE], V.rows[row, AWAY]
    for tile in range(C.tiles[op]):
        device, cell = C.dev[C.dev_ptr[op] + tile], tile % cells
        part[ACTIVATIONS, device] += M.data[kept + cell] + M.data[read + cell]
        part[ACTIVATIONS, device] += M.data[made + cell] * (runs_again(C, op) + C.divided[op])
        product = M.data[M.rows[row, PRODUCTS] + cell]
        part[ACTIVATIONS, device] += held_bytes(C, op, M.data[made + cell], product, V.away[away + cell], K.serves_itself[device])
        part[LARGEST_TILE, device] = max(part[LARGEST_TILE, device], M.data[gradients + cell])
        most = M.data[own + cell]
        if has_rows:
            most = _gradient(W, M, op, cell, most)
        part[LARGEST_GRADIENT, device] = max(part[LARGEST_GRADIENT, device], most)


@compiled
def _gradient(W, M, op, cell, size):  # type: ignore[no-untyped-def]
    """Bytes of a tile's parameter gradients at most, if it has only rows of some of the parameters."""
    G, V, C = W.graph, W.variants, W.state
    row, most = C.variant[op], size
    cells = V.rows[row, CELLS]
    for k in range(M.operand_ptr[op + 1] - M.operand_ptr[op]):
        parameter = M.operand[M.operand_ptr[op] + k]
        region = M.data[M.rows[row, REGIONS] + k * cells + cell]
        if region >= 0 and M.trainable[parameter] and has_server(C.sync[parameter]) and is_sparse(G, parameter):
            whole = M.region_volume[region] * M.itemsize[parameter]
            most += M.data[M.rows[row, COMPACT] + k * cells + cell] - whole
    return most
