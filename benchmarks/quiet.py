"""How much of this machine other programs use: times that were measured beside them say nothing. Linux; elsewhere it is unknown."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

STATISTICS = Path("/proc/stat")
WINDOW_SECONDS = 3.0


class Watch:
    """Counts processor time from its construction on: everybody's, and that of this process and of all that it has started."""

    def __init__(self) -> None:
        self._start = _counts()

    def others_share(self) -> float | None:
        """Share of all cores' time that other programs used; None where it cannot be known."""
        if self._start is None:
            return None
        end = _counts()
        assert end is not None
        all_seconds, busy_seconds, own_seconds = (b - a for a, b in zip(self._start, end, strict=True))
        others = max(0.0, busy_seconds - own_seconds)
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
    """Seconds of all cores, of them busy, and of them for this process and all that it has started."""
    if not STATISTICS.exists():
        return None
    ticks = [int(field) for field in STATISTICS.read_text(encoding="ascii").splitlines()[0].split()[1:9]]  # what guests use is in user time
    total, idle = sum(ticks), ticks[3] + ticks[4]
    rate = os.sysconf("SC_CLK_TCK")
    return total / rate, (total - idle) / rate, used_seconds()


def used_seconds() -> float:
    """Processor time of this process and of all that it has started, ended or not, and that they have. Linux. What has ended counts while
    the process that started it lives."""
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    waiting = [*_children(os.getpid())]
    while waiting:
        pid = waiting.pop()
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        waiting += _children(pid)
        total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def _children(pid: int) -> Iterator[int]:
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended meanwhile
            yield from map(int, tasks.read_text(encoding="ascii").split())
