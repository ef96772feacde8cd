"""How busy others keep this machine while it is measured: the cores' own counts, less the time of this process and its children."""

from __future__ import annotations

import os
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from soap.errors import SoapWarning

STAT = Path("/proc/stat")
IDLE = (3, 4)
"""Fields of a core's line: idle, and waiting for a disk. The time of guests (the last two fields) is in the others already."""
COUNTED = 8
NOTEWORTHY = 0.1
"""Share of the cores from which on others' work is told."""
LEAST_S = 0.2
"""A shorter time tells little: cores count in hundredths of a second."""


class Count(NamedTuple):
    """Seconds since the machine began, of the cores that this process may use."""

    busy_s: float
    own_s: float
    clock_s: float
    cores: int


def count() -> Count | None:
    """The counts by now; None where the system does not tell. Children count once they were waited for."""
    try:
        cores = os.sched_getaffinity(0)
        lines = [line.split() for line in STAT.read_text(encoding="ascii").splitlines() if line[:3] == "cpu" and line[3:4].isdigit()]
        own = [list(map(int, line[1 : 1 + COUNTED])) for line in lines if int(line[0][3:]) in cores]
        ticks = sum(value for line in own for field, value in enumerate(line) if field not in IDLE)
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own_s = sum(one.ru_utime + one.ru_stime for one in used)
        return Count(ticks / os.sysconf("SC_CLK_TCK"), own_s, time.monotonic(), len(own))
    except (OSError, ValueError, AttributeError, IndexError):
        return None


def others_cores(before: Count | None, after: Count | None) -> float | None:
    """How many cores other processes, or other machines on the same hardware, kept busy on average; None if that is not known."""
    if before is None or after is None or not after.cores or after.clock_s - before.clock_s < LEAST_S:
        return None
    busy_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return max(0.0, busy_s / (after.clock_s - before.clock_s))


@contextmanager
def noticing_others(what: str, advice: str, counting: Callable[[], Count | None] = count) -> Iterator[None]:
    """Warn at the end, in one line, if others kept much of this machine busy meanwhile. ``what``: such as ``links were``.
    ``advice``: how to do it again."""
    before = counting()
    yield
    after = counting()
    others = others_cores(before, after)
    if others is not None and after is not None and others >= NOTEWORTHY * after.cores:
        busy = f"other work kept {others:.1f} of {after.cores} cores busy while {what} measured"
        warnings.warn(f"{busy}: predictions may be off; on an idle machine, {advice}", SoapWarning, stacklevel=3)
