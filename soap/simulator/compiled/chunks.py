"""Cuts sums of gradients and sparse all-gathers into chunks (compiled). The counterpart of ``soap.simulator.chunks``."""

from __future__ import annotations

from soap.simulator.chunks import MOST_CHUNKS, NO_CHUNKS
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import TASKS, Scratch
from soap.simulator.compiled.state import ARENA, OTHER, Groups, State
from soap.simulator.compiled.task_keys import STATE_FULL


@compiled
def cut_sum(R: Groups, C: State, S: Scratch, slot: int, slot0: int) -> None:
    """Where sums are cut, cut the one in ``slot``. Its first chunk keeps the slot, because edges from tiles lead there; the other chunks
    come after the ``count[TASKS]`` tasks from ``slot0`` on. What waits for the sum, such as devices' updates, waits for the last chunk."""
    shortest = R.shortest_chunk_ns[0]
    if shortest == NO_CHUNKS:
        return
    count = max(1, min(MOST_CHUNKS, C.duration[slot] // shortest))
    if count > 1:
        _cut(C, slot, slot0 + S.count[TASKS], count)
        S.count[TASKS] += count - 1


@compiled
def _cut(C, first, others, count):  # type: ignore[no-untyped-def]
    """Cut a sum into ``count`` chunks: the first in slot ``first``, the others from slot ``others`` on."""
    row = C.used[ARENA]
    if others + count > len(C.key) or row + 3 * count > len(C.arena):
        raise MemoryError(STATE_FULL)
    duration, overhead, moved = C.duration[first], C.overhead[first], C.moved[first]
    kind, index = C.kind[first], C.index[first]
    for k in range(count):
        slot = others + k - 1 if k else first
        if k:
            C.key[slot], C.subkey[slot] = C.key[first], C.subkey[first] + k
            C.resource[slot], C.resource_n[slot], C.latency[slot] = C.resource[first], C.resource_n[first], 0
            C.waits[slot], C.alive[slot], C.owner[slot] = 1, 1, -1
        C.duration[slot] = duration * (k + 1) // count - duration * k // count
        C.overhead[slot] = overhead * (k + 1) // count - overhead * k // count
        if k < count - 1:
            C.arena[row], C.arena[row + 1], C.arena[row + 2] = row + 2, row + 3, others + k
            C.kind[slot], C.index[slot], C.moved[slot] = OTHER, row, 0
            row += 3
        else:
            C.kind[slot], C.index[slot], C.moved[slot] = kind, index, moved
    C.used[ARENA] = row
