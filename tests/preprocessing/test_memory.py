"""Under a limit of memory in which every unit at once is killed, the adaptive run finishes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from soap.cli.preprocess import main

LIMIT_BYTES = 500_000_000
GROUPS = Path("/sys/fs/cgroup/memory")
COMMAND = [sys.executable, "-m", "soap.cli.preprocess", "criteo-kaggle"]


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group (version 1) with little memory."""
    if os.geteuid() != 0 or not (GROUPS / "memory.limit_in_bytes").exists():
        pytest.skip("needs root, and control groups of version 1 that limit memory")
    own = GROUPS / f"soap-tests-{uuid4().hex[:8]}"
    own.mkdir()
    (own / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    yield own
    for _ in range(100):
        try:
            own.rmdir()
            return
        except OSError:
            time.sleep(0.1)


def _inside(group: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """The command in the group."""
    words = ["sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(group), *COMMAND, *argv]
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()})


@pytest.mark.long
def test_finishes_where_all_units_at_once_are_killed(tmp_path: Path, group: Path) -> None:
    raw = tmp_path / "raw"
    assert main(["--generate", "criteo-like", "--rows", "1600000", "--files", "4", "-o", str(raw), "--quiet"]) == 0
    common = [str(raw), "--no-parquet", "-o"]
    died = _inside(group, *common, str(tmp_path / "unit"), "--mode", "index=unit,convert=unit")
    assert died.returncode == 1
    assert "a process was killed, most likely because memory ran out" in died.stderr
    (group / "memory.max_usage_in_bytes").write_text("0")
    done = _inside(group, *common, str(tmp_path / "adaptive"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 1_600_000
    assert int((group / "memory.max_usage_in_bytes").read_text()) <= LIMIT_BYTES
    log = [json.loads(line) for line in (tmp_path / "adaptive" / "decisions.jsonl").read_text().splitlines()]
    assert "lost" not in {entry["step"] for entry in log}
    assert all(entry["limit_bytes"] <= LIMIT_BYTES for entry in log)
