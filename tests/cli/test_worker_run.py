"""Virtual workers by commands: searched, simulated, trained, gone on with; what does not apply is said in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soap.cli import diff, run, search, simulate

MODEL = "zoo:alexnet:tiny@8"


def of(command: Any, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The command's document."""
    assert command.main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(command: Any, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The command's one line."""
    assert command.main([*words]) != 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.mark.long
def test_searched_simulated_trained_and_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, kept = str(tmp_path / "workers.json"), str(tmp_path / "kept")
    found = of(search, capsys, MODEL, "--cluster", "local:2", "--consistency", "bounded:1", "--workers", "any", "-o", plan)
    assert sum(map(len, found["workers"])) == 2 and found["steady"]["samples_per_second"] > 0
    assert found["allocation"] in found["allocations"]
    given = of(simulate, capsys, MODEL, "--cluster", "local:2", "--strategy", plan)
    assert given["workers"] == found["workers"] and given["steady"] == found["steady"]
    common = (plan, "--model", MODEL, "--cluster", "local:2")
    first = of(run, capsys, *common, "--steps", "5", "--save", kept)
    assert all(len(own["losses"]) == 5 for own in first["workers"])
    again = of(run, capsys, *common, "--steps", "4", "--resume", kept)
    assert again["resumed_at"] == 5 and json.loads(Path(kept, "workers.json").read_text())["finished"] == 9
    assert sum(again["staleness"].values()) == 4 * len(again["workers"])
    assert "--check is not for virtual workers" in refused(run, capsys, *common, "--check")
    assert "optimizer Adam under virtual workers; expected SGD" in refused(run, capsys, *common, "--optimizer", "adam")
    assert "--timeline with a stale strategy" in refused(
        simulate, capsys, MODEL, "--cluster", "local:2", "--strategy", plan, "--timeline", str(tmp_path / "t.json")
    )
    assert diff.main([plan, plan]) == 0 and "the strategies are equal" in capsys.readouterr().out
    written, other = json.loads(Path(plan).read_text()), tmp_path / "other.json"
    in_flight = written["workers"]["in_flight"]
    written["workers"]["in_flight"] = in_flight % 2 + 1  # another number from 1 on
    other.write_text(json.dumps(written))
    assert diff.main([plan, str(other)]) == 1
    shown = capsys.readouterr().out
    assert f"{in_flight} minibatches in flight" in shown and f"{in_flight % 2 + 1} minibatches in flight" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--workers", "ED"), "--workers ED without --consistency, how far they may be apart"),
        (("--workers", "ED", "--consistency", "sync"), "consistency sync with virtual workers; expected bounded:D"),
        (("--workers", "ED", "--consistency", "bounded:-1"), "'bounded:-1' is not allowed"),
        (("--workers", "HD", "--consistency", "bounded:1"), "HD on 1 hosts with 2 devices; expected two hosts at least"),
        (("--workers", "NP", "--consistency", "bounded:1", "--memory-budget", "10KiB"), "fits no stages into memory"),
    ],
)
def test_what_cannot_be_searched(words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        line = refused(search, capsys, MODEL, "--cluster", "local:2", "-o", str(tmp_path / "s.json"), *words)
    except SystemExit:
        line = capsys.readouterr().err
    assert message in line
