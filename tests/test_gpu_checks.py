"""The checks that need a GPU, tried without one: each gives values, a table, and a result that is not measured twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu import tables
from benchmarks.gpu.__main__ import FOLDER, main
from benchmarks.gpu.checks import CHECKS
from benchmarks.gpu.kernels import PART

DRY = ("--device", "cpu", "--tiny")


def dry(folder: Path, *words: str) -> int:
    return main([*DRY, "--folder", str(folder), *words])


@pytest.mark.long
def test_updates_are_timed_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert dry(tmp_path, "--only", "updates") == 0
    (file,) = tmp_path.iterdir()
    result = json.loads(file.read_text())
    assert (result["device"], result["tiny"]) == ("cpu", True)
    assert {row["way"] for row in result["values"]} == {"loop", "foreach", "fused"}
    assert all(row["ns"] >= row["launched_ns"] > 0 for row in result["values"])
    capfd.readouterr()
    assert dry(tmp_path, "--only", "updates") == 0
    assert capfd.readouterr().out == "updates: has a result\n"
    assert main(["--folder", str(tmp_path), "--tables"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("### Updates: cpu, torch") and len(lines) == 4 + len(result["values"]) // 3


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in CHECKS if name not in ("updates", "suites")])
def test_each_check_runs(tmp_path: Path, name: str) -> None:
    assert dry(tmp_path, "--only", name) == 0
    result = json.loads((tmp_path / f"{name}.json").read_text())
    assert result["values"]
    assert all(row["kind"] == PART for row in result["values"] if "error" in row)  # processors have no such product
    assert tables.tables([result]).count("\n") >= 4


@pytest.mark.long
def test_what_fails_leaves_no_result(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # no GPU anywhere
    assert main(["--folder", str(tmp_path), "--only", "updates"]) == 1
    assert not list(tmp_path.iterdir())
    assert "updates: " in capfd.readouterr().out


def test_stored_results_are_of_checks_that_exist() -> None:
    names = {path.stem for path in FOLDER.glob("*.json")}
    measured = {name for name in names if not name.startswith("profile-")}
    assert measured and measured <= CHECKS.keys()
    table = tables.tables([json.loads((FOLDER / f"{name}.json").read_text()) for name in sorted(measured)])
    assert "NVIDIA H200" in table
