"""Which task is taken next (compiled): the first in the order of (ready time, key).

Besides a heap, the loop uses the order of an earlier simulation, its *run*. As long as tasks become ready with the same delay against the
earlier simulation, their order is the same as then, and they need no heap. A task with another delay goes into the heap. The loop takes the
earlier one of the run's next task and the heap's first, so the outcome never depends on the run.
"""

from __future__ import annotations

from typing import NamedTuple

from soap.simulator.compiled.graph_arrays import Ints, Longs
from soap.simulator.compiled.jit import compiled, inlined
from soap.simulator.compiled.state import State
from soap.simulator.compiled.trial import CURSOR, DELAY, HEAP, HEAPED, IN_RUN, RUN, TAKEN, WAITING, Trial


class Queue(NamedTuple):
    """The arrays of a trial and a state that decide which task is next, looked up once for a whole loop. ``run``, ``place``, ``before``:
    order, places and ready times of the earlier simulation."""

    size: Longs
    left: Ints
    ready: Longs
    order: Ints
    heap_ready: Longs
    heap_key: Longs
    heap_slot: Ints
    run: Ints
    place: Ints
    before: Longs
    key: Longs
    subkey: Longs
    alias: Ints


@compiled
def queue_of(C: State, P: Trial, T: Trial) -> Queue:
    """The queue of ``T``. ``P``: the earlier simulation."""
    return Queue(
        T.size, T.left, T.ready, T.order, T.heap_ready, T.heap_key, T.heap_slot, P.order, P.place, P.ready, C.key, C.subkey, C.alias
    )


@inlined
def _is_before(Q, i, ready, key, slot):  # type: ignore[no-untyped-def]
    """Whether entry ``i`` of the heap comes before a slot, by ready time, then by key."""
    if Q.heap_ready[i] != ready:
        return Q.heap_ready[i] < ready
    return Q.heap_key[i] < key or (Q.heap_key[i] == key and Q.subkey[Q.heap_slot[i]] < Q.subkey[slot])


@inlined
def _put(Q, i, ready, key, slot):  # type: ignore[no-untyped-def]
    Q.heap_ready[i], Q.heap_key[i], Q.heap_slot[i] = ready, key, slot


@compiled
def push(Q: Queue, slot: int, ready: int) -> None:
    """Put a slot into the heap, which has four children per node."""
    key = Q.key[slot]
    i = Q.size[HEAP]
    Q.size[HEAP] = i + 1
    Q.size[HEAPED] += 1
    while i > 0:
        parent = (i - 1) >> 2
        if _is_before(Q, parent, ready, key, slot):
            break
        _put(Q, i, Q.heap_ready[parent], Q.heap_key[parent], Q.heap_slot[parent])
        i = parent
    _put(Q, i, ready, key, slot)


@compiled
def _pop(Q):  # type: ignore[no-untyped-def]
    """Remove the heap's first entry."""
    last = Q.size[HEAP] - 1
    Q.size[HEAP] = last
    ready, key, slot = Q.heap_ready[last], Q.heap_key[last], Q.heap_slot[last]
    i = 0
    while True:
        child = 4 * i + 1
        if child >= last:
            break
        best = child
        for other in range(child + 1, min(child + 4, last)):
            if _is_before(Q, other, Q.heap_ready[best], Q.heap_key[best], Q.heap_slot[best]):
                best = other
        if not _is_before(Q, best, ready, key, slot):
            break
        _put(Q, i, Q.heap_ready[best], Q.heap_key[best], Q.heap_slot[best])
        i = best
    _put(Q, i, ready, key, slot)


@inlined
def make_ready(Q: Queue, slot: int, ready: int) -> None:
    """Put a slot whose predecessors have all ended into the run if it fits there, else into the heap."""
    size, at = Q.size, Q.place[slot]
    if size[CURSOR] <= at < size[RUN]:
        delay = ready - Q.before[slot]
        if size[WAITING] == 0 or size[DELAY] == delay:
            size[DELAY] = delay
            Q.left[slot] = IN_RUN
            size[WAITING] += 1
            return
    push(Q, slot, ready)


@inlined
def settle(Q: Queue, slot: int, end: int) -> None:
    """Note that one more predecessor of a slot has ended, at ``end``."""
    left, ready = Q.left[slot] - 1, max(Q.ready[slot], end)
    Q.left[slot], Q.ready[slot] = left, ready
    if left == 0:
        make_ready(Q, slot, ready)


@inlined
def first_ready(Q: Queue) -> int:
    """The slot to take next; -1 if none is ready."""
    size = Q.size
    if size[WAITING] == 0:
        return Q.heap_slot[0] if size[HEAP] > 0 else -1
    cursor = size[CURSOR]
    slot = Q.alias[Q.run[cursor]]
    while slot < 0 or Q.left[slot] != IN_RUN:
        cursor += 1
        slot = Q.alias[Q.run[cursor]]
    size[CURSOR] = cursor
    if size[HEAP] > 0 and _is_before(Q, 0, Q.ready[slot], Q.key[slot], slot):
        return Q.heap_slot[0]
    return slot


@inlined
def take(Q: Queue, slot: int) -> None:
    """Take the slot that ``first_ready`` has returned."""
    size = Q.size
    if Q.left[slot] == IN_RUN:
        size[CURSOR] += 1
        size[WAITING] -= 1
        Q.left[slot] = 0
    else:
        _pop(Q)
    Q.order[size[TAKEN]] = slot
    size[TAKEN] += 1
