"""Whose time on the cores counts as others': what other programs use of ours, not what the kernel does for us or we do ourselves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from soap.preprocessing.manager import KERNEL_THREAD, Load, Machine, Manager, Sample, State
from soap.preprocessing.work import INDEX

OURS, WORKER, KERNEL, OTHER = 10, 11, 2, 99
HZ = os.sysconf("SC_CLK_TCK")


@dataclass
class Host:
    """A machine whose processes use as many seconds of each core as they are told to."""

    proc: Path
    cores: int = 2
    now_s: float = 0.0
    busy: list[float] = field(default_factory=list)
    used: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.busy = [0.0] * self.cores

    def after(self, seconds: float, used: Mapping[int, float], core: int = 0, other_ticks: int = 0) -> None:
        """``used``: process -> cores that it kept busy meanwhile, beginning with core number ``core``. ``other_ticks``: of interrupts, and
        stolen by the host, each second."""
        self.now_s += seconds
        for process, cores in used.items():
            self.used[process] = self.used.get(process, 0.0) + cores * seconds
            for i in range(self.cores):
                part = min(1.0, max(0.0, cores - i))
                self.busy[(core + i) % self.cores] += part * seconds
        nobody = round(other_ticks * self.now_s)
        lines = [f"cpu{i} {round(own * HZ)} 0 0 0 0 {nobody} {nobody} {nobody} 0 0" for i, own in enumerate(self.busy)]
        self.proc.mkdir(exist_ok=True)
        (self.proc / "stat").write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *lines, "intr 5 0", ""]))
        for process, own in self.used.items():
            folder = self.proc / str(process)
            folder.mkdir(exist_ok=True)
            flags = KERNEL_THREAD if process < OURS else 0
            children = round(self.ended.get(process, 0.0) * HZ)
            numbers = [1, 1, 1, 0, -1, flags, 0, 0, 0, 0, round(own * HZ), 0, children, 0, *[0] * 21, core, 0]
            (folder / "stat").write_text(f"{process} (a) name) S {' '.join(map(str, numbers))}\n")

    def end(self, process: int, parent: int | None = None) -> None:
        own = self.used.pop(process)
        if parent is not None:
            self.ended[parent] = self.ended.get(parent, 0.0) + own
        (self.proc / str(process) / "stat").unlink()
        (self.proc / str(process)).rmdir()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    found = Host(tmp_path / "proc")
    found.after(0, {OURS: 0, WORKER: 0, KERNEL: 0, OTHER: 0})
    return found


def _settled(host: Host, used: Mapping[int, float], cores: set[int], **more: int) -> float:
    """What is found once it has been so for some seconds."""
    load = Load(host.proc, lambda: host.now_s)
    for _ in range(12):
        host.after(0.5, used, **more)
        found = load.others([OURS, WORKER], cores)
    return found


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        ({OURS: 0.1, WORKER: 0.9}, 0),
        ({WORKER: 1.0, KERNEL: 0.8}, 0),
        ({WORKER: 1.0, OTHER: 0.8}, 0.8),
        ({OURS: 0.2, WORKER: 0.4, KERNEL: 0.4, OTHER: 0.6}, 0.6),
    ],
)
def test_others_are_neither_we_nor_the_kernel(host: Host, used: dict[int, float], expected: float) -> None:
    assert _settled(host, used, {0, 1}) == pytest.approx(expected, abs=0.01)


def test_interrupts_and_what_the_host_takes_are_nobody_s(host: Host) -> None:
    assert _settled(host, {WORKER: 1.0}, {0, 1}, other_ticks=HZ // 3) == 0


def test_only_our_cores_count(host: Host) -> None:
    assert _settled(host, {OTHER: 1.0}, {0}, core=1) == 0
    assert _settled(host, {OTHER: 1.0}, {1}, core=1) == pytest.approx(1, abs=0.01)


def test_ends_of_workers_and_of_kernel_threads_are_no_load(host: Host) -> None:
    load = Load(host.proc, lambda: host.now_s)
    load.others([OURS, WORKER], {0, 1})
    host.after(5, {WORKER: 1.0, KERNEL: 0.5, KERNEL + 1: 0.3})
    assert load.others([OURS, WORKER], {0, 1}) == 0
    host.end(WORKER, parent=OURS)
    host.end(KERNEL)
    host.after(1, {OURS: 0.2, KERNEL + 2: 0.2})
    assert load.others([OURS], {0, 1}) == pytest.approx(0, abs=0.02)


def test_limits_follow_load_within_two_looks_and_come_back_within_five(host: Host) -> None:
    """The manager asks twice a second."""
    load, manager = Load(host.proc, lambda: host.now_s), Manager()
    found = []
    for others in (*[0.0] * 3, *[2.0] * 6, *[0.0] * 6):
        host.after(0.5, {WORKER: 1.0, OTHER: others})
        sample = Sample(2, load.others([OURS, WORKER], {0, 1}), 2**36, 2**36, 2**40)
        found.append(manager.limits(INDEX, State({0: 50}, 1, 0, 0, 2**25), sample).tasks)
    assert found[:3] == [2, 2, 2]
    assert found[4:9] == [1] * 5
    assert found[13:] == [2, 2]


def test_below_a_quota_others_first_take_what_we_may_not_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path / "proc", cores=8)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 16 kB\nMemFree: 8 kB\nMemAvailable: 8 kB\n")
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/mounts").write_text("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("400000 100000\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    machine = Machine(tmp_path, tmp_path, clock=lambda: host.now_s)
    for cores, expected in ((3.0, 0.0), (6.0, 2.0)):
        for _ in range(12):
            host.after(0.5, {OTHER: cores})
            found = machine.sample(())
        assert found.cores == 4
        assert found.others == pytest.approx(expected, abs=0.05)
