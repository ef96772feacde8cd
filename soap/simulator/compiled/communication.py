"""Durations of messages and collectives, and the links that they hold (compiled). The counterpart of ``plan.collectives``, with the same
order of operations on floats, so that results are equal to the bit."""

from __future__ import annotations

from math import ceil, floor

import numpy as np

from soap.simulator.compiled.graph_arrays import ClusterTables
from soap.simulator.compiled.hashing import hash_join, hash_place
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.machine_code import entry
from soap.simulator.compiled.scratch import BUSIEST, FLOWS, FULL, LINKS, RESOURCES, STAMP, Scratch
from soap.simulator.compiled.state import Groups, Lists

REDUCE_TRAFFIC = 3
MISSING = "a list is not known yet"
"""Message of the LookupError that compiled code raises after it has put a list into ``Lists.missing``."""


@compiled
def nanoseconds(seconds: float) -> int:
    """Whole nanoseconds, rounded up, at least 1."""
    return max(1, ceil(seconds * 1e9))


@compiled
def transfer_ns(K: ClusterTables, source: int, target: int, size: int) -> int:
    """Duration of a message: latency of the route, then the bytes at the rate of the slowest link."""
    return nanoseconds(K.message_latency_seconds[source, target] + K.seconds_per_byte[source, target] * size)


@compiled
def latency_ns(K: ClusterTables, source: int, target: int, duration: int) -> int:
    """The end of a message's duration, in which it holds no link."""
    return min(duration - 1, floor(K.message_latency_seconds[source, target] * 1e9))


@compiled
def message_overhead_ns(K: ClusterTables, source: int, target: int, held: int) -> int:
    """CPU overhead of a message that holds its links for ``held`` ns: for how long it keeps each of its ports' devices busy."""
    return K.message_ns[source, target] + K.message_permille[source, target] * held // 1000


@compiled
def sum_overhead_ns(K: ClusterTables, devices: int, duration: int) -> int:
    """CPU overhead of a sum over this many devices, or of a broadcast."""
    return K.sum_ns[devices - 1] + K.sum_permille[devices - 1] * duration // 1000


@compiled
def exchange_overhead_ns(K: ClusterTables, S: Scratch, duration: int) -> int:
    """CPU overhead of an exchange, whose rounds, or collective of equal parts, have been priced since ``begin_links``."""
    if S.count[BUSIEST] < 0:
        return sum_overhead_ns(K, -S.count[BUSIEST], duration)
    messages = min(S.count[BUSIEST], len(K.exchange_ns) - 1)
    return K.exchange_ns[messages] + K.exchange_permille[messages] * duration // 1000


@compiled
def find_list(L: Lists, entry) -> int:  # type: ignore[no-untyped-def]
    """Number of a list of whole numbers, such as devices. LookupError if it is not known; the list is then in ``missing``."""
    found = seek_list(L, entry)
    if found >= 0:
        return found
    L.missing[0] = len(entry)
    for i in range(len(entry)):
        L.missing[1 + i] = entry[i]
    raise LookupError(MISSING)


@compiled
def seek_list(L: Lists, entry) -> int:  # type: ignore[no-untyped-def]
    """Number of a list of whole numbers, or -1 if it is not known."""
    place = _hash_place(entry, len(L.table) - 1)
    while L.table[place] >= 0:
        found = L.table[place]
        if L.ptr[found + 1] - L.ptr[found] == len(entry):
            first = L.ptr[found]
            same = True
            for i in range(len(entry)):
                same &= L.item[first + i] == entry[i]
            if same:
                return found
        place = (place + 1) & (len(L.table) - 1)
    return -1


@compiled
def _hash_place(entry, mask):  # type: ignore[no-untyped-def]
    key = np.int64(len(entry))
    for item in entry:
        key = hash_join(key, item)
    return hash_place(key, mask)


@entry
def fill_table(L: Lists, first: int, last: int) -> None:
    """Enter the lists from number ``first`` up to ``last`` into the hash table, which has all earlier ones."""
    mask = len(L.table) - 1
    for number in range(first, last):
        place = _hash_place(L.item[L.ptr[number] : L.ptr[number + 1]], mask)
        while L.table[place] >= 0:
            place = (place + 1) & mask
        L.table[place] = number


@compiled
def allreduce(R: Groups, group: int, size: int) -> tuple[int, int]:
    """(duration in ns, number of the way) of the fastest way to sum ``size`` bytes; the first one if several are equal."""
    best_ns, best = -1, -1
    for way in range(R.way_ptr[group], R.way_ptr[group + 1]):
        duration = nanoseconds(R.latency_seconds[way] + R.seconds_per_byte[way] * size)
        if best < 0 or duration < best_ns:
            best_ns, best = duration, way
    return best_ns, best


@compiled
def parted_ns(R: Groups, S: Scratch, group: int, size: int) -> int:
    """Duration in ns of a collective of equal parts, ``size`` bytes together, over a set behind the mark (``Groups.sets``). Adds
    its links to ``res``."""
    duration, way = allreduce(R, group, size)
    for i in range(R.resource_n[way]):
        hold(S, R.static[R.resource[way] + i])
    S.count[BUSIEST] = 1 - (R.sets.ptr[group + 1] - R.sets.ptr[group])
    return duration


@compiled
def begin_flows(S: Scratch) -> None:
    """Forget the flows of the last round."""
    S.count[FLOWS] = 0


@compiled
def begin_links(S: Scratch) -> None:
    """Begin a collective: resources added to ``res`` from now on are its own."""
    S.count[STAMP] += 1
    S.count[LINKS], S.count[BUSIEST] = S.count[STAMP], 0


@compiled
def add_flow(S: Scratch, source: int, target: int, size: int) -> None:
    """Add a flow of ``size`` bytes to this round."""
    n = S.count[FLOWS]
    if 3 * n + 3 > len(S.flow):
        raise MemoryError(FULL)
    S.flow[3 * n], S.flow[3 * n + 1], S.flow[3 * n + 2] = source, target, size
    S.count[FLOWS] = n + 1


@compiled
def begin_joining(S: Scratch) -> int:
    """Forget the flows of the last round; returns a stamp for ``join_flow``."""
    begin_flows(S)
    S.count[STAMP] += 1
    return S.count[STAMP]


@compiled
def join_flow(S: Scratch, stamp: int, devices: int, source: int, target: int, size: int) -> None:
    """``add_flow``, but bytes for the same two devices are added up in one flow. ``stamp``: from ``begin_joining``."""
    mask = len(S.hash_key) - 1
    key = source * devices + target
    place = hash_place(key, mask)
    while S.hash_stamp[place] == stamp and S.hash_key[place] != key:
        place = (place + 1) & mask
    if S.hash_stamp[place] == stamp:
        S.flow[3 * S.hash_value[place] + 2] += size
        return
    S.hash_stamp[place], S.hash_key[place], S.hash_value[place] = stamp, key, S.count[FLOWS]
    add_flow(S, source, target, size)


@compiled
def round_ns(K: ClusterTables, S: Scratch, reduced: int, tree: int = 0) -> int:
    """Duration in ns of the round's flows at once, after which each target adds up ``reduced`` bytes. Adds the flows' links to ``res``, and
    updates ``BUSIEST``. ``tree``: if this is a round of a broadcast, its number of devices; else 0."""
    if S.count[FLOWS] == 0:
        return nanoseconds(0.0)
    devices = len(K.device_type)
    S.count[STAMP] += 1
    stamp = S.count[STAMP]
    messages, latency, moving, memory = 0, 0.0, 0.0, np.inf
    for sending in range(2):
        S.count[STAMP] += 1
        for i in range(S.count[FLOWS]):
            device = S.flow[3 * i + 1 - sending]
            if S.mark[device] != S.count[STAMP]:
                S.mark[device] = S.count[STAMP]
                S.mark_value[device] = 0
            S.mark_value[device] += 1
            messages = max(messages, S.mark_value[device])
    S.count[BUSIEST] = max(S.count[BUSIEST], messages)
    for i in range(S.count[FLOWS]):
        source, target, size = S.flow[3 * i], S.flow[3 * i + 1], S.flow[3 * i + 2]
        latency = max(latency, K.latency_seconds[source, target])
        memory = min(memory, K.memory_bandwidth[target])
        pair = source * devices + target
        for at in range(K.route_ptr[pair], K.route_ptr[pair + 1]):
            link = K.route[at] - devices
            if S.load_stamp[link] != stamp:
                S.load_stamp[link] = stamp
                S.load[link] = 0
            S.load[link] += size
            hold(S, K.route[at])
    for i in range(S.count[FLOWS]):
        pair = S.flow[3 * i] * devices + S.flow[3 * i + 1]
        for at in range(K.route_ptr[pair], K.route_ptr[pair + 1]):
            link = K.route[at] - devices
            moving = max(moving, S.load[link] / K.link_bandwidth[link])
    latency_factor = K.tree_latency_factor[tree - 1] if tree > 0 else K.latency_factor[min(messages, len(K.latency_factor) - 1)]
    return nanoseconds(messages * latency * latency_factor + moving + reduced * REDUCE_TRAFFIC / memory + K.call_seconds[0])


@compiled
def hold(S, resource):  # type: ignore[no-untyped-def]
    """Add a resource to ``res``, once per collective."""
    n = S.count[RESOURCES]
    if n + 2 > len(S.res):
        raise MemoryError(FULL)
    if S.held[resource] != S.count[LINKS]:
        S.held[resource] = S.count[LINKS]
        S.res[n] = resource
        S.count[RESOURCES] = n + 1


@compiled
def hold_ends(S: Scratch) -> None:
    """Hold the devices that send or receive in this round as well."""
    for i in range(S.count[FLOWS]):
        hold(S, S.flow[3 * i])
        hold(S, S.flow[3 * i + 1])


@compiled
def forget_sizes(S: Scratch) -> None:
    """Set the bytes of this round's flows to 0."""
    for i in range(S.count[FLOWS]):
        S.flow[3 * i + 2] = 0


@compiled
def total_flow(S: Scratch) -> int:
    """Bytes of all flows of the round."""
    total = 0
    for i in range(S.count[FLOWS]):
        total += S.flow[3 * i + 2]
    return total

