"""What this machine has left at a moment: cores, memory, disk. Limits of control groups (versions 1 and 2) count, not the box alone."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from soap.preprocessing.load import Load

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
