"""How much of this machine other programs use: times that were measured beside them say nothing. Linux; elsewhere it is unknown."""

from __future__ import annotations

import os
import time
from pathlib import Path

STATISTICS = Path("/proc/stat")
WINDOW_SECONDS = 3.0


class Watch:
    """Counts processor time from its construction on: everybody's, and that of this process and the children it has waited for."""

    def __init__(self) -> None:
        self._start = _counts()

    def others_share(self, running_seconds: float = 0.0) -> float | None:
        """Share of all cores' time that other programs used; None where it cannot be known. ``running_seconds``: processor time since then
        of children that still run."""
        if self._start is None:
            return None
        end = _counts()
        assert end is not None
        all_seconds, busy_seconds, own_seconds = (b - a for a, b in zip(self._start, end, strict=True))
        others = max(0.0, busy_seconds - own_seconds - running_seconds)
        return min(1.0, others / max(all_seconds, 1e-9))  # differences of sums round: a hair over 1 otherwise


def wait_until_quiet(limit: float, deadline: float) -> bool:
    """Wait until others leave more than ``1 - limit`` of the cores alone, at the longest until ``time.monotonic()`` is ``deadline``."""
    while True:
        watch = Watch()
        time.sleep(WINDOW_SECONDS)
        share = watch.others_share()
        if share is None or share <= limit:
            return True
        if time.monotonic() > deadline:
            return False


def _counts() -> tuple[float, float, float] | None:
    """Seconds of all cores, of them busy, and of them for this process and its children."""
    if not STATISTICS.exists():
        return None
    ticks = [int(field) for field in STATISTICS.read_text(encoding="ascii").splitlines()[0].split()[1:9]]  # what guests use is in user time
    total, idle = sum(ticks), ticks[3] + ticks[4]
    rate = os.sysconf("SC_CLK_TCK")
    own = os.times()
    return total / rate, (total - idle) / rate, own.user + own.system + own.children_user + own.children_system
