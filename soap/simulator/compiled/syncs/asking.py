"""Synchronization before the forward pass: the request for rows, and the pulls of rows (compiled). See ``plan.syncs.asking``."""

from __future__ import annotations

from soap.plan.syncs.seam import Phase
from soap.simulator.compiled.communication import begin_joining, forget_sizes, hold_ends, join_flow, round_ns, total_flow
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.rows import INDEX_BYTES, is_sparse
from soap.simulator.compiled.scratch import FLOWS, USES
from soap.simulator.compiled.state import PULLS, SLOTS
from soap.simulator.compiled.syncs.codes import BY_ROWS
from soap.simulator.compiled.syncs.exchange import add_edge, add_exchange, begin_exchange, install
from soap.simulator.compiled.syncs.gathering import find_groups, make_gathers
from soap.simulator.compiled.syncs.members import find_geometry, find_members, is_trained
from soap.simulator.compiled.syncs.server_traffic import prepare
from soap.simulator.compiled.syncs.templates import NO_TASK, find_template, phase_row, put_alone, server_at, write_row
from soap.simulator.compiled.task_keys import FORWARD, task_key
from soap.simulator.compiled.world import World

_BEFORE_FORWARD = int(Phase.BEFORE_FORWARD)


@compiled
def make_pulls(W: World) -> None:
    """Make anew the pulls of rows of sparse parameters, the request for rows before them, and the gathers of values. Call ``count_rows``
    to count what waits for them."""
    G, D, C, S = W.graph, W.shards, W.state, W.scratch
    first = C.pull_slot[0] = C.used[SLOTS]
    buckets, uses = find_groups(W)
    for parameter in range(len(G.parameter_dtype)):
        if not is_asked_for(G, C, parameter):
            continue
        find_geometry(W, parameter)
        geometry = S.geometry[parameter]
        for shard in range(D.ptr[geometry], D.ptr[geometry + 1]):
            if D.lowest[shard] >= 0:
                find_members(W, parameter, shard)
                _pull(W, buckets, find_template(W, parameter, shard), parameter, shard)
    _ask(W, first)
    make_gathers(W, buckets, uses)
    install(C, S, C.gather_row, uses, first, 0)
    C.used[PULLS] = C.used[SLOTS] - first


@compiled
def is_asked_for(G, C, parameter):  # type: ignore[no-untyped-def]
    """Whether devices tell others which rows of a parameter they look up."""
    return C.sync[parameter] & BY_ROWS != 0 and is_sparse(G, parameter) and is_trained(G, parameter)


@compiled
def _pull(W, bucket, template, parameter, shard):  # type: ignore[no-untyped-def]
    """Add the task that pulls the rows of a region before the forward pass, if anything travels. ``bucket``: free for use here."""
    C, S, row = W.state, W.scratch, phase_row(W.templates, template, _BEFORE_FORWARD)
    if row < 0:
        return
    prepare(W, template, parameter, shard)
    put_alone(W, bucket, template, parameter, shard)
    slot = write_row(W, bucket, row)
    for i in range(S.count[USES] if slot != NO_TASK else 0):
        op = C.owner[S.use_slot[i]]
        C.owner[slot] = C.owner[S.use_slot[0]]
        add_edge(S, slot, S.use_slot[i] - C.tiles[op])  # a tile's forward pass is ``tiles`` slots before its backward pass


@compiled
def _ask(W, first):  # type: ignore[no-untyped-def]
    """Add the request for rows (``plan.syncs.asking``). The pulls, from slot ``first`` on, wait for it."""
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
    slot = add_exchange(W, task_key(FORWARD, 0, 0, 0, 0, 0), duration, moved)
    C.overhead[slot] = 0
    for pull in range(first, slot):
        add_edge(S, slot, pull)


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
