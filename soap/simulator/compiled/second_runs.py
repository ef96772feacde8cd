"""The rows that marks add to tiles, in an operator's block (compiled). The counterpart of ``simulator.second_runs``."""

from __future__ import annotations

from soap.plan.marks.seam import MOMENT_NS
from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.fetches import is_remote
from soap.simulator.compiled.holdings import tile_count
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.marks import (
    AGAIN,
    BACKWARD_BLOCK,
    COPY,
    DEVICE,
    IN_BACKWARD,
    MOMENT,
    NOTHING,
    ON,
    PRICE,
    ROW_BLOCKS,
    STAGE,
    WAITS,
    gathers,
    is_made_again,
    needed_together,
    row_count,
    runs_again,
)
from soap.simulator.compiled.operator_tasks import add_carrier, add_sum
from soap.simulator.compiled.scratch import CARRIERS, CLAIMS, FETCHES, FULL, HOLDINGS, REDUCTIONS
from soap.simulator.compiled.state import AGAIN_TILE, ROW, State
from soap.simulator.compiled.syncs.exchange import add_edge
from soap.simulator.compiled.syncs.offloading import copied_ns, lift
from soap.simulator.compiled.task_keys import BACKWARD, FORWARD, set_key, task_key
from soap.simulator.compiled.tile_times import PASSES
from soap.simulator.compiled.variants import AWAY, CELLS, PARTS
from soap.simulator.compiled.world import World
from soap.simulator.task_list import SUM

NONE = -1
"""Claim of a tile that nobody needs."""

GATHERED, SUMMED = 1, 2
"""How an operator's outputs travel a second time (``Plan.gathered_again``, ``summed_again``), if they do."""


@compiled
def tile_slots(C: State, op: int) -> int:
    """The number of slots of an operator's tiles: forward, backward, the rows of its mark, and weight gradients."""
    return (slots_of_a_tile(C, C.marked[op]) + C.divided[op]) * C.tiles[op]


@compiled
def slots_of_a_tile(C: State, mark: int) -> int:
    """The number of slots of one tile, without weight gradients."""
    return ROW_BLOCKS + row_count(C, mark)


@compiled
def weights_slot(C: State, op: int) -> int:
    """The first slot of an operator's weight gradients, if it is divided."""
    return C.tile_slot[op] + slots_of_a_tile(C, C.marked[op]) * C.tiles[op]


@compiled
def place_rows(W: World, op: int, costs: int) -> None:
    """Give the rows of an operator's mark slots, row by row. ``costs``: where those of its tiles begin."""
    V, K, C = W.variants, W.cluster, W.state
    M, variant, count, last = C.marks, V.rows[C.variant[op]], C.tiles[op], len(W.graph.backward) - 1
    slot, begin = C.tile_slot[op] + ROW_BLOCKS * count, M.ptr[C.marked[op]]
    for row in range(begin, M.ptr[C.marked[op] + 1]):
        own = M.rows[row]
        for tile in range(count):
            first, cell = C.tile_slot[op] + tile, tile % variant[CELLS]
            device = C.resource[first]
            if own[IN_BACKWARD]:
                set_key(C, slot, task_key(BACKWARD, last - op, own[STAGE], tile, 0, 0))
            else:
                set_key(C, slot, task_key(FORWARD, op, own[STAGE], tile, 0, 0))
            C.resource[slot], C.resource_n[slot] = device, 0 if own[ON] == NOTHING else 1
            if own[ON] > DEVICE:
                C.resource[slot], C.resource_n[slot] = lift(K, device, own[ON] - DEVICE - 1)
            if own[PRICE] == MOMENT:
                C.duration[slot] = MOMENT_NS
            elif own[PRICE] == COPY:
                C.duration[slot] = copied_ns(K, device, V.away[variant[AWAY] + cell])
            else:
                C.duration[slot] = V.costs[costs + (K.device_type[device] * PASSES + own[PRICE]) * variant[CELLS] + cell]
            C.launch[slot] = C.launch[first] if own[AGAIN] else 0
            C.kind[slot] = AGAIN_TILE if own[AGAIN] else ROW + row - begin
            C.latency[slot], C.overhead[slot], C.moved[slot], C.follow[slot] = 0, 0, 0, 0
            C.waits[slot], C.alive[slot], C.owner[slot], C.index[slot], C.claim[slot] = own[WAITS], 0, op, tile, NONE
            slot += 1


@compiled
def begin_claims(S) -> None:  # type: ignore[no-untyped-def]
    """Forget all claims."""
    S.count[CLAIMS] = 0
    for hold in range(S.count[HOLDINGS]):
        S.claim_head[hold] = -1


@compiled
def precedence(W: World, op: int, tile: int) -> int:
    """Of a tile's backward pass (``simulator.second_runs.Need``), as one number below that of the loss's claim: passes come in falling
    precedence."""
    A, V, row = W.order, W.variants, W.state.variant[op]
    cells = V.rows[row, CELLS]
    part = (tile % cells) // (cells // V.rows[row, PARTS])
    return op + len(W.graph.backward) * (len(A.part) - A.back_rank[op * A.count[0] + part])


@compiled
def of_the_loss(W: World) -> int:
    """The precedence of the loss's claim, above all others."""
    return len(W.graph.backward) * (len(W.order.part) + 1)


@compiled
def add_claim(S, hold, source, precedence):  # type: ignore[no-untyped-def]
    """Note a reader's claim for a holding: the precedence of the pass that the backward pass has come to, and the task after which that is
    so."""
    n = S.count[CLAIMS]
    if n + 1 > len(S.claim_task):
        raise MemoryError(FULL)
    S.claim_task[n], S.claim_precedence[n], S.claim_next[n] = source, precedence, S.claim_head[hold]
    S.claim_head[hold] = n
    S.count[CLAIMS] = n + 1


@compiled
def is_whole(S, fetch):  # type: ignore[no-untyped-def]
    """Whether all of a region is on its device, so that it may be made again."""
    whole = True
    for piece in range(S.f_piece[fetch], S.f_piece[fetch + 1]):
        whole &= not is_remote(S, piece)
    return whole


@compiled
def is_gathered_again(W: World, op: int) -> bool:
    """Whether an operator's outputs travel a second time (``Plan.gathered_again``). It has been delivered."""
    G, C, S = W.graph, W.state, W.scratch
    found = False
    for place in range(G.reader_ptr[op], G.reader_ptr[op + 1]):
        found |= gathers(C, G.reader[place])
    if not found or C.marks.lets_go[C.marked[op]]:
        return False
    for out in range(G.output_ptr[op], G.output_ptr[op + 1]):
        if not G.output_gradient[out]:
            return False
    travels = False
    for fetch in range(S.count[FETCHES]):
        here = there = summed = 0
        for piece in range(S.f_piece[fetch], S.f_piece[fetch + 1]):
            remote = is_remote(S, piece)
            there += remote
            here += not remote
            summed += S.h_red[S.p_hold[piece]] >= 0
        if there == 0:
            continue
        if here == 0 or summed > 0:
            return False
        travels = True
        consumer = S.f_first[fetch]
        while consumer >= 0:
            if not gathers(C, G.reader[G.reader_ptr[op] + S.c_slot[consumer]]):
                return False
            consumer = S.c_next[consumer]
    return travels


@compiled
def is_summed_again(W: World, op: int) -> bool:
    """Whether an operator's outputs are summed a second time (``Plan.summed_again``). It has been delivered."""
    G, C, S = W.graph, W.state, W.scratch
    if S.count[REDUCTIONS] == 0 or S.count[CARRIERS] > 0 or not is_made_again(C, op) or G.reader_ptr[op + 1] == G.reader_ptr[op]:
        return False
    for place in range(G.reader_ptr[op], G.reader_ptr[op + 1]):
        if not (gathers(C, G.reader[place]) and runs_again(C, G.reader[place])):
            return False
    for out in range(G.output_ptr[op], G.output_ptr[op + 1]):
        if not G.output_gradient[out]:
            return False
    for red in range(S.count[REDUCTIONS]):
        if S.r_dev_ptr[red + 1] - S.r_dev_ptr[red] < 2:
            return False
    for fetch in range(S.count[FETCHES]):
        if S.f_piece[fetch + 1] - S.f_piece[fetch] > 1:
            return False
    return True


@compiled
def claim_by_readers(W: World, op: int, again: int) -> None:
    """Add the claims of the tiles that read an operator's outputs on their own device, or if these are made and gathered again, on any.
    ``again``: see ``lower_operator``."""
    G, V, C, S = W.graph, W.variants, W.state, W.scratch
    for fetch in range(S.count[FETCHES]):
        whole, carries = is_whole(S, fetch), G.output_gradient[G.output_ptr[op] + S.f_out[fetch]]
        gathered = again == GATHERED and not whole and is_made_again(C, op)
        consumer = S.f_first[fetch]
        while consumer >= 0:
            slot, tile = S.c_slot[consumer], S.c_tile[consumer]
            reader = G.reader[G.reader_ptr[op] + slot]
            count = tile_count(V, C, reader)
            if C.alive[C.tile_slot[reader] + count + tile]:
                for piece in range(S.f_piece[fetch], S.f_piece[fetch + 1]):
                    hold = S.p_hold[piece]
                    if gathered:
                        add_claim(S, hold, S.need_base[slot] + tile, C.claim[C.tile_slot[reader] + 2 * count + tile])
                        continue
                    if is_remote(S, piece):
                        continue
                    if whole and (S.h_red[hold] < 0 or again == SUMMED) and needed_together(C, op, reader):
                        add_claim(S, hold, S.need_base[slot] + tile, C.claim[C.tile_slot[reader] + 2 * count + tile])
                    elif carries:
                        add_claim(S, hold, S.slot_base[slot] + tile, precedence(W, reader, tile))
            consumer = S.c_next[consumer]


@compiled
def last_reader(W: World, op: int, carrier: int) -> int:
    """The precedence of the last pass that gives a gradient to a part of a carrier."""
    G, V, C, S = W.graph, W.variants, W.state, W.scratch
    lowest = of_the_loss(W)
    for i in range(S.k_part[carrier], S.k_part[carrier + 1]):
        fetch = S.p_fetch[S.part[i]]
        consumer = S.f_first[fetch] if S.f_alive[fetch] > 0 else -1
        while consumer >= 0:
            reader = G.reader[G.reader_ptr[op] + S.c_slot[consumer]]
            if C.alive[C.tile_slot[reader] + tile_count(V, C, reader) + S.c_tile[consumer]]:
                lowest = min(lowest, precedence(W, reader, S.c_tile[consumer]))
            consumer = S.c_next[consumer]
    return lowest


@compiled
def need_tiles(W: World, op: int, cells: int, own: int, start: bool, again: int) -> bool:
    """Let each need of a marked operator wait for the highest claim. ``start``: whether the loss's own claim, which is the highest,
    has edges already. ``again``: see ``lower_operator``. True if a claim has changed. ``alive`` of its backward passes is known."""
    C, S = W.state, W.scratch
    count = C.tiles[op]
    if count > len(S.best):
        raise MemoryError(FULL)
    fill(S.best, 0, count, NONE)
    if start:
        for tile in range(min(cells, count)):
            S.best[tile] = of_the_loss(W)
    need = C.tile_slot[op] + 2 * count
    for offer in range(2):
        for hold in range(S.count[HOLDINGS]):
            if S.h_red[hold] < 0:
                _offer_holding(C, S, hold, S.h_tile[hold], need, offer)
        for red in range(S.count[REDUCTIONS]):
            _offer_sum(C, S, red, -1 if again == SUMMED else S.r_back[red], cells, own, need, offer, of_the_loss(W))
    changed = False
    for tile in range(count):
        alive = C.alive[need - count + tile]
        claim = S.best[tile] if alive else NONE
        changed |= C.claim[need + tile] != claim
        C.claim[need + tile] = claim
    return changed


@compiled
def _offer_holding(C, S, hold, tile, need, offer):  # type: ignore[no-untyped-def]
    node = S.claim_head[hold]
    while node >= 0:
        _offer(C, S, tile, S.claim_task[node], S.claim_precedence[node], need, offer)
        node = S.claim_next[node]


@compiled
def _offer(C, S, tile, source, precedence, need, offer):  # type: ignore[no-untyped-def]
    """First find the highest claim of each tile; then add edges from the tasks of these."""
    if offer == 0:
        S.best[tile] = max(S.best[tile], precedence)
    elif S.best[tile] == precedence and C.alive[need - C.tiles[C.owner[need]] + tile]:
        add_edge(S, source, need + tile)


@compiled
def _offer_sum(C, S, red, back, cells, own, need, offer, lowest):  # type: ignore[no-untyped-def]
    """Claims of a sum's readers, for all tiles of its group. If a task sums the gradients, ``back``, it is the only claim. ``lowest``:
    above all precedences of readers."""
    first, last = S.member_ptr[S.r_group[red]], S.member_ptr[S.r_group[red] + 1]
    for hold in range(S.r_hold[red], S.r_hold[red + 1]):
        node = S.claim_head[hold]
        while node >= 0:
            lowest = min(lowest, S.claim_precedence[node])
            for i in range(first, last if back < 0 else first):
                _offer(C, S, S.r_rep[red] * cells + S.member[i], S.claim_task[node], S.claim_precedence[node], need, offer)
            node = S.claim_next[node]
    for i in range(first, first if back < 0 else last):
        _offer(C, S, S.r_rep[red] * cells + S.member[i], own + back, lowest, need, offer)


@compiled
def gather_again(W: World, op: int, own: int, own_slot: int) -> None:
    """Add the second times of what brings an operator's outputs to others: after the first need of readers, and after second runs of the
    operator, if it is made again; readers' second runs, or backward passes, wait for them."""
    G, V, C, S = W.graph, W.variants, W.state, W.scratch
    count = C.tiles[op]
    for carrier in range(S.count[CARRIERS]):
        first = NONE
        for i in range(S.k_part[carrier], S.k_part[carrier + 1]):
            consumer = S.f_first[S.p_fetch[S.part[i]]]
            while consumer >= 0:
                reader = G.reader[G.reader_ptr[op] + S.c_slot[consumer]]
                others = tile_count(V, C, reader)
                if C.alive[C.tile_slot[reader] + others + S.c_tile[consumer]]:
                    first = max(first, C.claim[C.tile_slot[reader] + 2 * others + S.c_tile[consumer]])
                consumer = S.c_next[consumer]
        if first == NONE:
            continue
        task, before = add_carrier(W, op, carrier, False, True), -1
        for i in range(S.k_part[carrier], S.k_part[carrier + 1]):
            fetch, maker = S.p_fetch[S.part[i]], S.h_tile[S.p_hold[S.part[i]]]
            if is_made_again(C, op) and C.alive[C.tile_slot[op] + count + maker]:
                add_edge(S, count + maker, own_slot + task)
            consumer = S.f_first[fetch] if fetch != before else -1
            before = fetch
            while consumer >= 0:
                slot, tile = S.c_slot[consumer], S.c_tile[consumer]
                reader = G.reader[G.reader_ptr[op] + slot]
                others = tile_count(V, C, reader)
                begin = C.tile_slot[reader] + tile
                if C.alive[begin + others]:
                    if C.claim[begin + 2 * others] == first:
                        add_edge(S, S.need_base[slot] + tile, own_slot + task)
                    block = C.marks.again_block[C.marked[reader]] if runs_again(C, reader) else BACKWARD_BLOCK
                    add_edge(S, own + task, begin + block * others)
                consumer = S.c_next[consumer]


@compiled
def sum_again(W: World, op: int, own: int, own_slot: int) -> None:
    """Add the second times of an operator's sums, of what its second runs make; readers' second runs wait for them."""
    G, V, C, S = W.graph, W.variants, W.state, W.scratch
    count, cells = C.tiles[op], V.rows[C.variant[op], CELLS]
    if S.count[REDUCTIONS] > len(S.work):
        raise MemoryError(FULL)
    tasks = S.work[: S.count[REDUCTIONS]]
    for red in range(S.count[REDUCTIONS]):
        tasks[red] = NONE
        begin, end = S.member_ptr[S.r_group[red]], S.member_ptr[S.r_group[red] + 1]
        alive = True
        for i in range(begin, end):
            alive &= C.alive[C.tile_slot[op] + count + S.r_rep[red] * cells + S.member[i]] > 0
        if not alive:
            continue
        first = S.r_rep[red] * cells + S.member[begin]
        key = task_key(BACKWARD, len(G.backward) - 1 - op, SUM, first, S.r_out[red], 0)
        task = add_sum(W, op, red, key, False)
        for i in range(begin, end):
            add_edge(S, count + S.r_rep[red] * cells + S.member[i], own_slot + task)
        tasks[red] = task
    for fetch in range(S.count[FETCHES]):
        task, consumer = tasks[S.h_red[S.p_hold[S.f_piece[fetch]]]], S.f_first[fetch]
        while consumer >= 0:
            reader, tile = G.reader[G.reader_ptr[op] + S.c_slot[consumer]], S.c_tile[consumer]
            others = tile_count(V, C, reader)
            if task != NONE and C.alive[C.tile_slot[reader] + others + tile]:
                add_edge(S, own + task, C.tile_slot[reader] + C.marks.again_block[C.marked[reader]] * others + tile)
            consumer = S.c_next[consumer]


@compiled
def link_second_runs(W: World, op: int) -> None:
    """Add edges from the second runs of an operator, all of which is recomputed, to those that read what they make."""
    G, V, C, S = W.graph, W.variants, W.state, W.scratch
    count = C.tiles[op]
    for fetch in range(S.count[FETCHES]):
        if not is_whole(S, fetch):
            continue
        consumer = S.f_first[fetch]
        while consumer >= 0:
            reader, tile = G.reader[G.reader_ptr[op] + S.c_slot[consumer]], S.c_tile[consumer]
            others = tile_count(V, C, reader)
            if runs_again(C, reader) and C.alive[C.tile_slot[reader] + others + tile]:
                for piece in range(S.f_piece[fetch], S.f_piece[fetch + 1]):
                    hold = S.p_hold[piece]
                    if S.h_red[hold] < 0 and C.alive[C.tile_slot[op] + count + S.h_tile[hold]]:
                        block = C.tile_slot[reader] + C.marks.again_block[C.marked[reader]] * others
                        add_edge(S, count + S.h_tile[hold], block + tile)
            consumer = S.c_next[consumer]
