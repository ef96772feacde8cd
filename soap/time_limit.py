"""Times after which work ends. In the main thread SIGALRM then raises ``TimeIsUp``, wherever Python is; other threads ask (``over``)."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from types import FrameType

SOON_S = 0.001
"""After so long a limit rings that was over when it was entered, or while limits were held back."""

_entered: list[TimeLimit] = []
"""Limits of the main thread that have not rung yet."""
_holds = 0


class TimeIsUp(KeyboardInterrupt):
    """A limit is over. It ends work as Ctrl-C does: what handles errors alone lets it pass."""


class TimeLimit:
    """Within this context ``TimeIsUp`` is raised once, when the time is over, if this is the main thread and nobody else uses SIGALRM.

    Limits may be within each other. None is raised within ``held_back``, while files are written. A single call of compiled code ends
    before anything is raised.
    """

    def __init__(self, seconds: float | None = None, *, since_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """``seconds`` None: there is no limit. ``since_s``: by the clock, from when they count; None: from now."""
        self._clock = clock
        self._end_s = inf if seconds is None else (clock() if since_s is None else since_s) + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left: infinite without a limit, below 0 if the time is over."""
        return self._end_s - self._clock()

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return self.left_s <= 0

    def part(self, share: float) -> TimeLimit:
        """A limit of its own, after this share of the time that is left."""
        return TimeLimit(self.seconds(share), clock=self._clock)

    def seconds(self, share: float = 1.0, most_s: float = inf) -> float | None:
        """This share of the time that is left, at least next to nothing, at most ``most_s``; None if there is no limit."""
        left_s = min(share * self.left_s, most_s)
        return None if left_s == inf else max(SOON_S, left_s)

    def __enter__(self) -> TimeLimit:
        mine = signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, _ring)
        if self._end_s < inf and mine and _is_main():
            signal.signal(signal.SIGALRM, _ring)
            _entered.append(self)
            _arm()
        return self

    def __exit__(self, *_: object) -> None:
        if self in _entered:
            _entered.remove(self)
            _arm()


@contextmanager
def held_back() -> Iterator[None]:
    """Within this context no limit of the main thread raises; at its end ``TimeIsUp`` is raised if one is over, unless another error is."""
    global _holds
    if not _is_main():
        yield
        return
    _holds += 1
    try:
        yield
    except BaseException:
        _holds -= 1
        _arm()
        raise
    _holds -= 1
    heed()


def left_s() -> float:
    """Seconds until the next limit is over that this thread is within, infinite if there is none."""
    return min((limit.left_s for limit in _entered), default=inf) if _is_main() else inf


def heed() -> None:
    """Raise ``TimeIsUp`` if a limit is over that this thread is within, and has not raised it yet."""
    over = [limit for limit in _entered if limit.over] if _is_main() and not _holds else []
    for limit in over:
        _entered.remove(limit)
    _arm()
    if over:
        raise TimeIsUp


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _arm() -> None:
    """Ring when the next limit is over. The handler stays: without one, a signal that is under way would end the process."""
    if signal.getsignal(signal.SIGALRM) is not _ring or not _is_main():
        return
    after_s = left_s()
    signal.setitimer(signal.ITIMER_REAL, 0.0 if after_s == inf or _holds else max(SOON_S, after_s))


def _ring(number: int, frame: FrameType | None) -> None:
    heed()
