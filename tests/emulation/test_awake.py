"""Processes that keep cores awake: where they are, that nobody waits for them, and that they end with who has started them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from soap.emulation import awake, quota
from soap.emulation.awake import kept_awake
from soap.emulation.cores import usable_cores
from soap.emulation.emulate import emulated
from soap.emulation.hosts import host_limits
from soap.emulation.quota import CpuGroups
from soap.presets import preset

PATIENCE_S = 10.0
SMALL = host_limits(preset("emulated:4x1"), 0.1, 1)
"""Of one core it needs less than a tenth."""


def eventually(holds: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + PATIENCE_S
    while not holds() and time.monotonic() < end_s:
        time.sleep(0.01)
    return holds()


def is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_small_emulations_keep_their_cores_awake(groups: CpuGroups) -> None:
    if len(usable_cores()) < 2:
        pytest.skip("one core: none for communication alone")
    with emulated(SMALL) as emulation:
        idle = groups.idle_group(emulation.number)
        if not idle.exists():
            pytest.skip("this kernel has no idle control groups")
        cores = (*emulation.place.cores[0], *emulation.place.communication_cores)
        assert len(cores) == 2 and eventually(lambda: len(members(idle)) == 2)
        assert eventually(lambda: all(os.sched_getscheduler(one) == os.SCHED_IDLE for one in members(idle)))
        assert sorted(map(tuple, map(os.sched_getaffinity, members(idle)))) == sorted((core,) for core in cores)
        assert (idle / "cpu.idle").read_text().strip() == "1"
        wakers = members(idle)
    assert all(is_gone(waker) for waker in wakers)


def test_emulations_that_need_all_cores_keep_none_awake(groups: CpuGroups) -> None:
    with emulated(host_limits(preset("emulated:4x1"), 1.0, len(usable_cores()))) as emulation:
        assert emulation.place.communication_cores == () and quota.processes(groups, emulation.number) == []


def members(group: Path) -> list[int]:
    return [int(line) for line in (group / "cgroup.procs").read_text().split()]


def test_without_an_idle_group_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with kept_awake(usable_cores(), None):
        pass


def test_they_end_with_who_has_started_them(tmp_path: Path) -> None:
    group = tmp_path / "group"
    group.mkdir()
    program = (
        "import time; from pathlib import Path; from soap.emulation.awake import kept_awake\n"
        f"with kept_awake([{usable_cores()[0]}], Path({str(group)!r})): time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as starter:
        assert eventually((group / "cgroup.procs").exists) and eventually(lambda: bool((group / "cgroup.procs").read_text()))
        (waker,) = members(group)
        assert not is_gone(waker)
        starter.kill()
        starter.wait(PATIENCE_S)
        assert eventually(lambda: is_gone(waker))


def test_one_that_comes_too_late_ends_at_once(tmp_path: Path) -> None:
    core = str(usable_cores()[0])
    for words in ([core, str(tmp_path / "gone"), str(os.getpid())], [core, str(tmp_path), "1"]):
        assert subprocess.run([sys.executable, awake.__file__, *words], timeout=PATIENCE_S).returncode == 0
