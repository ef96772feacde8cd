from __future__ import annotations

import json
from pathlib import Path

import pytest

from soap.cli.schedule import main
from soap.schedules import csv_file
from soap.schedules.named import parse
from tests.cli.refusals import assert_refused

SHAPE = ["--stages", "2", "--microbatches", "2"]
DEADLOCK = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"


def test_prints_grid_bubble_and_what_is_in_flight(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["1f1b", *SHAPE, "--times", "1,1,1"]) == 0
    assert capsys.readouterr().out == (
        "1f1b: 2 stages, 2 chunks, 2 micro-batches\n"
        "a step takes 9, stages are idle for 33.3% of it\n"
        "\n"
        "stage 0 0F0 0F1 .   .   0B0 -   .   0B1 -\n"
        "stage 1 .   1F0 1B0 -   1F1 1B1 -   .   .\n"
        "\n"
        "           chunks  busy  idle  in flight\n"
        "  stage 0       0     6     3          2\n"
        "  stage 1       1     6     3          1\n"
    )


def test_times_and_messages(capsys: pytest.CaptureFixture[str]) -> None:
    """Cells are as long as what all times are multiples of."""
    assert main(["zb-h1", *SHAPE, "--times", "20,20,10", "--message", "10"]) == 0
    out = capsys.readouterr().out
    assert "stage 0 0F0 -   0F1 -   .   .   .   .   0I0 -   0W0 .   0I1 -   0W1\n" in out
    assert "awaiting weights" in out and "a step takes 150" in out


def test_a_long_grid_is_continued_below(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpipe", "--stages", "2", "--microbatches", "30"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 140
    shown = [line for line in out.splitlines() if line.startswith("stage 0")]
    assert len(shown) == 4 and " ".join(shown).count("0F") == 30


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["1f1b", "--stages", "64", "--microbatches", "64"], "too large to print"),
        (["gpipe", "--stages", "2", "--microbatches", "2", "--times", "0,0,0"], "empty, as nothing takes time"),
    ],
)
def test_says_why_there_is_no_grid(command: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 0
    assert f"the grid is {why}; --csv writes the table, --json prints it" in capsys.readouterr().out


def test_what_takes_no_time_has_no_column(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpipe", "--stages", "1", "--microbatches", "2", "--times", "0,1,0"]) == 0
    assert "\nstage 0 0B0 0B1\n" in capsys.readouterr().out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["interleaved:2", *SHAPE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    actions = found.pop("actions")
    assert [[one["action"] for one in row] for row in actions] == [list(map(str, row)) for row in parse("interleaved:2").table(2, 2).stages]
    assert actions[1][0] == {"action": "1F0", "start": 1, "end": 2}
    assert found == {
        "schedule": "interleaved:2", "stages": 2, "chunks": 4, "microbatches": 2, "placement": [0, 1, 0, 1], "makespan": 15,
        "bubble": 0.2, "busy": [12, 12], "idle": [3, 3], "in_flight": [4, 3], "awaiting_weights": [0, 0],
    }  # fmt: skip


def test_writes_and_checks_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "table.csv")
    assert main(["zb-h1", *SHAPE, "--csv", path]) == 0
    written = capsys.readouterr().out
    assert csv_file.load(path) == parse("zb-h1").table(2, 2)
    assert main(["--check", path]) == 0
    assert capsys.readouterr().out == written.replace("zb-h1", path)


def test_shows_the_cell_at_fault_below_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "table.csv"
    path.write_text(DEADLOCK)
    other = tmp_path / "other.csv"
    assert main(["--check", str(path), "--csv", str(other)]) == 5
    captured = capsys.readouterr()
    first, *grid = captured.err.splitlines()
    assert first.startswith("soap-schedule: error: stages wait for each other for ever: 0B0 (stage 0, position 1) waits for 1B0")
    assert grid == ["stage 0  0F0  >0B0<  0F1   0B1", "stage 1  1F0   1F1   1B0   1B1"]
    assert captured.out == "" and not other.exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], ["expected SCHEDULE or --check FILE, such as: soap-schedule 1f1b"]),
        (["1f1b"], ["1f1b without --stages", "--stages S --microbatches M"]),
        (["1f1b", "--stages", "2"], ["1f1b without --microbatches"]),
        (["2f2b", *SHAPE], ["no schedule is named '2f2b'", "gpipe"]),
        (["interleaved", *SHAPE], ["expected interleaved:N"]),
        (["1f1b", "--stages", "0", "--microbatches", "2"], ["--stages", "'0'"]),
        (["1f1b", *SHAPE, "--times", "1,2"], ["'1,2' is not allowed; expected F,I,W, such as 2,2,1"]),
        (["1f1b", *SHAPE, "--times", "1,2,x"], ["'x'"]),
        (["1f1b", *SHAPE, "--times", "1,2,-3"], ["'-3'"]),
        (["1f1b", *SHAPE, "--message", "9" * 20], ["9" * 20]),
        (["1f1b", "--check", "a.csv"], ["leave out SCHEDULE"]),
        (["--check", "a.csv", "--stages", "2"], ["leave out SCHEDULE"]),
    ],
)
def test_usage_errors(command: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, main, command, 2, *words)


def test_errors_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing, wrong = str(tmp_path / "missing.csv"), tmp_path / "wrong.csv"
    wrong.write_bytes(b"\xff")
    assert_refused(capsys, main, ["--check", missing], 5, "cannot be read: no such file or directory")
    assert_refused(capsys, main, ["--check", str(wrong)], 5, "is no UTF-8 text")
    wrong.write_text("0F0,0B0,hello")
    assert_refused(capsys, main, ["--check", str(wrong)], 5, "row 1, column 3: 'hello' is no action")
    assert_refused(capsys, main, ["--check", str(wrong), "--csv", str(wrong)], 2, "is the same file as --check")
    assert_refused(capsys, main, ["1f1b", *SHAPE, "--csv", str(tmp_path / "no" / "table.csv")], 1, "folder", "does not exist")


def test_too_many_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, main, ["1f1b", "--stages", "5000", "--microbatches", "2"], 5, "5000 stages; expected 1 to 4096")
    many = ["gpipe:1000", "--stages", "100", "--microbatches", "2"]
    assert_refused(capsys, main, many, 5, "1000 chunks on each stage; expected 1 to 655")
