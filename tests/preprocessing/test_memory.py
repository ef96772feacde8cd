"""Under a limit of memory in which every unit at once is killed, the adaptive run finishes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from soap.cli.preprocess import main

LIMIT_BYTES = 500_000_000
FIRST, SECOND = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
COMMAND = [sys.executable, "-m", "soap.cli.preprocess", "criteo-kaggle"]


@dataclass(frozen=True)
class Group:
    """A control group with little memory. ``peak``: the file that says the most it has held."""

    path: Path
    peak: Path


@pytest.fixture(params=[1, 2])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    """One of each version that this system has; both limit memory on none."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for control groups")
    if request.param == 1 and not (FIRST / "memory.limit_in_bytes").exists():
        pytest.skip("control groups of version 1 do not limit memory here")
    controllers = SECOND / "cgroup.controllers"
    if request.param == 2 and not (controllers.exists() and "memory" in controllers.read_text().split()):
        pytest.skip("control groups of version 2 do not limit memory here")
    name = f"soap-tests-{uuid4().hex[:8]}"
    if request.param == 1:
        own = Group(FIRST / name, FIRST / name / "memory.max_usage_in_bytes")
        limit = "memory.limit_in_bytes"
    else:
        (SECOND / "cgroup.subtree_control").write_text("+memory")
        own, limit = Group(SECOND / name, SECOND / name / "memory.peak"), "memory.max"
    own.path.mkdir()
    (own.path / limit).write_text(str(LIMIT_BYTES))
    if request.param == 2:
        (own.path / "memory.swap.max").write_text("0")
    yield own
    for _ in range(100):
        try:
            own.path.rmdir()
            return
        except OSError:
            time.sleep(0.1)


def _inside(group: Group, *argv: str) -> subprocess.CompletedProcess[str]:
    """The command in the group."""
    words = ["sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(group.path), *COMMAND, *argv]
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()})


@pytest.mark.long
def test_finishes_where_all_units_at_once_are_killed(tmp_path: Path, group: Group) -> None:
    raw = tmp_path / "raw"
    assert main(["--generate", "criteo-like", "--rows", "1600000", "--files", "4", "-o", str(raw), "--quiet"]) == 0
    common = [str(raw), "--no-parquet", "-o"]
    died = _inside(group, *common, str(tmp_path / "unit"), "--mode", "index=unit,convert=unit")
    assert died.returncode == 1
    assert "a process was killed, most likely because memory ran out" in died.stderr
    if group.path.parent == FIRST:  # in version 2 the peak is the group's for good: at most its limit anyway
        group.peak.write_text("0")
    done = _inside(group, *common, str(tmp_path / "adaptive"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 1_600_000
    assert not group.peak.exists() or int(group.peak.read_text()) <= LIMIT_BYTES
    log = [json.loads(line) for line in (tmp_path / "adaptive" / "decisions.jsonl").read_text().splitlines()]
    assert "lost" not in {entry["step"] for entry in log}
    assert all(entry["limit_bytes"] <= LIMIT_BYTES for entry in log)
