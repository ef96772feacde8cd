"""Building blocks for tasks of synchronizations: what they hold, and what waits for them (compiled)."""

from __future__ import annotations

from soap.simulator.compiled.communication import begin_links, exchange_overhead_ns, round_ns, total_flow
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import EDGES, FLOWS, FULL, RESOURCES, USES, Scratch
from soap.simulator.compiled.state import ARENA, OTHER, PULLS, SLOTS
from soap.simulator.compiled.task_keys import STATE_FULL, set_key


@compiled
def begin_exchange(S):  # type: ignore[no-untyped-def]
    """Begin an exchange, which holds nothing yet. Call it before the exchange's rounds."""
    begin_links(S)
    S.count[RESOURCES] = 0


@compiled
def add_exchange(W, slot, key, duration, moved):  # type: ignore[no-untyped-def]
    """Write a collective whose links are in ``res`` into a slot."""
    K, C, S = W.cluster, W.state, W.scratch
    at, count = C.used[ARENA], S.count[RESOURCES]
    if at + count > len(C.arena) or slot + 1 > len(C.key):
        raise MemoryError(STATE_FULL)
    for i in range(count):
        C.arena[at + i] = S.res[i]
    C.used[ARENA] = at + count
    set_key(C, slot, key)
    C.duration[slot], C.latency[slot], C.moved[slot], C.alive[slot] = duration, 0, moved, 1
    C.resource[slot], C.resource_n[slot], C.overhead[slot] = -1 - at, count, exchange_overhead_ns(K, S, duration)


@compiled
def wait_for_tiles(C, S, first, last):  # type: ignore[no-untyped-def]
    """Let the slots ``first`` to ``last`` - 1 wait for the backward passes of the shard's uses."""
    for i in range(S.count[USES]):
        if C.alive[S.use_slot[i]]:
            for slot in range(first, last):
                add_sync_edge(S, S.use_slot[i], slot)


@compiled
def add_sync_edge(S: Scratch, source: int, target: int) -> None:
    """Let the task in slot ``target`` wait for a tile's backward pass, in slot ``source``."""
    n = S.count[EDGES]
    if n + 1 > len(S.e_src):
        raise MemoryError(FULL)
    S.e_src[n], S.e_dst[n] = source, target
    S.count[EDGES] = n + 1


@compiled
def new_row(C, count):  # type: ignore[no-untyped-def]
    """Make a row of the arena for ``count`` slots that wait for a task. The caller writes them after the row's two pointers."""
    row = C.used[ARENA]
    if row + 2 + count > len(C.arena):
        raise MemoryError(STATE_FULL)
    C.arena[row], C.arena[row + 1] = row + 2, row + 2 + count
    C.used[ARENA] = row + 2 + count
    return row


@compiled
def enter_before(C, owner, row):  # type: ignore[no-untyped-def]
    """Enter the task in the first free slot, before the forward pass; returns the slot. ``row``: of what waits for it."""
    slot = C.used[SLOTS]
    C.alive[slot], C.kind[slot], C.owner[slot], C.index[slot], C.waits[slot] = 1, OTHER, owner, row, 0
    C.used[SLOTS] = slot + 1
    C.used[PULLS] += 1
    return slot


@compiled
def round_of_flows(K, S, reduced):  # type: ignore[no-untyped-def]
    """(duration in ns, bytes) of a round of the flows that were joined; zeros if there are none."""
    return (round_ns(K, S, reduced), total_flow(S)) if S.count[FLOWS] > 0 else (0, 0)
