"""Where commands begin: Ctrl-C and SIGTERM end them in one line even while their modules are imported, which takes a second."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import FrameType

from soap.errors import Terminated, interrupted_code


def __getattr__(name: str) -> Callable[[], int]:
    """The function that runs the command of this name, for ``[project.scripts]``."""
    if name.startswith("_"):
        raise AttributeError(name)
    return partial(_run, name)


def _run(name: str) -> int:
    if "RANK" not in os.environ and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # a rank may wait where nothing is heard
        signal.signal(signal.SIGTERM, _terminate)
    try:
        main: Callable[[], int] = import_module(f"soap.cli.{name}").main
    except KeyboardInterrupt as error:
        print(f"soap-{name.replace('_', '-')}: interrupted", file=sys.stderr)
        return interrupted_code(error)
    return main()


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated
