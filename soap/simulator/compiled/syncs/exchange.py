"""Building blocks for tasks of synchronizations (compiled): what they hold, and what waits for them.

Edges gather in the scratch, from any task to any other; ``install`` then gives each task the row of what waits for it.
"""

from __future__ import annotations

from soap.simulator.compiled.arrays import fill
from soap.simulator.compiled.communication import begin_links, exchange_overhead_ns, round_ns, total_flow
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import EDGES, FLOWS, FULL, RESOURCES, USES, Scratch
from soap.simulator.compiled.state import ARENA, OTHER, SLOTS, State
from soap.simulator.compiled.task_keys import STATE_FULL, set_key


@compiled
def new_task(C, key):  # type: ignore[no-untyped-def]
    """Enter a task that takes no time and holds nothing in the first free slot; returns the slot. Until ``install``, ``index`` is its last
    chunk's slot: its own, unless it is cut."""
    slot = C.used[SLOTS]
    if slot + 1 > len(C.key):
        raise MemoryError(STATE_FULL)
    C.used[SLOTS] = slot + 1
    set_key(C, slot, key)
    C.duration[slot], C.latency[slot], C.overhead[slot], C.moved[slot] = 0, 0, 0, 0
    C.resource[slot], C.resource_n[slot] = 0, 0
    C.alive[slot], C.kind[slot], C.owner[slot], C.index[slot], C.waits[slot] = 1, OTHER, -1, slot, 0
    return slot


@compiled
def begin_exchange(S):  # type: ignore[no-untyped-def]
    """Begin an exchange, which holds nothing yet. Call it before the exchange's rounds."""
    begin_links(S)
    S.count[RESOURCES] = 0


@compiled
def add_exchange(W, key, duration, moved):  # type: ignore[no-untyped-def]
    """Enter a collective whose links are in ``res``; returns its slot."""
    K, C, S = W.cluster, W.state, W.scratch
    slot, at, count = new_task(C, key), C.used[ARENA], S.count[RESOURCES]
    if at + count > len(C.arena):
        raise MemoryError(STATE_FULL)
    for i in range(count):
        C.arena[at + i] = S.res[i]
    C.used[ARENA] = at + count
    C.duration[slot], C.moved[slot] = duration, moved
    C.resource[slot], C.resource_n[slot], C.overhead[slot] = -1 - at, count, exchange_overhead_ns(K, S, duration)
    return slot


@compiled
def wait_for_tiles(C, S, first, last):  # type: ignore[no-untyped-def]
    """Let the slots ``first`` to ``last`` - 1 wait for the backward passes of the shard's uses."""
    for i in range(S.count[USES]):
        if C.alive[S.use_slot[i]]:
            for slot in range(first, last):
                add_edge(S, S.use_slot[i], slot)


@compiled
def add_edge(S: Scratch, source: int, target: int) -> None:
    """Let the task in slot ``target`` wait for the one in slot ``source``."""
    n = S.count[EDGES]
    if n + 1 > len(S.e_src):
        raise MemoryError(FULL)
    S.e_src[n], S.e_dst[n] = source, target
    S.count[EDGES] = n + 1


@compiled
def install(C, S, rows, begin, first, updates):  # type: ignore[no-untyped-def]
    """Write the edges from number ``begin`` on into the arena: by source, the slots of what waits for it. ``rows``: by operator, where
    those of its tiles' forward passes, then of their backward passes, begin; tasks from slot ``first`` on and the first ``updates``
    devices' updates have theirs in ``index``. What these tasks themselves wait for is counted."""
    base, edges = C.used[ARENA], S.count[EDGES]
    at = base
    fill(rows, 0, len(rows), -1)
    for slot in range(updates):
        C.index[slot], at = at, at + 2
    for slot in range(first, C.used[SLOTS]):
        C.index[slot], at = at, at + 2
    for i in range(begin, edges):
        op = C.owner[S.e_src[i]]
        if updates <= S.e_src[i] < first and rows[op] < 0:
            rows[op], at = at, at + 2 * C.tiles[op] + 1
    if at + edges > len(C.arena):
        raise MemoryError(STATE_FULL)
    fill(C.arena, base, at, 0)
    for i in range(begin, edges):
        C.arena[_row(C, rows, first, updates, S.e_src[i]) + 1] += 1
    end = at
    for place in range(base, at):
        end += C.arena[place]
        C.arena[place] = end
    for i in range(edges - 1, begin - 1, -1):  # a row's end goes down to its beginning while the row is filled
        row = _row(C, rows, first, updates, S.e_src[i]) + 1
        C.arena[row] -= 1
        C.arena[C.arena[row]] = S.e_dst[i]
        C.waits[S.e_dst[i]] += 1 if S.e_dst[i] >= first else 0
    for place in range(base, at):
        C.arena[place] = C.arena[place + 1] if place + 1 < at else end
    C.used[ARENA] = end


@compiled
def _row(C, rows, first, updates, slot):  # type: ignore[no-untyped-def]
    """Where a source's row begins in the arena."""
    if slot < updates or slot >= first:
        return C.index[slot]
    return rows[C.owner[slot]] + slot - C.tile_slot[C.owner[slot]]


@compiled
def count_rows(C: State, first: int, count: int, sign: int) -> None:
    """Count (1) or stop counting (-1) the edges from ``count`` tasks from slot ``first`` on to earlier slots in what those wait for."""
    for slot in range(first, first + count):
        row = C.index[slot]
        for i in range(C.arena[row], C.arena[row + 1]):
            if C.arena[i] < first:
                C.waits[C.arena[i]] += sign


@compiled
def round_of_flows(K, S, reduced):  # type: ignore[no-untyped-def]
    """(duration in ns, bytes) of a round of the flows that were joined; zeros if there are none."""
    return (round_ns(K, S, reduced), total_flow(S)) if S.count[FLOWS] > 0 else (0, 0)
