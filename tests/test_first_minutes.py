"""The page of a newcomer's first minutes: what it says of a command's output and times, and that no place of a machine is on it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import first_minutes
from benchmarks.first_minutes import MOST_LINES, STEPS, Outcome, Step, page, run, shown
from soap.errors import SoapError

WHEEL = Path("soap_search-0.2.0-py3-none-any.whl")


def test_a_command_is_run_in_its_folder_with_an_empty_home(tmp_path: Path) -> None:
    folder, home = tmp_path / "work", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    found = run(Step("", "echo {wheel}; pwd; echo $HOME; echo $PYTHONPATH."), WHEEL, folder, home)
    assert found.lines == (WHEEL.name, ".", "~", ".")
    assert found.seconds > 0
    busy = "import os, time; end = time.process_time() + 0.5; [time.process_time() for _ in iter(lambda: time.process_time() < end, False)]"
    assert 0.4 < run(Step("", f'{sys.executable} -c "{busy}"'), WHEEL, folder, home).processor_seconds < 5
    with pytest.raises(SoapError, match=r"^'echo no; exit 3' ended with 3: no"):
        run(Step("", "echo no; exit 3"), WHEEL, folder, home)


def test_long_outputs_keep_their_beginning_and_their_end() -> None:
    lines = tuple(f"line {i}" for i in range(500))
    text = shown(Outcome(Step("About.", "cat it"), lines, 12.34, 3.21), WHEEL)
    assert text[:4] == ["About.", "", "```text", "$ cat it"]
    assert text.index("line 0") == 4 and "line 499" in text and "..." in text and len(text) < MOST_LINES + 12
    assert text[-2] == "(12 s; 3.2 s of a core)"


def test_the_page_has_every_command() -> None:
    outcomes = [Outcome(step, ("done",), 1.0, 1.0) for step in STEPS]
    text = page(outcomes, WHEEL, 0.5)
    commands = [step.command.format(wheel=WHEEL.name) for step in STEPS]
    assert [line[2:] for line in text.splitlines() if line.startswith("$ ")] == commands
    assert "Other programs used 50% of the cores" in text
    for command in ("pip install", "soap-search", "soap-report", "soap-run"):
        assert any(command in step.command for step in STEPS), command
    assert max(map(len, text.splitlines())) <= first_minutes.WIDEST + 4
