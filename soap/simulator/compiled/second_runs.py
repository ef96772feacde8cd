"""The tasks of recomputation, and of what operators offload, in an operator's block (compiled). The counterpart of
``simulator.second_runs``.

An operator that is recomputed has two more slots for each tile, behind those of the backward passes: its need, and its second run. One that
offloads has three: its need, the copy back and the copy to the host.
"""

from __future__ import annotations

from soap.simulator.communication.offloading import DOWN, UP
from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.fetches import is_remote
from soap.simulator.compiled.holdings import tile_count
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.marks import needed_together, runs_again
from soap.simulator.compiled.scratch import CLAIMS, EDGES, FETCHES, FULL, HOLDINGS, REDUCTIONS
from soap.simulator.compiled.state import AGAIN_TILE, COPY_AWAY, COPY_BACK, NEED, State
from soap.simulator.compiled.syncs.offloading import copied_ns, lift
from soap.simulator.compiled.task_keys import BACKWARD, FORWARD, set_key, task_key
from soap.simulator.compiled.variants import AWAY, CELLS, PARTS
from soap.simulator.compiled.world import World
from soap.simulator.second_runs import AGAIN as AGAIN_STAGE
from soap.simulator.second_runs import AWAY as AWAY_STAGE
from soap.simulator.second_runs import NEED as NEED_STAGE
from soap.simulator.second_runs import NEED_NS
from soap.strategy.kept import OFFLOADED

NONE = -1
"""Claim of a tile that nobody needs."""


@compiled
def tile_slots(C: State, op: int) -> int:
    """The number of slots of an operator's tiles: forward, backward, if it is marked those behind them, and weight gradients."""
    return (slots_of_a_tile(C.marked[op]) + C.divided[op]) * C.tiles[op]


@compiled
def slots_of_a_tile(mark: int) -> int:
    """The number of slots of one tile, without weight gradients."""
    return 5 if mark == OFFLOADED else 4 if runs_again(mark) else 2


@compiled
def weights_slot(C: State, op: int) -> int:
    """The first slot of an operator's weight gradients, if it is divided."""
    return C.tile_slot[op] + slots_of_a_tile(C.marked[op]) * C.tiles[op]


@compiled
def place_second_runs(C: State, op: int, operators: int, count: int, slot: int) -> None:
    """Give the tiles of a marked operator slots for their needs and second runs, from ``slot`` on. A second run waits for the first one and
    for its need."""
    for tile in range(count):
        first, need, again = C.tile_slot[op] + tile, slot + tile, slot + count + tile
        set_key(C, need, task_key(BACKWARD, operators - 1 - op, NEED_STAGE, tile, 0, 0))
        set_key(C, again, task_key(BACKWARD, operators - 1 - op, AGAIN_STAGE, tile, 0, 0))
        C.duration[need], C.launch[need], C.latency[need], C.overhead[need] = NEED_NS, 0, 0, 0
        C.duration[again], C.launch[again], C.latency[again] = C.duration[first], C.launch[first], 0
        C.resource[need], C.resource_n[need] = C.resource[first], 0
        C.resource[again], C.resource_n[again] = C.resource[first], 1
        C.waits[need], C.alive[need], C.kind[need] = 0, 0, NEED
        C.waits[again], C.alive[again], C.kind[again] = 2, 0, AGAIN_TILE
        for own in (need, again):
            C.owner[own], C.index[own], C.moved[own], C.claim[own] = op, tile, 0, NONE


@compiled
def place_copies(W: World, op: int, operators: int, slot: int) -> None:
    """Give the tiles of an offloading operator slots for their needs, copies back and copies to the host, from ``slot`` on. A copy to the
    host waits for the forward pass, a copy back for this copy and the need."""
    V, K, C = W.variants, W.cluster, W.state
    row, count = V.rows[C.variant[op]], C.tiles[op]
    for tile in range(count):
        need, back, away = slot + tile, slot + count + tile, slot + 2 * count + tile
        device, size = C.resource[C.tile_slot[op] + tile], V.away[row[AWAY] + tile % row[CELLS]]
        set_key(C, need, task_key(BACKWARD, operators - 1 - op, NEED_STAGE, tile, 0, 0))
        set_key(C, back, task_key(BACKWARD, operators - 1 - op, AGAIN_STAGE, tile, 0, 0))
        set_key(C, away, task_key(FORWARD, op, AWAY_STAGE, tile, 0, 0))
        C.duration[need], C.resource[need], C.resource_n[need] = NEED_NS, device, 0
        C.resource[back], C.resource_n[back] = lift(K, device, UP)
        C.resource[away], C.resource_n[away] = lift(K, device, DOWN)
        C.duration[back] = C.duration[away] = copied_ns(K, device, size)
        C.waits[need], C.waits[back], C.waits[away] = 0, 2, 1
        C.kind[need], C.kind[back], C.kind[away] = NEED, COPY_BACK, COPY_AWAY
        for own in (need, back, away):
            C.launch[own], C.latency[own], C.overhead[own], C.alive[own] = 0, 0, 0, 0
            C.owner[own], C.index[own], C.moved[own], C.claim[own] = op, tile, 0, NONE


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
def claim_by_readers(W: World, op: int) -> None:
    """Add the claims of the tiles that read an operator's outputs on their own device."""
    G, V, C, S = W.graph, W.variants, W.state, W.scratch
    for fetch in range(S.count[FETCHES]):
        whole, carries = is_whole(S, fetch), G.output_gradient[G.output_ptr[op] + S.f_out[fetch]]
        consumer = S.f_first[fetch]
        while consumer >= 0:
            slot, tile = S.c_slot[consumer], S.c_tile[consumer]
            reader = G.reader[G.reader_ptr[op] + slot]
            count = tile_count(V, C, reader)
            if C.alive[C.tile_slot[reader] + count + tile]:
                for piece in range(S.f_piece[fetch], S.f_piece[fetch + 1]):
                    hold = S.p_hold[piece]
                    if is_remote(S, piece):
                        continue
                    if whole and S.h_red[hold] < 0 and needed_together(C.marked[op], C.marked[reader]):
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
def need_tiles(W: World, op: int, cells: int, own: int, start: bool) -> bool:
    """Let each need of a marked operator wait for the highest claim. ``start``: whether the loss's own claim, which is the highest,
    has edges already. True if a claim has changed. ``alive`` of its backward passes is known."""
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
            _offer_sum(C, S, red, cells, own, need, offer, of_the_loss(W))
    changed = False
    for tile in range(count):
        alive = C.alive[need - count + tile]
        claim = S.best[tile] if alive else NONE
        changed |= C.claim[need + tile] != claim
        C.claim[need + tile], C.alive[need + tile], C.alive[need + count + tile] = claim, alive, alive
        if C.marked[op] == OFFLOADED:
            C.alive[need + 2 * count + tile] = alive
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
        n = S.count[EDGES]
        if n + 1 > len(S.e_src):
            raise MemoryError(FULL)
        S.e_src[n], S.e_dst[n] = source, need + tile
        S.count[EDGES] = n + 1


@compiled
def _offer_sum(C, S, red, cells, own, need, offer, lowest):  # type: ignore[no-untyped-def]
    """Claims of a sum's readers, for all tiles of its group. If a task sums the gradients, it is the only claim. ``lowest``: above all
    precedences of readers."""
    first, last = S.member_ptr[S.r_group[red]], S.member_ptr[S.r_group[red] + 1]
    for hold in range(S.r_hold[red], S.r_hold[red + 1]):
        node = S.claim_head[hold]
        while node >= 0:
            lowest = min(lowest, S.claim_precedence[node])
            for i in range(first, last if S.r_back[red] < 0 else first):
                _offer(C, S, S.r_rep[red] * cells + S.member[i], S.claim_task[node], S.claim_precedence[node], need, offer)
            node = S.claim_next[node]
    for i in range(first, first if S.r_back[red] < 0 else last):
        _offer(C, S, S.r_rep[red] * cells + S.member[i], own + S.r_back[red], lowest, need, offer)


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
            if runs_again(C.marked[reader]) and C.alive[C.tile_slot[reader] + others + tile]:
                for piece in range(S.f_piece[fetch], S.f_piece[fetch + 1]):
                    hold = S.p_hold[piece]
                    if S.h_red[hold] < 0 and C.alive[C.tile_slot[op] + count + S.h_tile[hold]]:
                        n = S.count[EDGES]
                        if n + 1 > len(S.e_src):
                            raise MemoryError(FULL)
                        S.e_src[n], S.e_dst[n] = count + S.h_tile[hold], C.tile_slot[reader] + 3 * others + tile
                        S.count[EDGES] = n + 1
            consumer = S.c_next[consumer]
