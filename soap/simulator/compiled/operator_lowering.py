"""Lowers one operator: makes its tiles, and all tasks and edges of its outputs (compiled). The counterpart of ``lowering``.

An operator's block depends only on its own configuration, on its readers' configurations, and on which of their tiles have a backward pass.
So a change of one operator replaces its own block and the blocks of the operators whose outputs it reads.
"""

from __future__ import annotations

from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.delivery import deliver
from soap.simulator.compiled.fetches import is_remote
from soap.simulator.compiled.holdings import tile_count
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.marks import gathers, is_made_again, is_needed, needed_together, row_count, runs_again
from soap.simulator.compiled.operator_tasks import add_carrier, add_count, add_sum, is_active
from soap.simulator.compiled.rows import is_sparse_lookup
from soap.simulator.compiled.scratch import CARRIERS, EDGES, FETCHES, FULL, GRADIENTS, HOLDINGS, REDUCTIONS, RESOURCES, TASKS
from soap.simulator.compiled.second_runs import (
    GATHERED,
    SUMMED,
    add_claim,
    begin_claims,
    claim_by_readers,
    gather_again,
    is_gathered_again,
    is_summed_again,
    last_reader,
    link_second_runs,
    need_tiles,
    place_rows,
    sum_again,
    tile_slots,
    weights_slot,
)
from soap.simulator.compiled.state import ARENA, BACKWARD_TILE, FORWARD_TILE, OTHER, SLOTS, WEIGHTS_TILE, State
from soap.simulator.compiled.syncs.exchange import add_edge
from soap.simulator.compiled.task_keys import BACKWARD, FORWARD, STATE_FULL, set_key, task_key
from soap.simulator.compiled.tile_times import PASSES, WEIGHTS
from soap.simulator.compiled.variants import CELLS, COSTS, ROW_COSTS
from soap.simulator.compiled.world import World
from soap.simulator.task_list import COUNT
from soap.simulator.task_list import WEIGHTS as WEIGHTS_STAGE


@compiled
def place_tiles(W: World, op: int) -> None:
    """Give an operator's tiles new slots, for its current configuration. None has a backward pass yet."""
    G, V, K, C = W.graph, W.variants, W.cluster, W.state
    row = V.rows[C.variant[op]]
    cells, costs, operators = row[CELLS], row[COSTS], len(G.backward)
    if row[ROW_COSTS] != costs and is_sparse_lookup(G, C, op):
        costs = row[ROW_COSTS]
    count = tile_count(V, C, op)
    slot = C.used[SLOTS]
    if slot + tile_slots(C, op) > len(C.key):
        raise MemoryError(STATE_FULL)
    C.tile_slot[op] = slot
    for backward in range(2):
        for tile in range(count):
            device = C.dev[C.dev_ptr[op] + tile]
            if backward:
                set_key(C, slot, task_key(BACKWARD, operators - 1 - op, 1, tile, 0, 0))
            else:
                set_key(C, slot, task_key(FORWARD, op, 1, tile, 0, 0))
            cost = costs + (K.device_type[device] * PASSES + backward) * cells + tile % cells
            C.duration[slot], C.launch[slot], C.latency[slot] = V.costs[cost], V.launches[cost], 0
            C.resource[slot], C.resource_n[slot] = device, 1
            C.waits[slot], C.alive[slot], C.kind[slot] = backward, 1 - backward, BACKWARD_TILE if backward else FORWARD_TILE
            C.waits[slot] += backward * C.marks.backward_waits[C.marked[op]]
            C.owner[slot], C.index[slot], C.moved[slot], C.follow[slot] = op, tile, 0, 0
            slot += 1
    place_rows(W, op, costs)
    if C.divided[op]:
        _place_weights(W, op, costs)
    C.used[SLOTS] = C.tile_slot[op] + tile_slots(C, op)


@compiled
def _place_weights(W, op, costs):  # type: ignore[no-untyped-def]
    """Give the weight gradients of a divided operator's tiles slots. Each waits for the tile's input gradients."""
    V, K, C = W.variants, W.cluster, W.state
    cells, first = V.rows[C.variant[op], CELLS], weights_slot(C, op)
    for tile in range(C.tiles[op]):
        slot, device = first + tile, C.dev[C.dev_ptr[op] + tile]
        set_key(C, slot, task_key(BACKWARD, len(W.graph.backward) - 1 - op, WEIGHTS_STAGE, tile, 0, 0))
        cost = costs + (K.device_type[device] * PASSES + WEIGHTS) * cells + tile % cells
        C.duration[slot], C.launch[slot], C.latency[slot] = V.costs[cost], V.launches[cost], 0
        C.resource[slot], C.resource_n[slot] = device, 1
        C.waits[slot], C.alive[slot], C.kind[slot] = 1, 0, WEIGHTS_TILE
        C.owner[slot], C.index[slot], C.moved[slot], C.follow[slot] = op, tile, 0, 0


@compiled
def lower_operator(W: World, op: int) -> bool:
    """Make an operator's block anew, from the current configurations. True if it has changed which of the operator's tiles have a backward
    pass. ``again``, in what this calls: whether its outputs are ``GATHERED`` or ``SUMMED`` again, else 0."""
    G, V, C, S = W.graph, W.variants, W.state, W.scratch
    count = tile_count(V, C, op)
    S.count[TASKS] = S.count[EDGES] = S.count[RESOURCES] = S.count[GRADIENTS] = 0
    deliver(W, op)
    again = GATHERED if is_gathered_again(W, op) else SUMMED if is_summed_again(W, op) else 0
    own = count * (2 if runs_again(C, op) else 1)
    for slot in range(G.reader_ptr[op + 1] - G.reader_ptr[op]):
        reader = G.reader[G.reader_ptr[op] + slot]
        S.slot_base[slot], S.need_base[slot] = own, -1
        own += tile_count(V, C, reader)
        if needed_together(C, op, reader) or (again == GATHERED and gathers(C, reader)):
            S.need_base[slot] = own
            own += tile_count(V, C, reader)
        if slot + 2 > len(S.slot_base):
            raise MemoryError(FULL)
    own_slot = C.used[SLOTS]
    _forward(W, op, own, own_slot)
    changed = _backward(W, op, own, own_slot, again)
    _install(C, S, op, own, own_slot, G.reader_ptr[op], G.reader_ptr[op + 1])
    return changed


@compiled
def _first_tile(S, red, cells):  # type: ignore[no-untyped-def]
    return S.r_rep[red] * cells + S.member[S.member_ptr[S.r_group[red]]]


@compiled
def _after_holding(S, cells, hold, own, target):  # type: ignore[no-untyped-def]
    """Add edges from the tasks that make a holding to ``target``."""
    red = S.h_red[hold]
    if red < 0:
        add_edge(S, S.h_tile[hold], target)
    else:
        _after_sum(S, cells, red, own, target)


@compiled
def _after_sum(S, cells, red, own, target):  # type: ignore[no-untyped-def]
    if S.r_task[red] >= 0:
        add_edge(S, own + S.r_task[red], target)
    else:
        for i in range(S.member_ptr[S.r_group[red]], S.member_ptr[S.r_group[red] + 1]):
            add_edge(S, S.r_rep[red] * cells + S.member[i], target)


@compiled
def _forward(W, op, own, own_slot):  # type: ignore[no-untyped-def]
    """Add sums, messages and exchanges of the forward pass, and the edges to readers' tiles."""
    G, V, C, S = W.graph, W.variants, W.state, W.scratch
    cells = V.rows[C.variant[op], CELLS]
    for red in range(S.count[REDUCTIONS]):
        if S.r_dev_ptr[red + 1] - S.r_dev_ptr[red] > 1:
            key = task_key(FORWARD, op, 2, _first_tile(S, red, cells), S.r_out[red], 0)
            S.r_task[red] = add_sum(W, op, red, key, False)
            for i in range(S.member_ptr[S.r_group[red]], S.member_ptr[S.r_group[red] + 1]):
                add_edge(S, S.r_rep[red] * cells + S.member[i], own_slot + S.r_task[red])
            if G.counts_labels[op]:
                counting = add_count(W, red, task_key(FORWARD, op, COUNT, _first_tile(S, red, cells), S.r_out[red], 0))
                for i in range(S.member_ptr[S.r_group[red]], S.member_ptr[S.r_group[red] + 1]):
                    add_edge(S, own + counting, C.tile_slot[op] + S.r_rep[red] * cells + S.member[i])
    for carrier in range(S.count[CARRIERS]):
        task = add_carrier(W, op, carrier, False, False)
        S.k_task[carrier] = task
        before = -1
        for i in range(S.k_part[carrier], S.k_part[carrier + 1]):
            hold = S.p_hold[S.part[i]]
            if hold != before:
                _after_holding(S, cells, hold, own, own_slot + task)
            before = hold
    for fetch in range(S.count[FETCHES]):
        consumer = S.f_first[fetch]
        while consumer >= 0:
            reader = G.reader[G.reader_ptr[op] + S.c_slot[consumer]]
            target = C.tile_slot[reader] + S.c_tile[consumer]
            before = -1
            for piece in range(S.f_piece[fetch], S.f_piece[fetch + 1]):
                if not is_remote(S, piece):
                    _after_holding(S, cells, S.p_hold[piece], own, target)
                elif S.p_carrier[piece] != before:
                    before = S.p_carrier[piece]
                    add_edge(S, own + S.k_task[before], target)
            consumer = S.c_next[consumer]


@compiled
def _add_gradient(S, hold, source):  # type: ignore[no-untyped-def]
    """Note a task that makes or brings a part of a holding's gradient."""
    n = S.count[GRADIENTS]
    if n + 1 > len(S.gradient_task):
        raise MemoryError(FULL)
    S.gradient_task[n], S.gradient_next[n] = source, S.gradient_head[hold]
    S.gradient_head[hold] = n
    S.count[GRADIENTS] = n + 1


@compiled
def _backward(W, op, own, own_slot, again):  # type: ignore[no-untyped-def]
    """Add the tasks that return gradients to the holdings, sums of these, and the edges to the operator's backward tiles. True if it has
    changed which tiles have a backward pass."""
    G, V, C, S = W.graph, W.variants, W.state, W.scratch
    cells = V.rows[C.variant[op], CELLS]
    count = tile_count(V, C, op)
    for hold in range(S.count[HOLDINGS]):
        S.gradient_head[hold] = -1
    begin_claims(S)
    if is_needed(C, op):
        claim_by_readers(W, op, again)
    _return_gradients(W, op, own, own_slot)
    if not G.backward[op]:
        return False
    if count > len(S.order):
        raise MemoryError(FULL)
    got = S.order[:count]
    fill(got, 0, count, 0)
    target = C.tile_slot[op] + count
    for red in range(S.count[REDUCTIONS]):
        _reduce_gradient(W, op, red, own, own_slot, target, got)
    for hold in range(S.count[HOLDINGS]):
        if S.h_red[hold] < 0:
            node = S.gradient_head[hold]
            while node >= 0:
                add_edge(S, S.gradient_task[node], target + S.h_tile[hold])
                got[S.h_tile[hold]] += 1
                node = S.gradient_next[node]
    starts = op == G.loss[0] if W.order.count[0] == 1 else G.known[op] == 1
    if starts:
        _start_from_loss(W, cells, own, target, got)
        if is_needed(C, op):  # when the loss is ready
            _start_from_loss(W, cells, own, target + count, got)
    changed = False
    for tile in range(count):
        alive = 1 if got[tile] > 0 else 0
        changed |= C.alive[target + tile] != alive
        for row in range(row_count(C, C.marked[op]) + 1):  # the backward pass, and then the mark's
            C.alive[target + row * count + tile] = alive
        if C.divided[op]:
            C.alive[weights_slot(C, op) + tile] = alive
    if is_needed(C, op):
        changed |= need_tiles(W, op, cells, own, starts, again)
    if is_made_again(C, op):
        link_second_runs(W, op)
    if again == GATHERED:
        gather_again(W, op, own, own_slot)
    elif again == SUMMED:
        sum_again(W, op, own, own_slot)
    return changed


@compiled
def _return_gradients(W, op, own, own_slot):  # type: ignore[no-untyped-def]
    G, V, C, S = W.graph, W.variants, W.state, W.scratch
    first_output, first_reader = G.output_ptr[op], G.reader_ptr[op]
    for fetch in range(S.count[FETCHES]):
        S.f_alive[fetch] = 0
        consumer = S.f_first[fetch] if G.output_gradient[first_output + S.f_out[fetch]] else -1
        while consumer >= 0:
            reader = G.reader[first_reader + S.c_slot[consumer]]
            if C.alive[C.tile_slot[reader] + tile_count(V, C, reader) + S.c_tile[consumer]]:
                S.f_alive[fetch] += 1
                for piece in range(S.f_piece[fetch], S.f_piece[fetch + 1]):
                    if not is_remote(S, piece):
                        _add_gradient(S, S.p_hold[piece], S.slot_base[S.c_slot[consumer]] + S.c_tile[consumer])
            consumer = S.c_next[consumer]
    for carrier in range(S.count[CARRIERS]):
        active = False
        for i in range(S.k_part[carrier], S.k_part[carrier + 1]):
            active |= S.f_alive[S.p_fetch[S.part[i]]] > 0
        if not active:
            continue
        task = add_carrier(W, op, carrier, True, False)
        last = last_reader(W, op, carrier) if is_needed(C, op) else -1
        before = -1
        for i in range(S.k_part[carrier], S.k_part[carrier + 1]):
            part = S.part[i]
            fetch = S.p_fetch[part]
            if is_active(S, carrier, part):
                _add_gradient(S, S.p_hold[part], own + task)
                if is_needed(C, op):
                    add_claim(S, S.p_hold[part], own + task, last)
            if fetch != before and S.f_alive[fetch] > 0:
                _after_consumers(W, first_reader, fetch, own_slot + task)
            before = fetch


@compiled
def _after_consumers(W, first_reader, fetch, target):  # type: ignore[no-untyped-def]
    """Add edges from the backward passes of all tiles that read a region to ``target``."""
    G, V, C, S = W.graph, W.variants, W.state, W.scratch
    consumer = S.f_first[fetch]
    while consumer >= 0:
        reader = G.reader[first_reader + S.c_slot[consumer]]
        if C.alive[C.tile_slot[reader] + tile_count(V, C, reader) + S.c_tile[consumer]]:
            add_edge(S, S.slot_base[S.c_slot[consumer]] + S.c_tile[consumer], target)
        consumer = S.c_next[consumer]


@compiled
def _reduce_gradient(W, op, red, own, own_slot, target, got):  # type: ignore[no-untyped-def]
    """Give the gradient of a sum to every tile of the group."""
    G, V, C, S = W.graph, W.variants, W.state, W.scratch
    cells = V.rows[C.variant[op], CELLS]
    first, last = S.member_ptr[S.r_group[red]], S.member_ptr[S.r_group[red] + 1]
    task = -1
    for hold in range(S.r_hold[red], S.r_hold[red + 1]):
        node = S.gradient_head[hold]
        while node >= 0:
            if S.r_dev_ptr[red + 1] - S.r_dev_ptr[red] > 1:
                if task < 0:
                    key = task_key(BACKWARD, len(G.backward) - 1 - op, 0, _first_tile(S, red, cells), S.r_out[red], 0)
                    task = add_sum(W, op, red, key, True)
                add_edge(S, S.gradient_task[node], own_slot + task)
            else:
                for i in range(first, last):
                    tile = S.r_rep[red] * cells + S.member[i]
                    add_edge(S, S.gradient_task[node], target + tile)
                    got[tile] += 1
            node = S.gradient_next[node]
    S.r_back[red] = task
    if task >= 0:
        for i in range(first, last):
            tile = S.r_rep[red] * cells + S.member[i]
            add_edge(S, own + task, target + tile)
            got[tile] += 1


@compiled
def _start_from_loss(W, cells, own, target, got):  # type: ignore[no-untyped-def]
    """Let the loss's tiles of replica 0 start the backward pass once the loss is ready; with micro-batches each one behind itself."""
    G, S = W.graph, W.scratch
    summed = S.count[REDUCTIONS] > 0 and W.order.count[0] == 1
    for red in range(S.count[REDUCTIONS] if summed else 0):
        if S.r_out[red] == G.loss[1] and S.r_rep[red] == 0:
            for i in range(S.member_ptr[S.r_group[red]], S.member_ptr[S.r_group[red] + 1]):
                _after_sum(S, cells, red, own, target + S.member[i])
                got[S.member[i]] += 1
    if not summed:
        for tile in range(cells):
            add_edge(S, tile, target + tile)
            got[tile] += 1


@compiled
def _install(C, S, op, own, own_slot, first_reader, last_reader):  # type: ignore[no-untyped-def]
    """Copy tasks, edges and resources from the scratch to the state."""
    tasks, edges, resources = S.count[TASKS], S.count[EDGES], S.count[RESOURCES]
    sources = own + tasks
    base = C.used[ARENA]
    if base + sources + 1 + edges + resources > len(C.arena) or own_slot + tasks > len(C.key):
        raise MemoryError(STATE_FULL)
    if sources + 1 > len(S.fill):
        raise MemoryError(FULL)
    at = base + sources + 1
    C.row[op], C.own_slot[op], C.own_count[op], C.block[op] = base, own_slot, tasks, base
    for slot in range(last_reader - first_reader):
        C.back_row[first_reader + slot] = base + S.slot_base[slot]
        C.need_row[first_reader + slot] = base + S.need_base[slot] if S.need_base[slot] >= 0 else -1
    fill(C.arena, base, at, 0)
    for i in range(edges):
        C.arena[base + 1 + S.e_src[i]] += 1
    C.arena[base] = at
    for source in range(sources):
        C.arena[base + 1 + source] += C.arena[base + source]
    for source in range(sources):
        S.fill[source] = C.arena[base + source]
    for i in range(edges):
        source = S.e_src[i]
        C.arena[S.fill[source]] = S.e_dst[i]
        S.fill[source] += 1
    pool = at + edges
    for i in range(resources):
        C.arena[pool + i] = S.res[i]
    C.used[ARENA] = pool + resources
    C.block_end[op] = C.used[ARENA]
    for task in range(tasks):
        slot = own_slot + task
        C.key[slot], C.subkey[slot] = S.t_key[task], S.t_subkey[task]
        C.duration[slot], C.resource_n[slot], C.moved[slot] = S.t_dur[task], S.t_res_n[task], S.t_bytes[task]
        C.latency[slot], C.overhead[slot] = S.t_latency[task], S.t_overhead[task]
        C.resource[slot] = S.t_res[task] if S.t_res[task] >= 0 else -1 - (pool - 1 - S.t_res[task])
        C.waits[slot], C.alive[slot], C.kind[slot], C.owner[slot], C.index[slot] = 0, 1, OTHER, op, base + own + task
        C.follow[slot] = 0
    C.used[SLOTS] = own_slot + tasks
    count_edges(C, op, 1)


@compiled
def count_edges(C: State, op: int, sign: int) -> None:
    """Count (1) or stop counting (-1) the edges of an operator's block in what their targets wait for."""
    base = C.block[op]
    first = C.arena[base]
    last = C.arena[first - 1]
    for i in range(first, last):
        C.waits[C.arena[i]] += sign
