"""How many of our cores other programs keep busy: all their time but ours and the kernel's own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from pathlib import Path

SMOOTHING = 0.5
"""Weight of the newest interval."""
LEAST_INTERVAL_S = 0.2
"""Loads over shorter times are the clock's ticks."""
KERNEL_THREAD = 0x00200000
"""PF_KTHREAD in Linux's ``include/linux/sched.h``."""


class Load:
    """Watches one machine. ``proc``: where ``/proc`` is; ``clock``: seconds.

    Threads of the kernel write files and free pages for us, the more, the faster we are: were they others, we would give way to ourselves.
    Interrupts belong to nobody, and a host that takes cores away would not give more of them to us if we used fewer.
    """

    def __init__(self, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic) -> None:
        self._proc, self._clock = proc, clock
        self._before: tuple[float, float, float] | None = None
        self._others = 0.0
        self._kernel: dict[int, float] = {}
        self._kernel_s = 0.0
        self._users: set[int] = set()

    def others(self, own: Iterable[int], cores: Container[int]) -> float:
        """So many of these cores (numbers), lately. ``own``: ids of our processes, which run on no other ones; what those of their children
        used that have ended is ours, too."""
        now = self._clock()
        if self._before is None or now - self._before[0] >= LEAST_INTERVAL_S:
            with suppress(OSError):
                self._look(now, own, cores)
        return self._others

    def _look(self, now: float, own: Iterable[int], cores: Container[int]) -> None:
        busy = self._busy_seconds(cores) - self._kernel_seconds(cores)
        ours = sum(_in_seconds(sum(map(int, self._fields(process)[11:15]))) for process in own)
        if self._before is not None:
            then, busy_then, ours_then = self._before
            if ours >= ours_then:  # else one of ours has ended whose parent is none of ours
                others = max(0.0, (busy - busy_then - (ours - ours_then)) / (now - then))
                self._others += SMOOTHING * (others - self._others)
        self._before = now, busy, ours

    def _busy_seconds(self, cores: Container[int]) -> float:
        """Of programs and of the kernel."""
        found = 0
        for line in (self._proc / "stat").read_text(encoding="ascii").splitlines():
            name, *ticks = line.split()
            if name.startswith("cpu") and name != "cpu" and int(name[3:]) in cores:
                found += sum(map(int, ticks[:3]))  # user, nice, system
        return _in_seconds(found)

    def _kernel_seconds(self, cores: Container[int]) -> float:
        """Of its threads since this watch began. Where they are not to be seen, as in most containers, they count as others."""
        there = {int(name) for name in os.listdir(self._proc) if name.isdigit()}
        self._users &= there
        before, self._kernel = self._kernel, {}
        for process in there - self._users:
            fields = self._fields(process)
            if len(fields) > 36 and int(fields[6]) & KERNEL_THREAD:
                self._kernel[process] = own = _in_seconds(int(fields[11]) + int(fields[12]))
                if int(fields[36]) in cores:  # where it ran last
                    self._kernel_s += max(0.0, own - before.get(process, 0.0))
            elif fields:
                self._users.add(process)
        return self._kernel_s

    def _fields(self, process: int) -> list[str]:
        """Of its ``stat``, behind its name (``man 5 proc``: from the third on); none if it has ended."""
        try:
            text = (self._proc / str(process) / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        return text.rpartition(")")[2].split()


def _in_seconds(ticks: int) -> float:
    return ticks / os.sysconf("SC_CLK_TCK")
