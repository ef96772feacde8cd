"""Ctrl-C, SIGTERM and time limits while there is something to save: the first one ends the work, and none ends the saving."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from soap.cli.command import Parser
from soap.cli.options import positive_number
from soap.time_limit import TimeIsUp, TimeLimit, held_back

Result = TypeVar("Result")

GRACE_S = 2.0
"""A signal that follows the first one within this time is the same wish (an impatient second Ctrl-C)."""
FINISH_S = 1.0
LATE_S = 3.0
"""Seconds after a signal, and after the end of a time limit, in which what was found may still be worked up (``in_time``)."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def add_time_limit(parser: Parser, what: str, *also: str) -> None:
    """``--time-limit SECONDS``, for the whole command. ``what``: what is done when the time is over. ``also``: older names of it."""
    text = f"end everything but writing so many seconds after the command was started: {what} (results may then differ)"
    parser.add_argument("--time-limit", *also, metavar="SECONDS", dest="time_limit", type=positive_number, help=text)


class Stopping:
    """Within this context both signals raise KeyboardInterrupt, but not while saving. ``number``: the first signal that came.
    ``limit``: the command's time limit, which the command itself is within."""

    def __init__(self, limit: TimeLimit | None = None) -> None:
        self.number: int | None = None
        self.limit = limit or TimeLimit()
        self._first_s: float | None = None
        self._saving = False
        self._before: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """128 + the signal: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + (self.number or signal.SIGINT)

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():  # only the main thread may handle signals
            self._before = {number: signal.getsignal(number) for number in SIGNALS}
            for number, handler in self._before.items():
                if handler is not signal.SIG_IGN:  # what our caller ignores (nohup, a background job) stays ignored
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    @property
    def is_terminated(self) -> bool:
        """Whether it was SIGTERM."""
        return self.number == signal.SIGTERM

    @property
    def ended(self) -> bool:
        """Whether a signal or the time limit has ended the work."""
        return self.number is not None or self.limit.over

    def go_on(self) -> None:
        """Forget the signal: it has ended what it was meant to end, and another signal may end what follows."""
        self.number = None

    def heard(self, error: BaseException) -> None:
        """Note what has ended work that takes signals itself (``launch``)."""
        if not isinstance(error, TimeIsUp):
            self.number = self.number or getattr(error, "number", signal.SIGINT)
            self._first_s = self._first_s or time.monotonic()

    def in_time(self, *ways: Callable[[], Result]) -> Result:
        """The result of the first of these ways, the best one first, that is done before the work is ended or a moment later; the last
        one's, which must be quick, if none is."""
        for way in ways[:-1]:
            try:
                with TimeLimit(self._moment_s()):
                    return way()
            except KeyboardInterrupt:
                continue
        return ways[-1]()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within this context, while files are written, signals are only remembered."""
        self._saving = True
        try:
            with held_back():
                yield
        finally:
            self._saving = False

    def _moment_s(self) -> float | None:
        """Seconds that are left for working up what was found; None if the work was not ended."""
        if self.number is not None and self._first_s is not None:
            return self._first_s + FINISH_S - time.monotonic()
        return self.limit.left_s + LATE_S if self.limit.over else None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_s is not None and now - self._first_s < GRACE_S:
            return
        if self.number is None:
            self.number, self._first_s = number, now
        if not self._saving:
            raise KeyboardInterrupt
