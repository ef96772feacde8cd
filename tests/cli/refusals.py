"""What every command does with bad input: one line, an exit code, nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def assert_refused(
    capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int], command: list[str], code: int, *words: str
) -> None:
    """The command ends with this code and one line that has these words, and prints nothing else."""
    try:
        ended = main(command)
    except SystemExit as ending:  # argparse
        assert isinstance(ending.code, int)
        ended = ending.code
    captured = capsys.readouterr()
    assert ended == code, captured.err
    assert captured.out == ""
    assert captured.err.startswith("soap-")
    assert ": error: " in captured.err
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    for word in words:
        assert word in captured.err
