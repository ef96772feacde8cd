"""``--log`` of ``soap-run``: where each step's metrics go, a file of lines or a logger of the user's."""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from soap import outputs
from soap.cli.command import Parser
from soap.cli.named_calls import imported
from soap.errors import SoapError
from soap.files import read_text, reason, write_text_atomically

if TYPE_CHECKING:
    from soap.runtime.training_options import OnStep, StepMetrics  # imports torch

CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def add_log(parser: Parser) -> None:
    """The option."""
    help_text = (
        "write each step's number, loss, seconds, learning rates and gradient norm into this file, a line of JSON each; or, as "
        "PKG.MOD:CALLABLE, call this once on rank 0: it returns a function that is given each step's soap.StepMetrics"
    )
    kind = replace(outputs.LOG, is_path=lambda value: not CALLABLE.fullmatch(value))
    parser.add_output("--log", kind=kind, help=help_text)


def logger(spec: str, *, after: int) -> OnStep:
    """A function that takes each step's metrics; asked for on rank 0, before the first step. ``after``: the step from whose checkpoint
    training goes on, and so does a file that is there; 0: it is written over."""
    if not CALLABLE.fullmatch(spec):
        return Lines(spec, after=after)
    made = imported(spec, "--log", "returns a function of metrics")()
    if not callable(made):
        raise SoapError(f"--log {spec}: it returned {type(made).__name__}; expected a function that takes soap.StepMetrics")
    found: OnStep = made
    return found


class Lines:
    """Appends a line of JSON for each step, which is with the operating system at once. Lines of a file that is there are kept up to step
    ``after``: a run that was ended has gone on beyond its checkpoint, and those steps are done again. SoapError in one line, which names
    the file, if it cannot be written."""

    def __init__(self, path: str, *, after: int) -> None:
        self._path = path
        there = read_text(path, what="log") if after and Path(path).exists() else ""
        write_text_atomically(path, "".join(line for line in there.splitlines(keepends=True) if 0 < _step(line) <= after))

    def __call__(self, metrics: StepMetrics) -> None:
        """Write the step's line, or nothing of it."""
        line = f"{json.dumps(asdict(metrics))}\n".encode("ascii")
        try:
            with open(self._path, "ab", buffering=0) as stream:
                begin = stream.seek(0, os.SEEK_END)
                if stream.write(line) != len(line):  # the disk was full in the middle
                    stream.truncate(begin)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as cause:
            remedy = "make room, and go on from the last checkpoint by --resume, if there is one (--save-every)"
            raise SoapError(f"cannot write log {self._path!r} of step {metrics.step}: {reason(cause)}; {remedy}") from None


def _step(line: str) -> int:
    """The step that a whole line is of; 0 if it is none."""
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else 0
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0
