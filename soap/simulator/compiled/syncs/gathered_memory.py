"""The upper bound of the memory of values that are gathered for their uses (compiled). The counterpart of ``gathering.most_gathered``."""

from __future__ import annotations

from soap.plan.syncs.gathering import UNDER_WAY
from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.memory_tables import HELD, SENT, MemoryTables
from soap.simulator.compiled.scratch import FULL
from soap.simulator.compiled.syncs.gathering import find_groups, find_next, stays
from soap.simulator.compiled.syncs.templates import bucket_bytes, largest_part
from soap.simulator.compiled.world import World


@compiled
def add_gathered(W: World, M: MemoryTables) -> None:
    """Add what devices hold at once of gathered values and of their gradients."""
    C, S = W.state, W.scratch
    buckets, uses = find_groups(W)
    if buckets == 0:
        return
    find_next(W, buckets)
    _find_kept(W, buckets, uses)
    for device in range(len(C.busy)):
        if S.settling[device] > 0:
            _add_device(W, M, buckets, device)


@compiled
def _find_kept(W, buckets, uses):  # type: ignore[no-untyped-def]
    """Fill ``g_kept``: [bucket, device], whether some uses there are not waited for by the gather behind it in its row."""
    G, C, S = W.graph, W.state, W.scratch
    devices = len(C.busy)
    if buckets * devices > len(S.g_kept):
        raise MemoryError(FULL)
    fill(S.g_kept, 0, buckets * devices, 0)
    for use in range(uses):
        slot, bucket = S.e_src[use], S.e_dst[use]
        op = C.owner[slot]
        place = bucket * devices + C.dev[C.dev_ptr[op] + C.index[slot]]
        forward, backward = S.g_next[place], S.g_next[buckets * devices + place]
        if 0 <= forward < buckets and op >= S.g_first[forward]:
            S.g_kept[place] = 1
        if backward >= 0 and G.backward[op] and op <= S.g_last[backward - buckets]:
            S.g_kept[place] = 1


@compiled
def _add_device(W, M, buckets, device):  # type: ignore[no-untyped-def]
    R, C, S, Y = W.groups, W.state, W.scratch, W.templates
    devices, items, count, ahead = len(C.busy), 2 * buckets, S.settling[device], C.prefetch[0] + 1
    first = device * items
    values = gradients = 0
    for row in range(min(count, ahead)):
        most = most_back = 0
        for k in range(row, count, ahead):
            item = S.g_list[first + k]
            size = bucket_bytes(W, item % buckets)
            most = max(most, size)
            if item >= buckets and W.graph.trainable[S.t_res[item % buckets]]:
                most_back = max(most_back, size)
        values, gradients = values + most, gradients + most_back
    total = largest = leaving = moved = most_moved = padding = 0
    same, first_group = True, -1
    for k in range(count):
        bucket = S.g_list[first + k]
        if bucket >= buckets:
            continue
        size, group, even = bucket_bytes(W, bucket), S.t_res_n[bucket], W.templates.even[S.bucket_template[bucket]] == 1
        kept = size if S.g_kept[bucket * devices + device] else 0
        values, total, largest = values + kept, total + size, max(largest, size)
        if not W.graph.trainable[S.t_res[bucket]]:
            continue
        first_group = group if first_group < 0 else first_group
        same &= group == first_group
        gradients, leaving = gradients + kept, leaving + size
        readers, own = R.sets.ptr[group + 1] - R.sets.ptr[group], 0
        for i in range(readers):
            if R.sets.item[R.sets.ptr[group] + i] == device:
                own = S.owned[S.owned_ptr[bucket] + Y.inside[Y.inside_ptr[S.bucket_template[bucket]] + i]]
        moving = size + Y.added[S.bucket_template[bucket]] * own
        moved, most_moved = moved + moving, max(most_moved, moving)
        padding += largest_part(W, bucket) - own if even else 0
    if stays(W):
        values, same = total, False
    M.part[HELD, device] += min(values, total) + largest + (min(gradients, leaving) if same else leaving)
    M.part[SENT, device] += min((UNDER_WAY + 1) * most_moved, moved) + padding
