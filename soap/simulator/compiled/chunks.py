"""Cuts sums of gradients and sparse all-gathers into chunks (compiled). The counterpart of ``soap.simulator.chunks``."""

from __future__ import annotations

from soap.simulator.chunks import MOST_CHUNKS, NO_CHUNKS
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.scratch import Scratch
from soap.simulator.compiled.state import Groups, State
from soap.simulator.compiled.syncs.exchange import add_edge, new_task


@compiled
def cut_sum(R: Groups, C: State, S: Scratch, slot: int) -> None:
    """Where sums are cut, cut the one in ``slot``. Its first chunk keeps the slot, because edges from tiles lead there. What waits for the
    sum, such as devices' updates, waits for the last chunk (``index``)."""
    shortest = R.shortest_chunk_ns[0]
    count = 1 if shortest == NO_CHUNKS else max(1, min(MOST_CHUNKS, C.duration[slot] // shortest))
    duration, overhead, moved = C.duration[slot], C.overhead[slot], C.moved[slot]
    for k in range(count if count > 1 else 0):
        own = slot
        if k:
            own = new_task(C, (C.key[slot], C.subkey[slot] + k))
            C.resource[own], C.resource_n[own] = C.resource[slot], C.resource_n[slot]
            add_edge(S, C.index[slot], own)
        C.duration[own] = duration * (k + 1) // count - duration * k // count
        C.overhead[own] = overhead * (k + 1) // count - overhead * k // count
        C.moved[own] = moved if k == count - 1 else 0
        C.index[slot] = own
