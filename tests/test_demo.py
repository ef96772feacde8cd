"""``make demo`` on a small model: real commands, real processes; and what its summary says of good and bad numbers."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import soap
from examples import demo, language_model
from examples.summary import summary, verdict

ROOT = Path(__file__).parent.parent
SMALL = ["--processes", "2", "--budget", "20", "--steps", "4", "--vocabulary", "4000", "--width", "128"]

REPORT: dict[str, Any] = {
    "model": "model.pt2",
    "cluster": "local:2",
    "processes": 2,
    "backend": "gloo",
    "steps": 4,
    "strategies": {
        "strategy": {
            "predicted_ns": 40_000_000,
            "measured_ns": 50_000_000,
            "steps_ns": [48_000_000, 52_000_000],
            "losses": [9.5, 9.0, 8.5, 8.25],
        },
        "data_parallel": {
            "predicted_ns": 80_000_000,
            "measured_ns": 90_000_000,
            "steps_ns": [85_000_000, 95_000_000],
            "losses": [9.5, 9.0, 8.5, 8.25],
        },
    },
    "check": {
        "steps": 2,
        "compared": 46,
        "tolerance": 1e-4,
        "worst": {"step": 1, "kind": "gradient of", "name": "lstm.weight", "error": 5e-7},
        "passed": True,
    },
}


def measured(found_ns: int, usual_ns: int) -> dict[str, Any]:
    """The report with other measured times."""
    report = copy.deepcopy(REPORT)
    report["strategies"]["strategy"]["measured_ns"] = found_ns
    report["strategies"]["data_parallel"]["measured_ns"] = usual_ns
    return report


def test_data_parallelism_itself_is_said_and_listed_once() -> None:
    """The kept plan may be it; then it is trained once, and nothing is measured under its other name."""
    report = copy.deepcopy(REPORT)
    report["strategies"]["data_parallel"] |= {"measured_ns": None, "steps_ns": None, "losses": None}
    assert verdict(report).startswith("The plan that is kept is data parallelism: none is surely faster here.")
    assert verdict(report) in (said := summary(report, "a machine", [])) and said.count("| strategy |") == 1
    assert "| data_parallel |" not in said


def test_text_to_train_on_is_the_same_on_all_ranks() -> None:
    first, second = language_model.batches(), language_model.batches()
    for _ in range(3):
        (words, next_words), (others, _) = next(first), next(second)
        assert words.equal(others)
        assert words.shape == next_words.shape == (language_model.BATCH, language_model.LENGTH)
        assert words[:, 1:].equal(next_words[:, :-1])
        assert 0 <= int(words.min()) <= int(words.max()) < language_model.FREQUENT_WORDS


@pytest.mark.long
def test_demo_on_a_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    output = tmp_path / "out"
    assert demo.main([*SMALL, "--output", str(output)]) == 0
    said = capfd.readouterr().out
    others = {"strategy.fastest.json", "strategy.safe.json"}  # one of them is there if the kept plan is not the only one
    assert {path.name for path in output.iterdir()} - others == set(demo.RESULTS)
    # Every command is shown before it runs, and what soap-search finds after it.
    lines = [line for line in said.splitlines() if line.startswith("$ ")]
    assert len(lines) == 3
    assert "examples.language_model" in lines[0]
    assert "--cluster local:2" in lines[1]
    assert "--check --compare-data-parallel" in lines[2]
    assert said.index(lines[1]) < said.index("speed-up over it") < said.index(lines[2])
    # Results belong together.
    report = json.loads((output / "run.json").read_text())
    assert report["check"]["passed"]
    assert len(report["strategies"]["strategy"]["losses"]) == 4
    written = (output / "summary.md").read_text()
    assert verdict(report) in written
    assert verdict(report) in said
    model, cluster = soap.load(output / "model.pt2", plan_only=True), soap.load_cluster("local:2")
    strategy = soap.load_strategy(output / "strategy.json", model, cluster)
    assert soap.simulate(model, cluster, strategy).makespan_ns == report["strategies"]["strategy"]["predicted_ns"]
    _expect_side_by_side(json.loads((output / "timeline.json").read_text())["traceEvents"])


def _expect_side_by_side(events: list[dict[str, Any]]) -> None:
    """Two processes in the trace, with the same computations under the same names."""
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(processes.values()) == ["measured", "predicted"]
    computed = {
        name: sorted(e["name"] for e in events if e["pid"] == pid and e["ph"] == "X" and e["cat"] in ("forward", "backward"))
        for pid, name in processes.items()
    }
    assert computed["predicted"] == computed["measured"] != []


def test_stops_at_the_first_command_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    failing = demo.Step("fails", [sys.executable, "-c", "raise SystemExit(7)"])
    monkeypatch.setattr(demo, "steps", lambda args: [failing, demo.Step("never", ["no-such-program"])])
    (tmp_path / "run.json").write_text("{}")  # of an earlier run
    assert demo.main(["--output", str(tmp_path)]) == 7
    captured = capfd.readouterr()
    assert captured.err == "demo: the last command ended with exit code 7\n"
    assert "never" not in captured.out
    assert not (tmp_path / "run.json").exists()
    assert not (tmp_path / "summary.md").exists()


def test_unusable_output_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert demo.main(["--output", str(tmp_path / "file")]) == 1
    assert re.fullmatch(r"demo: error: .*\n", capsys.readouterr().err)


def test_commands_are_the_installed_scripts_if_there_are_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    assert demo.program("soap-run") == [".venv/bin/python", "-m", "soap.cli.run"]
    (folder / "soap-run").touch()
    assert demo.program("soap-run") == [".venv/bin/soap-run"]
