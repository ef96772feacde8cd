"""What this machine has left at a moment: cores, memory, disk. Limits of control groups (versions 1 and 2) count, not the box alone."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
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


NO_LIMIT = 2**60
"""Version 1 says so of groups without a limit, about."""


@dataclass(frozen=True, slots=True)
class Sample:
    """``cores``: that may be used; ``others``: how many of them other programs keep busy; ``available_bytes``: memory that can be had
    without anything being killed; ``limit_bytes``: all memory there is for us; ``disk_bytes``: free in the folder."""

    cores: float
    others: float
    available_bytes: int
    limit_bytes: int
    disk_bytes: int


class Machine:
    """Samples of this machine. ``folder``: whose disk counts; ``root``: where ``/proc`` and control groups are; ``clock``: seconds."""

    def __init__(self, folder: Path, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._root = folder, root
        self._load = Load(root / "proc", clock)

    def sample(self, own: Iterable[int]) -> Sample:
        """Now. ``own``: ids of processes that are ours, whose load is not others'."""
        limit, available = self._memory()
        ours, quota = os.sched_getaffinity(0), self._quota()
        cores = min(len(ours), quota)
        busy = self._load.others(own, ours) - (len(ours) - cores)  # below a quota, others first take what we may not use
        return Sample(cores, max(0.0, busy), available, limit, shutil.disk_usage(self._folder).free)

    def _memory(self) -> tuple[int, int]:
        """Limit and what is available, in bytes."""
        lines = (self._root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
        limit = values["MemTotal"]
        available = values.get("MemAvailable", values["MemFree"])
        for group, unified in self._groups("memory"):
            own = _number(group / ("memory.max" if unified else "memory.limit_in_bytes"))
            used = _number(group / ("memory.current" if unified else "memory.usage_in_bytes"))
            if own is None or used is None or own >= NO_LIMIT:
                continue
            stat = dict(line.split()[:2] for line in _text(group / "memory.stat").splitlines() if line.count(" ") == 1)
            prefix = "" if unified else "total_"
            cache = sum(int(stat.get(f"{prefix}{name}_file", 0)) for name in ("inactive", "active"))
            limit, available = min(limit, own), min(available, max(0, own - used + cache))
        return limit, available

    def _quota(self) -> float:
        """Cores that control groups leave us."""
        found = float("inf")
        for group, unified in self._groups("cpu"):
            if unified:
                quota, _, period = _text(group / "cpu.max").strip().partition(" ")
            else:
                quota, period = _text(group / "cpu.cfs_quota_us").strip(), _text(group / "cpu.cfs_period_us").strip()
            if quota.isdigit() and period.isdigit() and int(period):
                found = min(found, int(quota) / int(period))
        return found

    def _groups(self, controller: str) -> Iterator[tuple[Path, bool]]:
        """This process's control group and those above it that may limit this, and whether they are of version 2."""
        mounts = [line.split() for line in _text(self._root / "proc/self/mounts").splitlines()]
        for line in _text(self._root / "proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            unified = not controllers
            if not unified and controller not in controllers.split(","):
                continue
            for fields in mounts:
                if fields[2] != ("cgroup2" if unified else "cgroup") or not (unified or controller in fields[3].split(",")):
                    continue
                top = self._root / fields[1].replace("\\040", " ").lstrip("/")
                group = top / path.lstrip("/")
                group = group if group.is_dir() else top  # a container may see its own group as the root
                while True:
                    yield group, unified
                    if group == top or top not in group.parents:
                        break
                    group = group.parent


def private_bytes(process: int) -> int:
    """Memory of a process that no file stands behind."""
    try:
        text = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("RssAnon"))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None
