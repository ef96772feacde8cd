"""Under a limit of memory in which every unit at once is killed, the adaptive run finishes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from soap.cli.preprocess import main
from tests.control_groups import FIRST, VERSIONS, Group, limited

LIMIT_BYTES = 500_000_000
COMMAND = [sys.executable, "-m", "soap.cli.preprocess", "criteo-kaggle"]


@pytest.fixture(params=VERSIONS)
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    """One of each version that this system has."""
    with limited(LIMIT_BYTES, request.param) as own:
        yield own


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
