"""CPU quotas: figures, and where control groups of both versions are found and written."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.emulation import quota
from soap.emulation.quota import CpuGroups, find_cpu_groups, quota_us
from soap.errors import RuntimeFailure


@given(st.floats(0.001, 1024))
def test_quota_is_the_share_and_the_kernel_takes_it(cores: float) -> None:
    allowed, period = quota_us(cores)
    assert allowed >= 1000 and 1000 <= period <= 1_000_000
    assert allowed / period == pytest.approx(cores, rel=1e-3)


@pytest.mark.parametrize(("cores", "expected"), [(0.5, (5000, 10000)), (2.0, (20000, 10000)), (0.05, (1000, 20000))])
def test_quotas(cores: float, expected: tuple[int, int]) -> None:
    assert quota_us(cores) == expected


def found(folder: Path, *lines: str) -> CpuGroups | None:
    (folder / "mounts").write_text("proc /proc proc rw 0 0\n" + "".join(f"{line}\n" for line in lines))
    return find_cpu_groups(folder / "mounts")


def test_finds_version_1(tmp_path: Path) -> None:
    lines = [f"cgroup {tmp_path}/cpuset cgroup rw,cpuset 0 0", f"cgroup {tmp_path}/cpu\\040time cgroup rw,cpu,cpuacct 0 0"]
    assert found(tmp_path, *lines) == CpuGroups(tmp_path / "cpu time", False)


@pytest.mark.parametrize(("controllers", "usable"), [("cpuset cpu io\n", True), ("cpuset hugetlb\n", False), (None, False)])
def test_finds_version_2_where_it_limits_cpus(tmp_path: Path, controllers: str | None, usable: bool) -> None:
    if controllers is not None:
        (tmp_path / "cgroup.controllers").write_text(controllers)
    assert found(tmp_path, f"cgroup2 {tmp_path} cgroup2 rw 0 0") == (CpuGroups(tmp_path, True) if usable else None)


def test_writes_version_2(tmp_path: Path) -> None:
    quota.build(CpuGroups(tmp_path, True), 7, [0.5, 0.25])
    group = tmp_path / "soap-emulation-7"
    assert (tmp_path / "cgroup.subtree_control").read_text() == (group / "cgroup.subtree_control").read_text() == "+cpu"
    assert all((group / name / "cgroup.type").read_text() == "threaded" for name in ("rank0", "rank1", "communication"))
    assert not (group / "communication" / "cpu.max").exists()
    assert [(group / f"rank{i}" / "cpu.max").read_text() for i in (0, 1)] == ["5000 10000", "2500 10000"]


def test_writes_version_1(tmp_path: Path) -> None:
    quota.build(CpuGroups(tmp_path, False), 7, [1.5])
    group = tmp_path / "soap-emulation-7" / "rank0"
    assert sorted((path.name, path.read_text()) for path in group.iterdir()) == [
        ("cpu.cfs_period_us", "10000"),
        ("cpu.cfs_quota_us", "15000"),
    ]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match=r"^--emulate: CPU quota in .*soap-emulation-7: No such file or directory; expected that root"):
        quota.build(CpuGroups(tmp_path / "gone", False), 7, [1.0])


def test_nothing_to_remove(tmp_path: Path) -> None:
    assert quota.remove(CpuGroups(tmp_path, False), 7) == []
