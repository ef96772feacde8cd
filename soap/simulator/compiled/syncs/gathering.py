"""Gathers of values for the passes that use them (compiled). The counterpart of ``plan.syncs.gathering``.

Gathers lie among the pulls before the forward pass (``State.pull_slot``), and are made anew together with these. An *item* is a gather:
bucket b's for the forward pass has number b, for the backward pass b + the number of buckets. Tiles that gathers wait for have rows of
their own (``State.gather_row``): of an operator first those of its tiles' forward passes, then those of their backward passes.

Of what is for all micro-batches (``_is_all_step``) there are no items for the backward pass, and none waits for anything.
"""

from __future__ import annotations

from soap.plan.syncs.seam import Phase
from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.marks import is_made_again, runs_again
from soap.simulator.compiled.scratch import EDGES, FULL, SORTED, STAMP, TASKS, USES, Scratch
from soap.simulator.compiled.syncs.codes import GATHERED
from soap.simulator.compiled.syncs.exchange import add_edge
from soap.simulator.compiled.syncs.members import find_geometry, find_members, first_user_with_gradient, is_used
from soap.simulator.compiled.syncs.templates import find_template, of_micro_batch, phase_row, put_into_bucket, write_row
from soap.simulator.compiled.world import World

_BEFORE_FORWARD, _BEFORE_BACKWARD = int(Phase.BEFORE_FORWARD), int(Phase.BEFORE_BACKWARD)


@compiled
def _is_all_step(W, bucket):  # type: ignore[no-untyped-def]
    """Whether what is gathered is for all micro-batches of a step: the counterpart of ``gathering.all_step``."""
    return W.order.count[0] > 1 and W.scratch.bucket_part[bucket] < 0


@compiled
def reads_gathered(W: World, op: int) -> bool:
    """Whether an operator reads a parameter whose values are gathered for their uses."""
    G, C = W.graph, W.state
    found = False
    for k in range(G.parameter_ptr[op], G.parameter_ptr[op + 1]):
        found |= C.sync[G.parameter[k]] & GATHERED != 0
    return found


@compiled
def make_gathers(W: World, buckets: int, uses: int) -> None:
    """Add all gathers. ``buckets``, ``uses``: from ``find_groups``."""
    if buckets > 0:
        find_next(W, buckets)
        _add_gathers(W, buckets, uses)
        for use in range(uses):
            _follow_use(W, buckets, use)


@compiled
def find_groups(W: World) -> tuple[int, int]:
    """Find the buckets of what is gathered, and their order. Returns the numbers of buckets and of uses, which are edges in the scratch
    from a tile's slot, of its backward pass, to the bucket."""
    G, C, S = W.graph, W.state, W.scratch
    some = False
    for parameter in range(len(G.parameter_dtype)):
        if C.sync[parameter] & GATHERED and is_used(G, parameter):
            find_geometry(W, parameter)
            some = True
    S.count[EDGES] = S.count[TASKS] = 0
    if some:
        _fill_buckets(W)
        _order(W, S.count[TASKS], S.count[EDGES])
    return S.count[TASKS], S.count[EDGES]


@compiled
def _fill_buckets(W):  # type: ignore[no-untyped-def]
    """Put all gathered shards into buckets, in the order in which the backward pass completes their gradients."""
    G, D, C, S = W.graph, W.shards, W.state, W.scratch
    S.count[STAMP] += 1
    opened = S.count[STAMP]
    for op in range(len(G.backward) - 1, -1, -1):
        for k in range(G.parameter_ptr[op], G.parameter_ptr[op + 1]):
            parameter = G.parameter[k]
            if not C.sync[parameter] & GATHERED:
                continue
            geometry, first_user = S.geometry[parameter], G.user_ptr[parameter]
            if G.trainable[parameter] and first_user_with_gradient(D, geometry) < 0:
                continue
            for shard in range(D.ptr[geometry], D.ptr[geometry + 1]):
                lowest = D.lowest[shard] if G.trainable[parameter] else _first_use(D, shard)
                if lowest < 0 or G.user[first_user + lowest] != op:
                    continue
                find_members(W, parameter, shard)
                template = find_template(W, parameter, shard)
                if phase_row(W.templates, template, _BEFORE_FORWARD) >= 0:
                    bucket = put_into_bucket(W, template, parameter, shard, opened)
                    for i in range(S.count[USES]):
                        add_edge(S, S.use_slot[i], of_micro_batch(W, bucket, S.use_slot[i]))


@compiled
def _first_use(D, shard):  # type: ignore[no-untyped-def]
    """Which of its parameter's users is the first that reads a shard."""
    first = D.use_user[D.use_ptr[shard]]
    for i in range(D.use_ptr[shard], D.use_ptr[shard + 1]):
        first = min(first, D.use_user[i])
    return first


@compiled
def ordered(S: Scratch, buckets: int) -> int:
    """The number of items in ``g_order``: frozen values that no backward pass reads are gathered once."""
    items = buckets
    for bucket in range(buckets):
        items += S.g_last[bucket] >= 0
    return items


@compiled
def _order(W, buckets, uses):  # type: ignore[no-untyped-def]
    """Fill ``g_first`` and ``g_last``: by bucket, the first operator that uses it, and where the backward pass may first need it, in chunk
    ``g_chunk``, -1 if it never does; ``g_latest`` and ``g_final``: the operators by which all uses are over, forward and backward;
    ``g_order``: all items in the order in which devices gather them; ``g_turn``, ``g_used``: by item, the turns in which it is needed, and
    in which its uses are; ``g_next``: by item, the next one of its group, or -1."""
    G, A, C, S = W.graph, W.order, W.state, W.scratch
    if 2 * buckets > len(S.g_order):
        raise MemoryError(FULL)
    _find_needed(W)
    for bucket in range(buckets):
        S.g_first[bucket], S.g_last[bucket], S.g_chunk[bucket] = len(G.backward), -1, 0
        S.g_final[bucket], S.g_latest[bucket] = len(G.backward), 0
    for i in range(uses):
        op, bucket = C.owner[S.e_src[i]], S.e_dst[i]
        S.g_first[bucket], S.g_latest[bucket] = min(S.g_first[bucket], op), max(S.g_latest[bucket], op)
        if G.backward[op]:
            S.g_final[bucket] = min(S.g_final[bucket], op)
        needed = G.backward[op] and not _is_all_step(W, bucket)
        if needed and _is_first(S.g_needed_in[op], S.g_needed[op], S.g_chunk[bucket], S.g_last[bucket]):
            S.g_chunk[bucket], S.g_last[bucket] = S.g_needed_in[op], S.g_needed[op]
    _sort(S, buckets, 0)
    _sort(S, buckets, 1)
    items = 0
    for turn in range(len(A.turns)):
        back, part, chunk = A.turns[turn] % 2, A.turns[turn] // 2 % A.count[0], A.turns[turn] // 2 // A.count[0]
        for i in range(back * buckets, S.count[SORTED + back]):
            if part > 0 and S.bucket_part[S.g_list[i]] != 0:  # all micro-batches' are in one order
                continue
            item = S.g_list[i] + part + back * buckets
            if chunk == 0:
                S.g_used[item] = turn
            if chunk == (S.g_chunk[S.g_list[i]] if back else 0):
                S.g_order[items], S.g_turn[item] = item, turn
                items += 1
    fill(S.g_slot, 0, buckets, -1)
    for i in range(items - 1, -1, -1):
        head = S.g_order[i] % buckets - max(0, S.bucket_part[S.g_order[i] % buckets])
        S.g_next[S.g_order[i]], S.g_slot[head] = S.g_slot[head], S.g_order[i]


@compiled
def _sort(S, buckets, back):  # type: ignore[no-untyped-def]
    """Put the buckets, of each micro-batch the first one's, into ``g_list`` in the order in which they are gathered for the forward, or
    ``back`` for the backward pass: from ``back * buckets`` to ``count[SORTED + back]``."""
    first = end = back * buckets
    for bucket in range(buckets):  # an insertion sort: buckets are nearly in the order of the backward pass
        own = bucket if back else buckets - 1 - bucket
        if S.bucket_part[own] > 0 or (back and S.g_last[own] < 0):
            continue
        place, end = end, end + 1
        while place > first and _is_before(S, own, S.g_list[place - 1], back):
            S.g_list[place] = S.g_list[place - 1]
            place -= 1
        S.g_list[place] = own
    S.count[SORTED + back] = end


@compiled
def _find_needed(W):  # type: ignore[no-untyped-def]
    """Fill ``g_needed``, by operator, and the chunks ``g_needed_in``: ``recomputation.needed_from``."""
    G, A, C, S = W.graph, W.order, W.state, W.scratch
    if len(G.backward) > len(S.g_needed):
        raise MemoryError(FULL)
    for op in range(len(G.backward) - 1, -1, -1):
        S.g_needed_in[op], S.g_needed[op] = A.chunk[op], op
        for i in range(G.reader_ptr[op], G.reader_ptr[op + 1] if runs_again(C, op) else G.reader_ptr[op]):
            reader, both = G.reader[i], is_made_again(C, op) and runs_again(C, G.reader[i])
            chunk = S.g_needed_in[reader] if both else A.chunk[op]
            needed = S.g_needed[reader] if both else reader
            if _is_first(chunk, needed, S.g_needed_in[op], S.g_needed[op]):
                S.g_needed_in[op], S.g_needed[op] = chunk, needed


@compiled
def _is_first(chunk, op, other_chunk, other):  # type: ignore[no-untyped-def]
    """Whether the backward pass comes to an operator before another one, each of the chunk before it (``recomputation.Needed``)."""
    return chunk > other_chunk or (chunk == other_chunk and op > other)


@compiled
def _is_before(S, one, other, back):  # type: ignore[no-untyped-def]
    """Whether one bucket is gathered before another. ``back``: for the backward pass."""
    if back and S.g_last[one] != S.g_last[other]:
        return S.g_last[one] > S.g_last[other]
    if not back and S.g_first[one] != S.g_first[other]:
        return S.g_first[one] < S.g_first[other]
    if S.t_res[one] != S.t_res[other]:
        return S.t_res[one] < S.t_res[other]
    return S.bucket_region[one] < S.bucket_region[other]


@compiled
def find_next(W: World, buckets: int) -> None:
    """Fill ``g_list``: [device, place], the device's items in order, ``settling[device]`` of them, and ``g_place``: [item, device], its
    reverse, -1 where there is none; ``g_from``: [device, place], the first place for the uses of whose item that at ``place`` waits, and
    for those of all up to ``prefetch`` + 1 places before it."""
    R, C, S = W.groups, W.state, W.scratch
    devices, items, ahead = len(C.busy), 2 * buckets, C.prefetch[0] + 1
    if items * devices > len(S.g_list):
        raise MemoryError(FULL)
    fill(S.g_place, 0, items * devices, -1)
    fill(S.settling, 0, devices, 0)
    for i in range(ordered(S, buckets)):
        item = S.g_order[i]
        group = S.t_res_n[item % buckets]
        for k in range(R.sets.ptr[group], R.sets.ptr[group] if _is_all_step(W, item % buckets) else R.sets.ptr[group + 1]):
            device = R.sets.item[k]
            place = S.settling[device]
            S.g_list[device * items + place], S.g_place[item * devices + device] = item, place
            if place >= ahead:
                first = place - ahead
                while first > 0 and not _is_over(S, buckets, S.g_list[device * items + first], item):
                    first -= 1
                S.g_from[device * items + place] = first
            S.settling[device] = place + 1


@compiled
def _is_over(S, buckets, earlier, item):  # type: ignore[no-untyped-def]
    """Whether all uses of an earlier item's values come before an item's are needed, or those of neither are computed again."""
    own, other = item - buckets, earlier - buckets
    if S.g_used[earlier] != S.g_turn[item]:
        return S.g_used[earlier] < S.g_turn[item]
    if own < 0:
        return True
    if S.g_turn[earlier] == S.g_turn[item] and S.g_last[own] <= S.g_latest[own] and S.g_last[other] <= S.g_latest[other]:
        return True
    return S.g_final[other] > S.g_last[own]


@compiled
def _add_gathers(W, buckets, uses):  # type: ignore[no-untyped-def]
    """Add the tasks, in the slots ``g_slot`` by item, for which the tiles that use their values wait."""
    C, S = W.state, W.scratch
    for i in range(ordered(S, buckets)):
        item = S.g_order[i]
        bucket, phase = item % buckets, _BEFORE_FORWARD if item < buckets else _BEFORE_BACKWARD
        S.g_slot[item] = write_row(W, bucket, phase_row(W.templates, S.bucket_template[bucket], phase))
        C.owner[S.g_slot[item]] = S.g_first[bucket]
    for i in range(uses):
        slot, bucket = S.e_src[i], S.e_dst[i]
        op = C.owner[slot]
        add_edge(S, S.g_slot[bucket], slot - C.tiles[op])  # a tile's forward pass is ``tiles`` slots before its backward pass
        if C.alive[slot] and S.g_last[bucket] >= 0:
            add_edge(S, S.g_slot[buckets + bucket], slot)
            if runs_again(C, op):  # its second run
                add_edge(S, S.g_slot[buckets + bucket], slot + (C.marks.again_block[C.marked[op]] - 1) * C.tiles[op])


@compiled
def _follow_use(W, buckets, use):  # type: ignore[no-untyped-def]
    """Let gathers wait for a use: for its forward pass its own bucket's next gather and others, for its backward pass others. ``use``: an
    edge's number."""
    C, S = W.state, W.scratch
    slot, bucket = S.e_src[use], S.e_dst[use]
    op, items = C.owner[slot], 2 * buckets
    device, forward = C.dev[C.dev_ptr[op] + C.index[slot]], slot - C.tiles[op]
    if S.g_last[bucket] >= 0:
        add_edge(S, forward, S.g_slot[buckets + bucket])
    following = S.g_next[bucket]
    if following >= 0 and following != buckets + bucket:
        add_edge(S, forward, S.g_slot[following])
    following = S.g_next[buckets + bucket] if S.g_last[bucket] >= 0 else -1
    if following >= 0 and C.alive[slot] and S.g_used[buckets + bucket] < S.g_turn[following]:
        add_edge(S, slot, S.g_slot[following])
    for own in range(bucket, items, buckets):
        at = S.g_place[own * len(C.busy) + device]
        place = at + C.prefetch[0] + 1
        while at >= 0 and place < S.settling[device] and S.g_from[device * items + place] <= at:
            item = S.g_list[device * items + place]
            earlier, over = S.g_used[own] <= S.g_turn[item], S.g_used[own] < S.g_turn[item]
            if own < buckets and item != buckets + bucket and earlier and (over or op < S.g_first[item]):
                add_edge(S, forward, S.g_slot[item])
            elif own >= buckets and C.alive[slot] and earlier and (over or op > S.g_last[item - buckets]):
                add_edge(S, slot, S.g_slot[item])
            place += 1
