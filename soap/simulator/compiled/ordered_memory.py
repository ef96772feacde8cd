"""An upper bound of each device's memory if its passes follow an order of micro-batches, however long anything takes (compiled).

What ``memory.sweep`` says is held from one pass to another is counted between these two: a tile's from its forward pass to its last
one. What begins or ends with other devices' work is held from the last pass of its own device that is certainly over before, to the first
one that certainly ends behind (``pass_places``). Where a tile is recomputed or offloads, nothing is saved by that. What passes take while
they run, parameters, and what synchronization holds count as in ``compiled.memory``, whose parts have to be there.

Of what devices send, at most ``SENT_BYTES`` wait to leave, or one message: the runtime waits for older ones (``Communicator.keep``).
"""

from __future__ import annotations

from soap.plan.syncs.bucketing import BUCKET_BYTES
from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.carriers import BROADCAST, MESSAGE
from soap.simulator.compiled.delivery import deliver
from soap.simulator.compiled.fetches import is_remote
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.machine_code import entry
from soap.simulator.compiled.marks import held_bytes, is_made_again, runs_again
from soap.simulator.compiled.memory_tables import (
    ASSEMBLED,
    COLLECTED,
    COLLECTED_AT_ONCE,
    HELD,
    KEPT,
    LARGEST_ADDED,
    LARGEST_GRADIENT,
    LARGEST_SENT,
    LARGEST_SHARD,
    LARGEST_SUM,
    LARGEST_TILE,
    MADE,
    PARTIALS,
    PRODUCTS,
    READ,
    SENT,
    SENT_BETWEEN,
    TRAINABLE,
    MemoryTables,
)
from soap.simulator.compiled.ordered_values import clear_holdings, hold_sums, hold_values, note_answer, note_read
from soap.simulator.compiled.pass_places import (
    FOREVER,
    PlaceTables,
    backward_place,
    close_needs,
    earliest_arrival,
    find_places,
    forward_place,
    hold,
    last_place,
    note_needs,
    surely_over,
)
from soap.simulator.compiled.scratch import FETCHES
from soap.simulator.compiled.variants import AWAY, CELLS
from soap.simulator.compiled.world import World
from soap.simulator.memory.transit import SENT_BYTES


@entry
def order_memory(W: World, M: MemoryTables, L: PlaceTables) -> None:
    """Fill ``ordered`` for the strategy that the state holds, whose parts ``M`` has. ``base`` and ``node_base`` say where each device's
    places and nodes begin (``count_passes``)."""
    operators, devices = len(W.graph.backward), len(W.state.busy)
    find_places(W, L)
    fill(L.done, 0, len(L.done), 0)
    for op in range(operators if len(L.done) > 0 else 0):
        deliver(W, op)
        note_needs(W, L, op)
    if len(L.done) > 0:
        close_needs(W, L)
    fill(L.change, 0, len(L.change), 0)
    fill(L.steady, 0, devices, 0)
    for op in range(operators):
        _hold_tiles(W, M, L, op)
        deliver(W, op)
        clear_holdings(W)
        for fetch in range(W.scratch.count[FETCHES]):
            _hold_fetch(W, L, op, fetch)
        hold_values(W, L, op)
        hold_sums(W, L, op)
    for device in range(devices):
        L.ordered[device] = _sum_up(W, M, L, device)


@compiled
def _sum_up(W, M, L, device):  # type: ignore[no-untyped-def]
    level = peak = 0
    for place in range(L.base[device], L.base[device + 1]):
        level += L.change[place]
        peak = max(peak, level)
    part, states = M.part, M.fixed[1]
    work = M.fixed[0] + L.steady[device] + peak + part[ASSEMBLED, device]
    work += part[LARGEST_TILE, device] + part[LARGEST_ADDED, device] + 2 * part[LARGEST_GRADIENT, device]
    work += part[COLLECTED, device] + part[COLLECTED_AT_ONCE, device] + part[SENT, device]
    work += min(part[SENT_BETWEEN, device], max(SENT_BYTES, part[LARGEST_SENT, device]))
    trainable = part[TRAINABLE, device]
    bucket = min(trainable, BUCKET_BYTES + part[LARGEST_SHARD, device])
    updating = max(trainable, 3 * part[LARGEST_SHARD, device]) if states > 1 and W.cluster.serves_itself[device] else trainable
    return part[HELD, device] + (1 + states) * trainable + max(work + max(part[LARGEST_SUM, device], bucket), updating)


@compiled
def _hold_tiles(W, M, L, op):  # type: ignore[no-untyped-def]
    """What tiles keep and make, from their forward passes to their last ones; copies of the batch, which others may share, all the time."""
    V, K, C = W.variants, W.cluster, W.state
    row, light = C.variant[op], runs_again(C, op) and not is_made_again(C, op)
    cells, made = V.rows[row, CELLS], M.rows[row, MADE]
    for tile in range(C.tiles[op]):
        device, cell = C.dev[C.dev_ptr[op] + tile], tile % cells
        first, last = forward_place(W, L, op, tile), last_place(W, L, op, tile)
        size = M.data[M.rows[row, KEPT] + cell] + M.data[made + cell] * runs_again(C, op)
        size -= 0 if light else M.data[M.rows[row, PARTIALS] + cell]  # see ``hold_sums``
        product, away = M.data[M.rows[row, PRODUCTS] + cell], V.away[V.rows[row, AWAY] + cell]
        size += held_bytes(C, op, M.data[made + cell], product, away, K.serves_itself[device])
        hold(L, device, first, last, size)
        L.steady[device] += M.data[M.rows[row, READ] + cell]


@compiled
def _hold_fetch(W, L, op, fetch):  # type: ignore[no-untyped-def]
    """A region that is brought, from its arrival on, or put together, and its gradient. Note for its holdings who reads them."""
    G, C, S = W.graph, W.state, W.scratch
    begin, end, device = S.f_piece[fetch], S.f_piece[fetch + 1], S.f_dev[fetch]
    out, devices = G.output_ptr[op] + S.f_out[fetch], len(C.busy)
    itemsize, apart = G.output_itemsize[out], end - begin > 1
    first, last, back, consumer = FOREVER, 0, FOREVER, S.f_first[fetch]
    while consumer >= 0:
        reader, tile = G.reader[G.reader_ptr[op] + S.c_slot[consumer]], S.c_tile[consumer]
        first, last = min(first, forward_place(W, L, reader, tile)), max(last, last_place(W, L, reader, tile))
        own = backward_place(W, L, reader, tile)
        back = min(back, own if own >= 0 else FOREVER)
        consumer = S.c_next[consumer]
    answers = G.output_gradient[out] != 0 and back < FOREVER
    region, brought, arrival, taken = 0, 0, FOREVER, last
    for piece in range(begin, end):
        hold_number, size = S.p_hold[piece], S.p_volume[piece] * itemsize
        source, made = S.h_dev[hold_number], forward_place(W, L, op, S.h_tile[hold_number])
        answered = backward_place(W, L, op, S.h_tile[hold_number])
        region += size
        if not is_remote(S, piece):
            note_read(S, hold_number, first, last)
            taken = max(taken, answered if answered >= 0 else FOREVER) if answers else taken
            continue
        brought += size
        arrival = min(arrival, earliest_arrival(L, devices, device, source, made))
        carrier = S.p_carrier[piece]
        alone = S.k_pattern[carrier] == BROADCAST
        alone |= S.k_pattern[carrier] == MESSAGE and S.k_part[carrier + 1] - S.k_part[carrier] == 1
        apart |= not alone
        if answers:  # its part of the gradient leaves here and is received there, with others of one message in one piece first
            taken = max(taken, surely_over(L, devices, device, back, source, answered))
            come = earliest_arrival(L, devices, source, device, back)
            hold(L, source, come, answered if answered >= 0 else FOREVER, size if alone else 2 * size)
        if not answers or answered < 0:
            note_read(S, hold_number, FOREVER, surely_over(L, devices, source, made, device, first))
    if brought > 0:
        hold(L, device, arrival, max(last, taken), region)
        hold(L, device, back, taken, region if answers else 0)
        hold(L, device, arrival, first, brought if apart else 0)
    elif apart:
        _hold_for_each(W, L, op, fetch, region)
    for piece in range(begin, end if answers else begin):
        note_answer(S, S.p_hold[piece], FOREVER if brought > 0 else back, brought > 0)


@compiled
def _hold_for_each(W, L, op, fetch, region):  # type: ignore[no-untyped-def]
    """A region that each of its readers puts together."""
    G, S = W.graph, W.scratch
    consumer = S.f_first[fetch]
    while consumer >= 0:
        reader, tile = G.reader[G.reader_ptr[op] + S.c_slot[consumer]], S.c_tile[consumer]
        hold(L, S.f_dev[fetch], forward_place(W, L, reader, tile), last_place(W, L, reader, tile), region)
        consumer = S.c_next[consumer]
