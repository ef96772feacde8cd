"""``--log`` of ``soap-run``: where each step's metrics go, a file of lines or a logger of the user's."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

from soap import outputs
from soap.cli.command import Parser
from soap.cli.imported import imported
from soap.errors import SoapError
from soap.runtime.step_metrics import OnStep, StepMetrics

CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def add_log(parser: Parser) -> None:
    """The option."""
    help_text = (
        "write each step's number, loss, seconds, learning rates and gradient norm into this file, a line of JSON each; or, as "
        "PKG.MOD:CALLABLE, call this once on rank 0: it returns a function that is given each step's soap.StepMetrics"
    )
    kind = replace(outputs.LOG, is_path=lambda value: not CALLABLE.fullmatch(value))
    parser.add_output("--log", kind=kind, help=help_text)


def logger(spec: str, *, anew: bool) -> OnStep:
    """What takes each step's metrics; asked for on rank 0, before the first step. ``anew``: a file that is there is written over; else
    training goes on, and so does the file."""
    if not CALLABLE.fullmatch(spec):
        return Lines(spec, anew=anew)
    made = imported(spec, "--log", "returns a function of metrics")()
    if not callable(made):
        raise SoapError(f"--log {spec}: it returned {type(made).__name__}; expected a function that takes soap.StepMetrics")
    found: OnStep = made
    return found


class Lines:
    """Appends a line of JSON for each step, which is with the operating system at once. A step that is done again, because a rank was lost,
    has a further line: the last one counts."""

    def __init__(self, path: str, *, anew: bool) -> None:
        self._path = path
        if anew:
            Path(path).write_text("", encoding="utf-8")

    def __call__(self, metrics: StepMetrics) -> None:
        """Write the step's line."""
        with open(self._path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(metrics)) + "\n")
