"""The clock of the calling thread's device: this machine's, unless another one is installed (``soap.emulation.placement``).

Code calls ``catch_up`` before it communicates, and ``resume`` after it has waited. So an emulated device can be slower than this machine's
cores. On the machine's own clock both do nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """This machine's clock; emulation overrides it."""

    def now_ns(self) -> int:
        """When the device has finished what the thread has computed, on the clock ``time.perf_counter_ns``: later than now by delays to
        come, earlier if others have had the core. Does not sleep: a core computes more slowly after that."""
        return time.perf_counter_ns()

    def busy_ns(self) -> int | None:
        """How long the device has computed; None if that is not counted."""
        return None

    def catch_up(self) -> None:
        """Called before anything that other ranks notice."""

    def resume(self) -> None:
        """Called after waiting for other ranks."""

    def go_on(self) -> None:
        """Do not count what the thread has done since it last caught up as work of its device."""


_clock = Clock()


def install(clock: Clock | None) -> None:
    """Make this the process's clock from now on; None: this machine's."""
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
    """Inside, work does not count as the device's: it takes as long as it takes on this machine."""
    own = _clock
    own.catch_up()
    install(None)
    try:
        yield
    finally:
        own.go_on()
        install(own)
