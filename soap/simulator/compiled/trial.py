"""A simulation under way, and its outcome, for compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from soap.simulator.compiled.graph_arrays import Ints, Longs

IN_RUN = -1
"""``left`` of a task that is ready and waits in the run."""

HEAP, CURSOR, WAITING, DELAY, TAKEN, MAKESPAN, RUN, HEAPED, SKIPPED = range(9)
"""Places in ``Trial.size``: entries of the heap; the run's next place; tasks that wait in the run, and their delay; tasks taken; latest
end; length of the run; how many tasks went through the heap; how many at the beginning were as in the earlier simulation."""

PER_DEVICE = 4
"""Clocks of each device: ``Trial.charged`` to ``Trial.slower``."""


class Trial(NamedTuple):
    """Per slot: ``left`` (predecessors that have not ended), ``ready``, ``start``, ``end`` in ns. ``order``: slots as they were taken;
    ``place``: where a slot stands in it (valid once it has become a run). ``rest``: per device, ns at least of what it has still to do.
    ``heap_``: the heap.

    ``clocks``: all that says how far resources and devices are, one array behind the other, so that they are copied at once. ``free``: when
    each resource is free. Per device, ``charged``: the place in the order, from 1 on, of the
    communication that it was last busy with; ``launched``: ns until what was taken has been launched; ``computed``: when its last tile
    ended; ``slower``: for how many ns of the next ones it is slower, as it has waited."""

    size: Longs
    left: Ints
    ready: Longs
    start: Longs
    end: Longs
    order: Ints
    place: Ints
    rest: Longs
    heap_ready: Longs
    heap_key: Longs
    heap_slot: Ints
    clocks: Longs
    free: Longs
    charged: Longs
    launched: Longs
    computed: Longs
    slower: Longs


def clock_count(resources: int, devices: int) -> int:
    """Length of ``Trial.clocks``."""
    return resources + PER_DEVICE * devices


def make_trial(slots: int, resources: int, devices: int) -> Trial:
    """Room for so many slots and resources."""
    longs, ints = (lambda n: np.zeros(n, np.int64)), (lambda n: np.zeros(n, np.int32))
    clocks = longs(clock_count(resources, devices))
    ends = np.cumsum([resources, *(devices for _ in range(PER_DEVICE))])
    free, charged, launched, computed, slower = np.split(clocks, ends[:-1])
    return Trial(
        size=longs(16),
        left=ints(slots),
        ready=longs(slots),
        start=longs(slots),
        end=longs(slots),
        order=ints(slots),
        place=ints(slots),
        rest=longs(devices),
        heap_ready=longs(slots),
        heap_key=longs(slots),
        heap_slot=ints(slots),
        clocks=clocks,
        free=free,
        charged=charged,
        launched=launched,
        computed=computed,
        slower=slower,
    )
