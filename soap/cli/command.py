"""What all commands share: one place that turns every failure into one line and an exit code."""

from __future__ import annotations

import argparse
import atexit
import errno
import gc
import io
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

from soap import collector, outputs
from soap.errors import ScheduleError, SoapError, did_you_mean, interrupted_code, options_of
from soap.files import check_writable, reason
from soap.logs import NATIVE_LOG_LEVEL
from soap.time_limit import TimeIsUp, TimeLimit

atexit.register(gc.freeze)
"""What is there when the process ends need not be looked through for garbage: that took a search a fifth of a second, with torch one."""

USAGE_EXIT_CODE = 2
OTHER_EXIT_CODE = 1
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)
"""Errors of a stream that accepts no more output."""

EXIT_CODES = """exit codes:
  0 success            3 model             6 profile
  1 any other error    4 cluster           7 nothing fits into memory
  2 usage              5 strategy          8 run failed, or --check did not hold
  130 interrupted (Ctrl-C), 143 by SIGTERM; soap-search saves first
"""

OPTIONS = {
    "pins": "--pin", "forbidden": "--forbid", "syncs": "--sync", "budget": "--budget", "beta": "--beta", "confidence": "--confidence",
    "seconds": "--time-limit", "memory_budget": "--memory-budget", "imports": "--import", "device": "--device", "dtype": "--dtype",
    "strategy": "--builtin", "starts": "--start", "backend": "--backend", "verify=False": "--no-verify", "sum_dtype": "--sum-dtype",
}  # fmt: skip
"""Fields that messages name -> the options that set them."""


class UsageError(SoapError):
    """Options that are valid by themselves but not together."""

    exit_code = USAGE_EXIT_CODE


def refuse_given(args: argparse.Namespace, names: Iterable[str], said: str) -> None:
    """UsageError for the first of these options, by their names in ``args``, that was given: it, and what is ``said`` of it."""
    if (option := next((f"--{name.replace('_', '-')}" for name in names if getattr(args, name, None)), None)) is not None:
        raise UsageError(f"{option} {said}")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and whose help keeps the line breaks of its example.

    ``failure_code``: the exit code for any error, for a command whose other exit codes are answers (then ``exit_codes`` explains them).
    """

    def __init__(
        self, prog: str, description: str, example: str, *, exit_codes: str = EXIT_CODES, failure_code: int | None = None
    ) -> None:
        self.failure_code = failure_code
        self.outputs: dict[argparse.Action, outputs.Kind] = {}
        epilog = f"example:\n  {example}\n\n{exit_codes}"
        super().__init__(
            prog=prog, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )

    def add_output(self, *names: str, kind: outputs.Kind, **settings: Any) -> None:
        """Add an option, or an argument, that says where a file or folder of this kind goes, see ``check_outputs``."""
        settings.setdefault("metavar", "DIR" if kind.is_folder else "FILE")
        self.outputs[self.add_argument(*names, **settings)] = kind

    def add_repeatable(self, name: str, **settings: Any) -> None:
        """Add an option that may be given several times; its value is a list, empty by default."""
        self.add_argument(name, action="append", default=[], **settings)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with the code for usage errors."""
        if found := re.search(r"unrecognized arguments: (--[\w-]+)", message):
            message += did_you_mean(found[1], [name for name in self._option_string_actions if name.startswith("--")])
        elif found := re.search(r"invalid choice: '(.+)' \(choose from (.+)\)", message):
            message += did_you_mean(found[1], re.findall(r"[\w.-]+", found[2]))
        self.exit(USAGE_EXIT_CODE, f"{self.prog}: error: {one_line(message)} ({self.prog} --help shows the options)\n")


def entry_point(make_parser: Callable[[], Parser], execute: Callable[[argparse.Namespace], int]) -> Callable[..., int]:
    """A command's ``main``, which takes the arguments, or None for those of the process. The parser is made when it is called."""

    def main(argv: Sequence[str] | None = None) -> int:
        return run_command(make_parser(), execute, argv)

    return main


def run_command(parser: Parser, execute: Callable[[argparse.Namespace], int], argv: Sequence[str] | None) -> int:
    """Parse, execute, and return an exit code whatever happens. ``args.limit`` is the command's ``TimeLimit``, of ``--time-limit`` if it
    has that option: from the start of this process, or, if it was called with ``argv``, from now."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # letters that the terminal's encoding lacks are no reason to fail
        sys.stdout.reconfigure(errors="backslashreplace")
    with options_of(OPTIONS), collector.seldom():
        return _run_command(parser, execute, argv)


def _run_command(parser: Parser, execute: Callable[[argparse.Namespace], int], argv: Sequence[str] | None) -> int:
    began_s = time.monotonic() - (_age_s() if argv is None else 0.0)
    args = parser.parse_args(argv)
    args.limit = TimeLimit(getattr(args, "time_limit", None), since_s=began_s)
    os.environ.setdefault(NATIVE_LOG_LEVEL, "ERROR")  # read by torch, which is loaded later
    if sys.stdout is None:  # standard output is closed (``>&-``); a file that is opened next could even take its place
        missing = "standard output is closed; expected a place for the result: redirect it, to /dev/null if need be"
        return _fail(parser.prog, missing, parser.failure_code or OTHER_EXIT_CODE)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: note(parser.prog, f"warning: {one_line(str(message))}")
        code = _execute(parser, execute, args)
        _settle_output()
        # CPython remembers an interrupt that came within ``exec`` of a text, caught or not, and ends ``python -m`` by SIGINT for it.
        exec("")  # forgets it
        return code


def check_outputs(parser: Parser, args: argparse.Namespace) -> None:
    """Raise in one line, before anything is done, if a file that the command is to write cannot be written, if it is an input or another
    output, or if something else is there, see ``outputs.check``. Every other argument that is the name of a file counts as an input."""
    taken = {}
    for action in parser._actions:
        if action not in parser.outputs:
            values = getattr(args, action.dest, None)
            for value in values if isinstance(values, list) else [values]:
                if isinstance(value, str) and os.path.isfile(value):
                    taken[os.path.realpath(value)] = _name(action)
    for action, kind in parser.outputs.items():
        path = getattr(args, action.dest)
        if not path or not kind.is_path(path):
            continue
        if not kind.is_folder and (other := taken.setdefault(os.path.realpath(path), _name(action))) != _name(action):
            option = _name(action)
            raise UsageError(f"{option} {path!r} is the same file as {other}, and would overwrite it; choose another path for {option}")
        outputs.check(path, kind, _name(action), error=UsageError)
        if not kind.is_folder and os.environ.get("RANK", "0") == "0":  # under torchrun, rank 0 alone writes
            check_writable(path)


def _name(action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest
    return action.option_strings[-1] if action.option_strings else metavar


def _execute(parser: Parser, execute: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    other = parser.failure_code or OTHER_EXIT_CODE
    try:
        check_outputs(parser, args)
        with args.limit, _measuring_again(getattr(args, "measure_again", False)):
            code = execute(args)
        sys.stdout.flush()
        return code
    except SoapError as error:
        code = _fail(parser.prog, one_line(str(error)), parser.failure_code or error.exit_code)
        if isinstance(error, ScheduleError) and error.grid:
            _say(error.grid)
        return code
    except TimeIsUp:
        early = f"the {args.time_limit:g} s of --time-limit were over before there was anything to show; expected more, or a smaller model"
        return _fail(parser.prog, early, other)
    except KeyboardInterrupt as error:
        note(parser.prog, "interrupted")
        return interrupted_code(error)
    except BrokenPipeError:
        _drop_output()  # the reader of our output has what it wanted (``| head``)
        return other
    except OSError as error:  # a failure of standard output, or a bug: errors of files are caught where they are written
        if error.filename is not None:
            said = f"{error.filename!r} cannot be read or written: {reason(error)}; check the path, and whether there is room"
            return _fail(parser.prog, said, other)
        if error.errno not in FULL:
            return _fail(parser.prog, _unexpected(error), other)
        return _fail(parser.prog, f"cannot write to standard output: {reason(error)}; redirect it elsewhere", other)
    except Exception as error:  # a bug, here or in a library: still one line
        return _fail(parser.prog, _unexpected(error), other)


def _measuring_again(wanted: bool) -> AbstractContextManager[None]:
    if not wanted:
        return nullcontext()
    from soap.measure.machine_cache import measuring_again

    return measuring_again()


def _age_s() -> float:
    """Seconds since this process began, where the system tells."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, AttributeError, IndexError):
        return 0.0


def _unexpected(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(str(error))} (SOAP_DEBUG=1 shows the traceback)"


def one_line(text: str) -> str:
    """The text without line breaks."""
    return " ".join(text.split())


def note(prog: str, text: str) -> None:
    """Print a line for people on standard error; standard output is for the result."""
    _say(f"{prog}: {text}")


def _fail(prog: str, message: str, code: int) -> int:
    if os.environ.get("SOAP_DEBUG"):
        traceback.print_exc()
    _say(f"{prog}: error: {message}")
    return code


def _say(line: str) -> None:
    if sys.stderr is not None:
        with suppress(OSError):
            print(line, file=sys.stderr)


def _settle_output() -> None:
    """Flush now, so that the interpreter does not complain at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
