"""What all commands share: one place that turns every failure into one line and an exit code."""

from __future__ import annotations

import argparse
import atexit
import errno
import gc
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import NoReturn

from soap.errors import INTERRUPTED_EXIT_CODE, ScheduleError, SoapError
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
  130 interrupted (Ctrl-C); soap-search saves first, on SIGTERM too (143)
"""


class UsageError(SoapError):
    """Options that are valid by themselves but not together."""

    exit_code = USAGE_EXIT_CODE


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and whose help keeps the line breaks of its example.

    ``failure_code``: the exit code for any error, for a command whose other exit codes are answers (then ``exit_codes`` explains them).
    """

    def __init__(
        self, prog: str, description: str, example: str, *, exit_codes: str = EXIT_CODES, failure_code: int | None = None
    ) -> None:
        self.failure_code = failure_code
        epilog = f"example:\n  {example}\n\n{exit_codes}"
        super().__init__(
            prog=prog, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with the code for usage errors."""
        self.exit(USAGE_EXIT_CODE, f"{self.prog}: error: {one_line(message)} ({self.prog} --help shows the options)\n")


def run_command(parser: Parser, execute: Callable[[argparse.Namespace], int], argv: Sequence[str] | None) -> int:
    """Parse, execute, and return an exit code whatever happens. ``args.limit`` is the command's ``TimeLimit``, of ``--time-limit`` if it
    has that option: from the start of this process, or, if it was called with ``argv``, from now."""
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


def _execute(parser: Parser, execute: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    other = parser.failure_code or OTHER_EXIT_CODE
    try:
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
    except KeyboardInterrupt:
        note(parser.prog, "interrupted")
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        _drop_output()  # the reader of our output has what it wanted (``| head``)
        return other
    except OSError as error:  # a failure of standard output, or a bug: errors of files are caught where they are written
        if error.errno not in FULL:
            return _fail(parser.prog, _unexpected(error), other)
        reason = (error.strerror or str(error)).lower()
        return _fail(parser.prog, f"cannot write to standard output: {reason}; redirect it elsewhere", other)
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
