"""Which cores a rank's time comes from: its own, where ranks and cores come out even, so that no core is asked for more than it has."""

from __future__ import annotations

import os
from collections.abc import Sequence


def usable_cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


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
