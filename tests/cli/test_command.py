"""The one place where failures become a line and an exit code."""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import pytest

from soap.cli import schedule, start
from soap.cli.command import Parser, one_line, run_command
from soap.errors import (
    InfeasibleError,
    ModelError,
    ProfileError,
    RuntimeFailure,
    SoapError,
    StrategyError,
    Terminated,
    TopologyError,
)
from soap.logs import NATIVE_LOG_LEVEL

ROOT = Path(__file__).parent.parent.parent


def _parser() -> Parser:
    parser = Parser("soap-test", "Tests.", "soap-test --count 3")
    parser.add_argument("--count", type=int, default=1)
    return parser


def _raise(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def execute(args: argparse.Namespace) -> int:
        raise error

    return execute


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SoapError, 1),
        (ModelError, 3),
        (TopologyError, 4),
        (StrategyError, 5),
        (ProfileError, 6),
        (InfeasibleError, 7),
        (RuntimeFailure, 8),
    ],
)
def test_each_error_has_its_exit_code(error: type[SoapError], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(_parser(), _raise(error("7 is wrong; expected 8:\n  add 1")), []) == code
    captured = capsys.readouterr()
    assert captured.err == "soap-test: error: 7 is wrong; expected 8: add 1\n"
    assert captured.out == ""


def test_success_is_what_the_command_answers() -> None:
    assert run_command(_parser(), lambda args: args.count - 3, ["--count", "3"]) == 0


def test_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(_parser(), _raise(KeyboardInterrupt()), []) == 130
    assert capsys.readouterr().err == "soap-test: interrupted\n"


INTERRUPTED = """
import sys
from soap.cli import schedule
from soap.cli.command import Parser, run_command

def stop():
    raise KeyboardInterrupt

def execute(args):
    exec("stop()", {"stop": stop})

sys.exit(run_command(Parser("soap-test", "Tests.", "soap-test"), execute, []))
"""


def test_interrupt_within_generated_code(tmp_path: Path) -> None:
    """Dataclasses and traced graphs are made by ``exec``, and an interrupt within it is special to the interpreter."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    done = subprocess.run([sys.executable, "-m", "interrupted"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "soap-test: interrupted\n")


def test_a_bug_is_one_line_with_a_hint(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOAP_DEBUG", raising=False)
    assert run_command(_parser(), _raise(ValueError("odd\nthing")), []) == 1
    assert capsys.readouterr().err == "soap-test: error: ValueError: odd thing (SOAP_DEBUG=1 shows the traceback)\n"


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOAP_DEBUG", "1")
    assert run_command(_parser(), _raise(ModelError("no")), []) == 3
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):")


@pytest.mark.parametrize("arguments", [["--count", "x"], ["--cuont", "1"], ["--coun", "1"], ["extra"]])
def test_usage_errors_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(_parser(), lambda args: 0, arguments)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("soap-test: error: ")
    assert err.endswith("(soap-test --help shows the options)\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["compare", "diff", "preprocess", "profile", "run", "schedule", "search", "simulate", "tune"])
def test_every_option_has_a_help_that_can_be_printed(name: str) -> None:
    parser = import_module(f"soap.cli.{name}").make_parser()
    shown = [own.option_strings[0] for own in parser._actions if own.option_strings and own.help != argparse.SUPPRESS]
    assert shown and all(option in parser.format_help() for option in shown)


def test_help_has_example_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(_parser(), lambda args: 0, ["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "example:\n  soap-test --count 3\n" in out
    assert "130 interrupted" in out


def test_reader_that_left_is_met_in_silence() -> None:
    program = """
import sys
from soap.cli import schedule
from soap.cli.command import Parser, run_command
def execute(args):
    for _ in range(100000):
        print("a line of output")
    return 0
sys.exit(run_command(Parser("soap-test", "", ""), execute, []))
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_the_end_of_a_process_looks_for_no_garbage() -> None:
    program = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 1000)); import soap.cli.command"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_names_of_any_letters_are_printed_in_any_encoding(encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("\u00fc.csv", "\u65e5.csv", "\udcff.csv"):
        Path(name).write_text("0F0,0B0\r\n")
        for command in (["--check", name], ["--check", name, "--json"]):
            stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
            monkeypatch.setattr(sys, "stdout", stream)
            assert schedule.main(command) == 0
            assert b".csv" in stream.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_help_is_printed_where_letters_are_few() -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "soap.cli.preprocess", "--help"]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"STEP=MODE,\\u2026" in done.stdout


def test_an_error_of_a_file_is_not_taken_for_one_of_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "here/x.json")
    assert run_command(_parser(), _raise(error), []) == 1
    said = "'here/x.json' cannot be read or written: no space left on device; check the path, and whether there is room"
    assert capsys.readouterr().err == f"soap-test: error: {said}\n"


def test_one_line() -> None:
    assert one_line(" a\n  b\tc ") == "a b c"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
@pytest.mark.parametrize(("redirection", "words"), [(">/dev/full", "no space left"), (">&-", "standard output is closed")])
def test_standard_output_full_or_closed_is_one_line(redirection: str, words: str) -> None:
    program = "import sys; from soap.cli.command import *; sys.exit(run_command(Parser('soap-test', '', ''), lambda _: print(1) or 0, []))"
    done = subprocess.run(f'"{sys.executable}" -c "{program}" {redirection}', shell=True, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("soap-test: error: ") and words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.long
def test_warnings_of_native_code_stay_off_standard_error(tmp_path: Path) -> None:
    """torch warns of this model's LSTM with projections when it is traced."""
    arguments = ["zoo:lm1b:tiny", "--cluster", "p100-4x4", "--budget", "5", "-o", str(tmp_path / "s.json")]
    environment = {name: value for name, value in os.environ.items() if name != NATIVE_LOG_LEVEL}
    command = [sys.executable, "-m", "soap.cli.search", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_a_signal_while_modules_are_imported_ends_a_command_in_one_line(
    error: type[KeyboardInterrupt], code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str) -> NoReturn:
        assert name == "soap.cli.export_plan" and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        raise error

    monkeypatch.setattr(start, "import_module", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert start.export_plan() == code
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "soap-export-plan: interrupted\n"


def test_sigterm_ends_a_command_as_ctrl_c_does(tmp_path: Path) -> None:
    (tmp_path / "soap_waits.py").write_text(
        "import os, signal\nfrom soap.cli import start\nfrom soap.cli.command import Parser, entry_point\n"
        "def execute(args):\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "start.import_module = lambda name: type('Module', (), {'main': entry_point(lambda: Parser('soap-test', '', ''), execute)})\n"
        "raise SystemExit(start.test())\n"
    )
    done = subprocess.run([sys.executable, str(tmp_path / "soap_waits.py")], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "soap-test: interrupted\n")
