"""A CPU quota per rank by control groups, of either version; a group also says which processes belong to it.

There is no quota per host: a rank that waits must not lend its time to another one of its host, which would be faster than a device can
be. One more group, without a quota, is for the threads that communicate.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from soap.emulation.names import group_name
from soap.errors import RuntimeFailure

PERIOD_US = 10_000
"""Period of a quota: short, so that a slowed process runs evenly rather than in long bursts with long pauses; but some ticks of the
kernel's clock (4 ms) long: with 5 ms a quota of half a core was measured to give 0.415 of it."""
LEAST_QUOTA_US = 1000
"""The kernel accepts no smaller quota: smaller shares get a longer period."""
LONGEST_PERIOD_US = 1_000_000
PATIENCE_S = 5.0
"""Seconds until processes that were killed must be gone."""


@dataclass(frozen=True, slots=True)
class CpuGroups:
    """Where CPU control groups are made. ``unified``: version 2."""

    root: Path
    unified: bool

    def free_group(self, number: int) -> Path:
        """The group for threads that communicate."""
        return self.root / group_name(number) / "communication"

    def group(self, number: int, rank: int) -> Path:
        """A rank's group."""
        return self.root / group_name(number) / f"rank{rank}"


def find_cpu_groups(mounts: Path = Path("/proc/self/mounts")) -> CpuGroups | None:
    """The mounted control groups that can limit CPU time, or None."""
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        _, folder, kind, options, *_ = line.split()
        root = Path(folder.replace("\\040", " "))
        if kind == "cgroup" and "cpu" in options.split(","):
            return CpuGroups(root, False)
        if kind == "cgroup2":
            with suppress(OSError):
                if "cpu" in (root / "cgroup.controllers").read_text(encoding="ascii").split():
                    return CpuGroups(root, True)
    return None


def quota_us(cores: float) -> tuple[int, int]:
    """(CPU time, period) in microseconds for so many cores."""
    period = min(LONGEST_PERIOD_US, max(PERIOD_US, round(LEAST_QUOTA_US / cores)))
    return max(LEAST_QUOTA_US, round(cores * period)), period


def build(groups: CpuGroups, number: int, cores: Sequence[float]) -> None:
    """Make a group per rank with its share of CPU time, in cores. RuntimeFailure if the system refuses."""
    folder = groups.root / group_name(number)
    try:
        if groups.unified:
            _write(groups.root / "cgroup.subtree_control", "+cpu")
        folder.mkdir()
        if groups.unified:
            _write(folder / "cgroup.subtree_control", "+cpu")
        for group in (groups.free_group(number), *(groups.group(number, rank) for rank in range(len(cores)))):
            group.mkdir()
            if groups.unified:
                _write(group / "cgroup.type", "threaded")  # otherwise all threads of a process would have to be in one group
        for rank, share in enumerate(cores):
            group = groups.group(number, rank)
            quota, period = quota_us(share)
            if groups.unified:
                _write(group / "cpu.max", f"{quota} {period}")
            else:
                _write(group / "cpu.cfs_period_us", str(period))
                _write(group / "cpu.cfs_quota_us", str(quota))
    except OSError as cause:
        raise RuntimeFailure(
            f"--emulate: CPU quota in {folder}: {cause.strerror}; expected that root may write there: in a container, mount its control "
            "groups writable (with docker: --privileged)"
        ) from None


def own_group(groups: CpuGroups) -> Path:
    """The control group that the calling process is in."""
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if (not controllers) if groups.unified else "cpu" in controllers.split(","):
            own = groups.root / path.lstrip("/")
            return own if own.is_dir() else groups.root
    return groups.root


def join(group: Path, process: int) -> None:
    """Move a process into a group. RuntimeFailure if either is gone."""
    try:
        _write(group / "cgroup.procs", str(process))
    except OSError as cause:
        raise RuntimeFailure(f"--emulate: process {process} in control group {group}: {cause.strerror}; start again") from None


def move_thread(group: Path, thread: int) -> None:
    """Move one thread of a process into a group. If the thread has ended meanwhile, nothing happens."""
    path = group / "tasks"  # version 1
    with suppress(ProcessLookupError):
        _write(path if path.exists() else group / "cgroup.threads", str(thread))


def processes(groups: CpuGroups, number: int) -> list[int]:
    """Ids of all processes of this emulation's ranks."""
    found: set[int] = set()
    for path in (groups.root / group_name(number)).glob("**/cgroup.procs"):
        with suppress(OSError):
            found.update(map(int, path.read_text(encoding="ascii").split()))
    return sorted(found)


def remove(groups: CpuGroups, number: int) -> list[str]:
    """End all processes of this emulation and remove its groups. Returns what could not be removed."""
    end_s = time.monotonic() + PATIENCE_S
    while (alive := processes(groups, number)) and time.monotonic() < end_s:
        for process in alive:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    folder = groups.root / group_name(number)
    for group in (*sorted(folder.glob("*/")), folder):
        while group.is_dir():
            try:
                group.rmdir()
            except OSError:  # a process that has just ended may still be in it
                if time.monotonic() > end_s:
                    break
                time.sleep(0.01)
    return [f"process {process}" for process in alive] + ([f"control group {folder}"] if folder.exists() else [])


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="ascii")
