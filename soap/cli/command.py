"""What all commands share around their work: one place that turns what can go wrong into one line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

from soap.errors import INTERRUPTED_EXIT_CODE, SoapError

USAGE_EXIT_CODE = 2
OTHER_EXIT_CODE = 1

EXIT_CODES = """exit codes:
  0 success            3 model             6 profile
  1 any other error    4 cluster           7 nothing fits into memory
  2 usage              5 strategy          8 run failed, or --check did not hold
  130 interrupted (Ctrl-C)
"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and whose help keeps the line breaks of its example."""

    def __init__(self, prog: str, description: str, example: str) -> None:
        epilog = f"example:\n  {example}\n\n{EXIT_CODES}"
        super().__init__(
            prog=prog, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with the code for usage errors."""
        self.exit(USAGE_EXIT_CODE, f"{self.prog}: error: {one_line(message)} ({self.prog} --help shows the options)\n")


def run_command(parser: Parser, execute: Callable[[argparse.Namespace], int], argv: Sequence[str] | None) -> int:
    """Parse, execute, and answer with an exit code whatever happens."""
    args = parser.parse_args(argv)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: note(parser.prog, f"warning: {one_line(str(message))}")
        return _execute(parser, execute, args)


def _execute(parser: Parser, execute: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    try:
        code = execute(args)
        sys.stdout.flush()
        return code
    except SoapError as error:
        return _fail(parser.prog, one_line(str(error)), error.exit_code)
    except KeyboardInterrupt:
        note(parser.prog, "interrupted")
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        return _reader_left()
    except Exception as error:  # a bug, or a failure of something below: still one line
        return _fail(parser.prog, f"{type(error).__name__}: {one_line(str(error))} (SOAP_DEBUG=1 shows the traceback)", OTHER_EXIT_CODE)


def one_line(text: str) -> str:
    """The text without line breaks."""
    return " ".join(text.split())


def note(prog: str, text: str) -> None:
    """Tell people something without touching standard output, which belongs to the result."""
    print(f"{prog}: {text}", file=sys.stderr)


def _fail(prog: str, message: str, code: int) -> int:
    if os.environ.get("SOAP_DEBUG"):
        traceback.print_exc()
    print(f"{prog}: error: {message}", file=sys.stderr)
    return code


def _reader_left() -> int:
    # Whoever read our output has what they wanted (``| head``); the interpreter must not complain when it flushes at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OTHER_EXIT_CODE
