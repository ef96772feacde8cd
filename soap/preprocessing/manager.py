"""How much at once: X units and Y chunks of each, chosen anew before every start of a task, from what the machine has left. Limits
of control groups count, not the box alone."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soap.preprocessing.work import CONVERT, INDEX, MERGE, OPEN, UNITE, WRITE, Done

SERIAL, UNIT, CHUNK, ADAPTIVE = "serial", "unit", "chunk", "adaptive"
MODES = (SERIAL, UNIT, CHUNK, ADAPTIVE)
CHUNK_BYTES = 32 * 2**20
"""Of input: some tenths of a second of work, beside which a task's start costs nothing."""
LEAST_CHUNK_BYTES = 2**20
FIRST_FACTORS = {OPEN: 0.0, INDEX: 4.5, UNITE: 1.5, MERGE: 3.0, CONVERT: 1.0, WRITE: 4.0}
"""Bytes of memory that a task needs, beside ``TASK_BYTES``, per byte that it is about, until the step's first tasks have told. Of generated
data of Criteo's shape, tasks needed up to 2.9 (index), 0.8 (unite), 0.3 (convert) and 3.2 (write); merge has no figure, as dictionaries of
so little data need less than ``TASK_BYTES``. Shorter fields need more to index: about 24 bytes for a text, 12 for an id, 4 for a
number."""
TASK_BYTES = 16 * 2**20
"""What any task may need."""
WORKER_BYTES = 160 * 2**20
"""Of a process with the compiled parser, until one has told."""
RESERVE_SHARE, LEAST_RESERVE_BYTES = 0.05, 32 * 2**20
"""Of all memory, what is left alone; and the least of it."""
MARGIN = 1.15
"""On what was learned: the next chunk is not quite like the last."""


@dataclass(frozen=True, slots=True)
class Limits:
    """At most ``units`` at once, ``chunks`` of each, ``tasks`` in all. ``why``: what binds. ``pressed``: a task should be taken back."""

    units: int
    chunks: int
    tasks: int
    why: str
    pressed: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """What a node does now. ``waiting``: unit -> tasks that have not begun; ``running``: tasks under way; ``used_bytes``: memory of their
    processes; ``workers``: processes there are; ``size``: bytes that the largest waiting task is about."""

    waiting: Mapping[int, int]
    running: int
    used_bytes: int
    workers: int
    size: int


class Manager:
    """Decides for one node. ``modes``: step -> mode, adaptive where none is given. ``most``: tasks at once at most (None: by cores)."""

    def __init__(
        self, modes: Mapping[str, str] | None = None, most: int | None = None, told: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        self._modes = dict(modes or {})
        self._most = most
        self._told = told
        self._factors = dict(FIRST_FACTORS)
        self._learned: set[str] = set()
        self._worker_bytes = WORKER_BYTES
        self._ceiling: int | None = None
        self._last: Limits | None = None

    def mode(self, step: str) -> str:
        """How a step is parallelized. Steps between the two that the thesis names go with the first one."""
        return self._modes.get(step, self._modes.get(INDEX if step in (OPEN, UNITE, MERGE) else CONVERT, ADAPTIVE))

    def learn(self, done: Done) -> None:
        """Take what a task has needed into account."""
        step, size = done.task.step, done.task.size
        if done.peak_bytes and not done.kept and size:
            needed = max(0, done.peak_bytes - TASK_BYTES) / size * MARGIN
            self._factors[step] = max(self._factors[step], needed) if step in self._learned else needed
            self._learned.add(step)

    def lost(self, running: int) -> None:
        """A task was killed while so many ran: never so many again."""
        self._ceiling = max(1, running - 1)
        self._tell("lost", {"tasks_at_most": self._ceiling})

    def new_step(self) -> None:
        """A step begins: what was too much for the last one may not be for this one."""
        self._ceiling = self._last = None

    def task_bytes(self, step: str, size: int) -> int:
        """Memory that a task of a step needs."""
        return round(TASK_BYTES + self._factors[step] * size)

    def limits(self, step: str, state: State, sample: Sample) -> Limits:
        """What may run now."""
        found = self._limits(step, state, sample)
        last = self._last
        if last is None or (found.units, found.chunks, found.tasks, found.pressed) != (last.units, last.chunks, last.tasks, last.pressed):
            self._last = found
            self._tell(step, _document(found, state, sample))
        return found

    def _limits(self, step: str, state: State, sample: Sample) -> Limits:
        units, chunks = max(1, len(state.waiting)), max(1, max(state.waiting.values(), default=1))
        cores = max(1, int(sample.cores + 0.5))
        mode = self.mode(step)
        if mode == SERIAL:
            return Limits(1, 1, 1, "serial")
        if mode == UNIT:
            return Limits(units, 1, self._most or units, "one task for each unit")
        if mode == CHUNK:
            return Limits(1, self._most or cores, self._most or cores, "one unit at a time")
        idle = max(1, int(sample.cores - sample.others + 0.6))
        choices = [(self._most or cores, "cores" if self._most is None else "workers"), (idle, "other processes' load")]
        each = self.task_bytes(step, state.size)
        reserve = max(LEAST_RESERVE_BYTES, round(RESERVE_SHARE * sample.limit_bytes))
        if state.workers and state.used_bytes and not state.running:
            self._worker_bytes = max(2**24, state.used_bytes // state.workers)
        room = sample.available_bytes + state.used_bytes - reserve
        choices.append((max(1, room // (each + self._worker_bytes)), "memory"))
        if self._ceiling is not None:
            choices.append((self._ceiling, "memory, of which a task had too little"))
        tasks, why = min(choices, key=lambda choice: choice[0])
        at_once = max(1, min(tasks, chunks))
        pressed = state.running > 1 and sample.available_bytes < reserve // 2
        return Limits(-(-tasks // at_once), at_once, int(tasks), why, pressed)

    def chunk_bytes(self, sample: Sample) -> int:
        """Bytes of a chunk of which every core can have one in memory, in the step that needs most of it."""
        cores = self._most or max(1, int(sample.cores + 0.5))
        reserve = max(LEAST_RESERVE_BYTES, round(RESERVE_SHARE * sample.limit_bytes))
        room = (sample.available_bytes - reserve) / cores - WORKER_BYTES - TASK_BYTES
        return int(min(CHUNK_BYTES, max(LEAST_CHUNK_BYTES, room / max(FIRST_FACTORS[INDEX], 1))))

    def _tell(self, event: str, facts: dict[str, Any]) -> None:
        if self._told is not None:
            self._told({"at_s": round(time.time(), 3), "step": event, **facts})


def _document(found: Limits, state: State, sample: Sample) -> dict[str, Any]:
    return {
        "units": found.units, "chunks": found.chunks, "tasks": found.tasks, "because_of": found.why, "pressed": found.pressed,
        "running": state.running, "cores": round(sample.cores, 2), "others_busy_cores": round(sample.others, 2),
        "available_bytes": sample.available_bytes, "used_bytes": state.used_bytes, "limit_bytes": sample.limit_bytes,
        "disk_bytes": sample.disk_bytes,
    }  # fmt: skip


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
        """So many of these cores (numbers), lately. ``own``: ids of our processes, on no others; ended children's time is ours, too."""
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
