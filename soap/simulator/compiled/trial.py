"""A trial: a simulation in progress, and then its outcome, for compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from soap.simulator.compiled.graph_arrays import Ints, Longs

IN_RUN = -1
"""``left`` of a task that is ready and waits in the run."""

HEAP, CURSOR, WAITING, DELAY, TAKEN, MAKESPAN, RUN, HEAPED, SKIPPED = range(9)
"""Places in ``Trial.size``. ``HEAP``: entries of the heap. ``CURSOR``: the run's next place. ``WAITING``, ``DELAY``: tasks that wait in the
run, and their common delay. ``TAKEN``: tasks taken. ``MAKESPAN``: latest end. ``RUN``: length of the run. ``HEAPED``: tasks that went
through the heap. ``SKIPPED``: tasks at the beginning that were not played because they are as in the earlier simulation."""

PER_DEVICE = 6
"""Clocks of each device: ``Trial.charged`` to ``Trial.behind``."""


class Trial(NamedTuple):
    """By slot: ``left`` (predecessors that have not ended), ``ready``, ``start``, ``end`` in ns. ``order``: slots in the order in which
    they were taken. ``place``: a slot's place in that order, valid after ``keep_order``. ``rest``: by device, least ns of what it still has
    to do. ``heap_``: the heap.

    ``clocks``: all arrays that show how far resources and devices are, one after the other, so that they are copied at once. They are
    ``free``: when each resource is free; and by device ``charged``: place in the order, from 1 on, of the last communication that was
    charged to it; ``launched``: when the last pass that was taken is launched; ``computed``: when its last tile ended; ``slower``: for how
    many ns of its next tiles it is slower, because it has waited; ``message``: 1 if the last communication that was charged to it was a
    message; ``behind``: what that was when it last waited.
    """

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
    message: Longs
    behind: Longs


def clock_count(resources: int, devices: int) -> int:
    """Length of ``Trial.clocks``."""
    return resources + PER_DEVICE * devices


def make_trial(slots: int, resources: int, devices: int) -> Trial:
    """Room for this many slots, resources and devices."""
    longs, ints = (lambda n: np.zeros(n, np.int64)), (lambda n: np.zeros(n, np.int32))
    clocks = longs(clock_count(resources, devices))
    ends = np.cumsum([resources, *(devices for _ in range(PER_DEVICE))])
    free, charged, launched, computed, slower, message, behind = np.split(clocks, ends[:-1])
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
        message=message,
        behind=behind,
    )
