"""The tasks that bring an operator's outputs to their readers and sum its partial results (compiled)."""

from __future__ import annotations

from soap.plan.samples import COUNT_BYTES
from soap.simulator.compiled.arrays import sort
from soap.simulator.compiled.carriers import ALL_GATHER, BROADCAST, MESSAGE
from soap.simulator.compiled.communication import (
    add_flow,
    allreduce,
    begin_flows,
    begin_links,
    exchange_overhead_ns,
    find_list,
    join_flow,
    latency_ns,
    message_overhead_ns,
    round_ns,
    sum_overhead_ns,
    total_flow,
    transfer_ns,
)
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import FULL, RESOURCES, STAMP, TASKS
from soap.simulator.compiled.task_keys import BACKWARD, FORWARD, task_key
from soap.simulator.compiled.tile_times import PASSES
from soap.simulator.compiled.variants import CELLS, COSTS
from soap.simulator.task_list import GATHER


@compiled
def add_task(S, key, duration, overhead, resource, resource_n, size):  # type: ignore[no-untyped-def]
    """Add a task to the scratch; returns its number. ``resource``: as ``State.resource``, but negative ones are -1 - place in
    ``Scratch.res``."""
    n = S.count[TASKS]
    if n + 2 > len(S.t_key):
        raise MemoryError(FULL)
    S.t_key[n], S.t_subkey[n] = key
    S.t_dur[n], S.t_latency[n], S.t_overhead[n] = duration, 0, overhead
    S.t_res[n], S.t_res_n[n], S.t_bytes[n] = resource, resource_n, size
    S.count[TASKS] = n + 1
    return n


@compiled
def add_sum(W, op, red, key, gradient):  # type: ignore[no-untyped-def]
    """Add an all-reduce; if the sum is left in cells, a reduce-scatter (for gradients an all-gather)."""
    G, V, K, S = W.graph, W.variants, W.cluster, W.scratch
    first, last = S.r_dev_ptr[red], S.r_dev_ptr[red + 1]
    out = G.output_ptr[op] + S.r_out[red]
    itemsize = G.output_itemsize[out] if gradient else G.output_partial_itemsize[out]
    size = V.box_volume[S.r_box[red]] * itemsize
    if S.r_cells[red] < 0:
        return _add_all_reduce(W, red, key, size)
    begin_links(S)
    begin_flows(S)
    resources, largest = S.count[RESOURCES], 0
    for b in range(last - first):
        volume = S.cell_volume[S.r_cells[red] + b]
        largest = max(largest, volume)
        for a in range(last - first):
            if a != b and volume > 0:
                source, target = S.r_dev[first + a], S.r_dev[first + b]
                add_flow(S, target if gradient else source, source if gradient else target, volume * itemsize)
    duration = round_ns(K, S, 0 if gradient else (last - first - 1) * largest * itemsize)
    first_tile = S.r_rep[red] * V.rows[W.state.variant[op], CELLS] + S.member[S.member_ptr[S.r_group[red]]]
    overhead, left = exchange_overhead_ns(K, S, duration), _left_ns(duration, _overlapped_ns(W, op, first_tile, gradient), last - first)
    return _add_collective(S, key, left, overhead, resources, total_flow(S))


@compiled
def _overlapped_ns(W, op, tile, backward):  # type: ignore[no-untyped-def]
    """How long a pass of a tile takes, if its collectives run in parts with it; else 0."""
    if not W.graph.overlaps[op]:
        return 0
    V, C = W.variants, W.state
    row = V.rows[C.variant[op]]
    device = W.cluster.device_type[C.dev[C.dev_ptr[op] + tile]]
    return V.costs[row[COSTS] + (device * PASSES + (1 if backward else 0)) * row[CELLS] + tile % row[CELLS]]


@compiled
def _left_ns(duration, overlapped, peers):  # type: ignore[no-untyped-def]
    """The part of a collective of so many devices that is left once what overlaps with it has run (``lowering``)."""
    return duration if overlapped == 0 else max(1, duration - (peers - 1) * overlapped // peers)


@compiled
def add_count(W, red, key):  # type: ignore[no-untyped-def]
    """Add the sum of the labels that the devices of a reduction count."""
    return _add_all_reduce(W, red, key, COUNT_BYTES)


@compiled
def _add_all_reduce(W, red, key, size):  # type: ignore[no-untyped-def]
    """Add an all-reduce over the devices of a reduction."""
    R, S = W.groups, W.scratch
    first, last = S.r_dev_ptr[red], S.r_dev_ptr[red + 1]
    group = find_list(R.sets, S.r_dev[first:last])
    duration, way = allreduce(R, group, size)
    overhead = sum_overhead_ns(W.cluster, last - first, duration)
    return add_task(S, key, duration, overhead, R.resource[way], R.resource_n[way], 2 * (R.members[group] - 1) * size)


@compiled
def _add_collective(S, key, duration, overhead, resources, moved):  # type: ignore[no-untyped-def]
    """Add a collective whose links are in ``res`` from place ``resources`` on."""
    return add_task(S, key, duration, overhead, -1 - resources, S.count[RESOURCES] - resources, moved)


@compiled
def is_active(S, carrier, piece):  # type: ignore[no-untyped-def]
    """Whether a part's gradient travels, if any of the carrier's does. In a broadcast's tree all do: devices without one send zeros."""
    return S.f_alive[S.p_fetch[piece]] > 0 or S.k_pattern[carrier] == BROADCAST


@compiled
def add_carrier(W, op, carrier, gradient, again):  # type: ignore[no-untyped-def]
    """Add the task of a message or exchange, or with ``gradient`` of the gradients that return, with ``again`` of its second time."""
    G, K, S = W.graph, W.cluster, W.scratch
    first_output, devices = G.output_ptr[op], len(K.device_type)
    piece = S.part[S.k_part[carrier]]
    fetch = S.p_fetch[piece]
    consumer = S.f_first[fetch]
    reader = G.reader[G.reader_ptr[op] + S.c_slot[consumer]]
    place = len(G.backward) - 1 - reader if gradient or again else reader
    phase, stage = (BACKWARD, GATHER) if again else (BACKWARD, 2) if gradient else (FORWARD, 0)
    key = task_key(phase, place, stage, S.c_tile[consumer], S.c_operand[consumer], piece - S.f_piece[fetch])
    if S.k_pattern[carrier] == MESSAGE:
        size = 0
        for i in range(S.k_part[carrier], S.k_part[carrier + 1]):
            part = S.part[i]
            if not gradient or is_active(S, carrier, part):
                size += S.p_volume[part] * G.output_itemsize[first_output + S.f_out[S.p_fetch[part]]]
        source, target = S.h_dev[S.p_hold[piece]], S.f_dev[fetch]
        if gradient:
            source, target = target, source
        pair = source * devices + target
        resource_n = K.route_ptr[pair + 1] - K.route_ptr[pair]
        duration = _after_readers_ns(W, op, fetch, transfer_ns(K, source, target, size), gradient)
        latency = latency_ns(K, source, target, duration)
        overhead = message_overhead_ns(K, source, target, duration - latency)
        task = add_task(S, key, duration, overhead, devices + K.route_ptr[pair], resource_n, size)
        S.t_latency[task] = latency
        return task
    begin_links(S)
    resources = S.count[RESOURCES]
    itemsize = G.output_itemsize[first_output + S.f_out[fetch]]
    if S.k_pattern[carrier] == BROADCAST:
        duration, moved, members = _tree(W, carrier, S.p_volume[piece] * itemsize, gradient)
        return _add_collective(S, key, duration, sum_overhead_ns(K, members, duration), resources, moved)
    begin_flows(S)
    S.count[STAMP] += 1
    stamp = S.count[STAMP]
    for i in range(S.k_part[carrier], S.k_part[carrier + 1]):
        part = S.part[i]
        if not gradient or is_active(S, carrier, part):
            source, target = S.h_dev[S.p_hold[part]], S.f_dev[S.p_fetch[part]]
            if gradient:
                source, target = target, source
            join_flow(S, stamp, devices, source, target, S.p_volume[part] * itemsize)
    moved = total_flow(S)
    duration = round_ns(K, S, 0)
    overhead = exchange_overhead_ns(K, S, duration)
    if S.k_pattern[carrier] == ALL_GATHER:
        duration = _after_readers_ns(W, op, fetch, duration, gradient)
    return _add_collective(S, key, duration, overhead, resources, moved)


@compiled
def _after_readers_ns(W, op, fetch, duration, gradient):  # type: ignore[no-untyped-def]
    """The part of a gathering's duration, or of its gradients' return, that is left once what overlaps with it has run."""
    G, S = W.graph, W.scratch
    overlapped, consumer = 0, S.f_first[fetch]
    while consumer >= 0:
        reader, tile = G.reader[G.reader_ptr[op] + S.c_slot[consumer]], S.c_tile[consumer]
        forward = _overlapped_ns(W, reader, tile, False)
        overlapped += max(0, _overlapped_ns(W, reader, tile, True) - forward) if gradient else forward
        consumer = S.c_next[consumer]
    return _left_ns(duration, overlapped, S.f_piece[fetch + 1] - S.f_piece[fetch])


@compiled
def _tree(W, carrier, size, gradient):  # type: ignore[no-untyped-def]
    """(duration, bytes moved, number of devices) of a broadcast along a binomial tree from the holder to the others in ascending order, or
    with ``gradient`` of its transpose, the sum of gradients."""
    K, S = W.cluster, W.scratch
    source = S.h_dev[S.p_hold[S.part[S.k_part[carrier]]]]
    count = 1
    S.order[0] = source
    for i in range(S.k_part[carrier], S.k_part[carrier + 1]):
        S.order[count] = S.f_dev[S.p_fetch[S.part[i]]]
        count += 1
    sort(S.order, 1, count)
    duration = moved = 0
    reached = 1
    while reached < count:
        begin_flows(S)
        for i in range(min(reached, count - reached)):
            a, b = S.order[i], S.order[i + reached]
            add_flow(S, b if gradient else a, a if gradient else b, size)
        moved += total_flow(S)
        duration += round_ns(K, S, size if gradient else 0, count)
        reached *= 2
    return duration, moved, count
