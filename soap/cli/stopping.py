"""Ctrl-C and SIGTERM while there is something to save: the first one ends the work, and none ends the saving."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

GRACE_S = 2.0
"""A signal that follows the first one within this time is the same wish (an impatient second Ctrl-C)."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """Within this context both signals raise KeyboardInterrupt, but not while saving. ``number``: the first signal that came."""

    def __init__(self) -> None:
        self.number: int | None = None
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

    def go_on(self) -> None:
        """Forget the signal: it has ended what it was meant to end, and another signal may end what follows."""
        self.number = None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within this context, while files are written, signals are only remembered."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_s is not None and now - self._first_s < GRACE_S:
            return
        if self.number is None:
            self.number, self._first_s = number, now
        if not self._saving:
            raise KeyboardInterrupt
