"""Which cores a rank's time comes from: its own, where ranks and cores come out even, so that no core is asked for more than it has; and
which ones are left to threads that communicate."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

BUSIEST = 0.5
"""A core on which emulated devices compute may be so busy with it if threads that communicate are to have others."""


def usable_cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def computing_and_communicating(shares: Sequence[float], cores: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """On which of these cores devices compute that have such parts of a core each, and on which others, at most as many, their threads
    communicate.

    None is for what communicates alone where none can be spared, or where a device has more than a core. Other devices' messages displace
    a computation, and cool its caches, so that steps of one plan take different times: where computation leaves a core (a small
    ``--emulate-scale``), communication has all of it.
    """
    needed = len(cores) if max(shares) > 1 else math.ceil(sum(shares) / BUSIEST)
    return tuple(cores[:needed]), tuple(cores[needed : 2 * needed])


def cores_by_rank(ranks: int, cores: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Each rank's cores: as many of its own for all, or as many ranks on each; any core for all ranks otherwise.

    The kernel balances by moving processes, late: of four ranks with not quite half a core each, three would often be on one of two cores.
    """
    if len(cores) % ranks == 0:
        each = len(cores) // ranks
        return tuple(tuple(cores[rank * each : (rank + 1) * each]) for rank in range(ranks))
    if ranks % len(cores) == 0:
        return tuple((cores[rank % len(cores)],) for rank in range(ranks))
    return (tuple(cores),) * ranks
