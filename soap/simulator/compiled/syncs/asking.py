"""Synchronization before the forward pass: the request for rows, and the pulls of rows (compiled). See ``plan.syncs.asking``."""

from __future__ import annotations

from soap.simulator.compiled.communication import begin_joining, forget_sizes, hold_ends, join_flow, round_ns, total_flow
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.rows import INDEX_BYTES, is_sparse
from soap.simulator.compiled.scratch import FLOWS
from soap.simulator.compiled.state import PULLS, SLOTS, State
from soap.simulator.compiled.syncs.alone import pull_region
from soap.simulator.compiled.syncs.codes import travels_by_rows
from soap.simulator.compiled.syncs.exchange import add_exchange, begin_exchange, enter_before, new_row
from soap.simulator.compiled.syncs.gathering import make_gathers
from soap.simulator.compiled.syncs.members import find_geometry, find_members, is_trained
from soap.simulator.compiled.syncs.templates import find_template, server_at
from soap.simulator.compiled.task_keys import FORWARD, task_key
from soap.simulator.compiled.world import World


@compiled
def make_pulls(W: World) -> None:
    """Make anew the pulls of rows of sparse parameters, the request for rows before them, and the gathers of values. Call ``count_pulls``
    to count what waits for them."""
    G, D, C, S = W.graph, W.shards, W.state, W.scratch
    C.pull_slot[0], C.used[PULLS] = C.used[SLOTS], 0
    for parameter in range(len(G.parameter_dtype)):
        if not is_asked_for(G, C, parameter):
            continue
        find_geometry(W, parameter)
        geometry = S.geometry[parameter]
        for shard in range(D.ptr[geometry], D.ptr[geometry + 1]):
            if D.lowest[shard] >= 0:
                find_members(W, parameter, shard)
                pull_region(W, 0, find_template(W, parameter, shard), parameter, shard)
    _ask(W)
    make_gathers(W)


@compiled
def is_asked_for(G, C, parameter):  # type: ignore[no-untyped-def]
    """Whether devices tell others which rows of a parameter they look up."""
    return travels_by_rows(C.sync[parameter]) and is_sparse(G, parameter) and is_trained(G, parameter)


@compiled
def _ask(W):  # type: ignore[no-untyped-def]
    """Add the request for rows (``plan.syncs.asking``), in the slot after the pulls, which wait for it."""
    G, K, D, C, S = W.graph, W.cluster, W.shards, W.state, W.scratch
    begin_exchange(S)
    duration = moved = 0
    for within in (True, False):  # members tell their leaders, then leaders tell the owners
        stamp = begin_joining(S)
        for parameter in range(len(G.parameter_dtype)):
            if not is_asked_for(G, C, parameter):
                continue
            geometry = S.geometry[parameter]
            for shard in range(D.ptr[geometry], D.ptr[geometry + 1]):
                if D.lowest[shard] >= 0:
                    find_members(W, parameter, shard)
                    _join_asked(W, parameter, shard, stamp, within)
        if S.count[FLOWS] > 0:
            counted_ns, counted = round_ns(K, S, 0), total_flow(S)
            hold_ends(S)
            forget_sizes(S)
            duration, moved = duration + counted_ns + round_ns(K, S, 0), moved + counted
    if duration == 0:
        return
    pulls = C.used[PULLS]
    row = new_row(C, pulls)
    for i in range(pulls):
        C.arena[row + 2 + i] = C.pull_slot[0] + i
    add_exchange(W, C.used[SLOTS], task_key(FORWARD, 0, 0, 0, 0, 0), duration, moved)
    C.overhead[enter_before(C, -1, row)] = 0


@compiled
def _join_asked(W, parameter, shard, stamp, within):  # type: ignore[no-untyped-def]
    """Add the flows of the request for one shard. ``within``: from members to their leaders, else from leaders to owners."""
    S, Y, devices = W.scratch, W.templates, len(W.cluster.device_type)
    template = find_template(W, parameter, shard)
    pointers, pairs = Y.told_ptr if within else Y.asked_ptr, Y.told if within else Y.asked
    for i in range(pointers[template], pointers[template + 1], 2):
        source, target = pairs[i], pairs[i + 1]
        if target < -W.shards.rows[shard]:
            continue  # there are no more partitions than rows
        if target < 0:
            target = server_at(W, parameter, shard, -1 - target)
        if source != target:
            join_flow(S, stamp, devices, source, target, INDEX_BYTES)


@compiled
def count_pulls(C: State, sign: int) -> None:
    """Count (1) or stop counting (-1) the edges from pulls, and from the request, in what their targets wait for."""
    for slot in range(C.pull_slot[0], C.pull_slot[0] + C.used[PULLS]):
        row = C.index[slot]
        for i in range(C.arena[row], C.arena[row + 1]):
            C.waits[C.arena[i]] += sign
