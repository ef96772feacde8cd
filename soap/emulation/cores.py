"""Which cores a rank's time comes from: its own, if ranks divide evenly among cores, so that no core is asked for more than it has; and
which cores are left to threads that communicate."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

BUSIEST = 0.5
"""Share up to which emulated devices may fill a core so that threads that communicate get other cores."""


def usable_cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def computing_and_communicating(shares: Sequence[float], cores: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """On which of these cores the devices compute, given their shares of a core, and on which other ones, at most as many, their
    threads communicate. There are none for communication if none can be spared, or if a device has more than a core.

    Other devices' messages displace a computation and cool its caches, so steps of one plan take different times. If computation leaves
    a core free (with a small ``--emulate-scale``), communication has all of it.
    """
    needed = len(cores) if max(shares) > 1 else math.ceil(sum(shares) / BUSIEST)
    return tuple(cores[:needed]), tuple(cores[needed : 2 * needed])


def cores_by_rank(ranks: int, cores: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Each rank's cores: the same number of its own for all, or the same number of ranks on each; any core for all ranks otherwise.

    The kernel balances by moving processes, late: of four ranks with not quite half a core each, three would often be on one of two
    cores.
    """
    if len(cores) % ranks == 0:
        each = len(cores) // ranks
        return tuple(tuple(cores[rank * each : (rank + 1) * each]) for rank in range(ranks))
    if ranks % len(cores) == 0:
        return tuple((cores[rank % len(cores)],) for rank in range(ranks))
    return (tuple(cores),) * ranks
