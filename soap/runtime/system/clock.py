"""The clock of the calling thread's device: this machine's, unless somebody has installed another (``soap.emulation.virtual_clock``).

Whoever communicates calls ``catch_up`` before and ``resume`` after having waited, so that a device that is slower than this machine's
cores can be slower; on the machine's own clock both do nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """This machine's."""

    def now_ns(self) -> int:
        """When the device has computed what the thread has, by the clock ``time.perf_counter_ns``: later than now by what has not taken
        effect yet, earlier where others have had the core. Does not sleep: who has slept computes more slowly."""
        return time.perf_counter_ns()

    def busy_ns(self) -> int | None:
        """How long the device has computed; None where nobody counts."""
        return None

    def catch_up(self) -> None:
        """Before something that others notice."""

    def resume(self) -> None:
        """After waiting for others."""

    def go_on(self) -> None:
        """What the thread has done since it last caught up was not its device's work."""


_clock = Clock()


def install(clock: Clock | None) -> None:
    """From now on this is the process's clock; None: this machine's."""
    global _clock
    _clock = Clock() if clock is None else clock


def now_ns() -> int:
    """See ``Clock``."""
    return _clock.now_ns()


def busy_ns() -> int | None:
    """See ``Clock``."""
    return _clock.busy_ns()


def catch_up() -> None:
    """See ``Clock``."""
    _clock.catch_up()


def resume() -> None:
    """See ``Clock``."""
    _clock.resume()


@contextmanager
def paused() -> Iterator[None]:
    """What is done within this context is no work of the device: it takes as long as it takes here."""
    own = _clock
    own.catch_up()
    install(None)
    try:
        yield
    finally:
        own.go_on()
        install(own)
