"""A processor that is slower than this one: what a process has computed takes effect as late as on a device with a part of a core.

A device of an emulated cluster computes at an even rate. A CPU quota alone does not: a process that has waited may use a whole period's
time at once, and one that has used it up stands still, messages or not. So a process keeps a clock of its own, at which its device is free:
its thread's processor time (even, where ``soap.yardstick`` makes it so), divided by the share, is added to it; and before it communicates,
which is when others can notice, it sleeps until then. Waiting for others adds nothing: a device that waits computes nothing. What it has
waited for it has as soon as it has come, even where another device's process has the core just then: a device's core is its own. Without
``set_share`` all of this does nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from soap import yardstick

LEAST_SLEEP_NS = 50_000
"""Less is not slept for at once, but with what follows."""


class Pace:
    """The clock of the calling thread. ``share``: cores that its device has, at most 1. ``busy_ns``: how long it has computed."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.busy_ns = self._used_ns = self._free_ns = self._queued_ns = 0
        self._statistics = _open_statistics()
        self.go_on()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._statistics is not None:
            close(self._statistics)  # when the program ends, ``os`` may be gone before

    def catch_up(self) -> None:
        """Return when the device would have come so far."""
        late_ns = self.free_ns() - time.perf_counter_ns()
        if late_ns >= LEAST_SLEEP_NS:
            time.sleep(late_ns / 1e9)
        self._queued_ns = self._queued()

    def free_ns(self) -> int:
        """When the device has computed what the thread has, by the clock ``time.perf_counter_ns``."""
        used = yardstick.thread_time_ns()
        computed_ns = int((used - self._used_ns) / self.share)
        self._used_ns = used
        self.busy_ns += computed_ns
        self._free_ns += computed_ns
        return self._free_ns

    def resume(self) -> None:
        """Something that the device has waited for has come: it goes on now, or when it has done what it had begun."""
        self._used_ns = yardstick.thread_time_ns()
        queued_ns = self._queued()
        self._free_ns = max(self._free_ns, time.perf_counter_ns() - (queued_ns - self._queued_ns))
        self._queued_ns = queued_ns

    def go_on(self) -> None:
        """The device is free from now on; what the thread has done since it last caught up was not its work."""
        self._used_ns, self._free_ns = yardstick.thread_time_ns(), time.perf_counter_ns()
        self._queued_ns = self._queued()

    def _queued(self) -> int:
        """For how long the thread could have run so far, but others had the cores; 0 where the kernel does not tell."""
        return 0 if self._statistics is None else int(os.pread(self._statistics, 100, 0).split()[1])


def _open_statistics() -> int | None:
    """Of the calling thread: what it has run for, what it was queued for, and how often, in ns."""
    with suppress(OSError):
        return os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    return None


_pace: Pace | None = None


def set_share(share: float | None) -> None:
    """From now on the calling thread is such a device; None: no longer."""
    global _pace
    _pace = None if share is None else Pace(share)


@contextmanager
def paused() -> Iterator[None]:
    """What the calling thread does within this context is no work of its device: it takes as long as it takes here."""
    global _pace
    own, _pace = _pace, None
    if own is not None:
        own.catch_up()
    try:
        yield
    finally:
        if own is not None:
            own.go_on()
        _pace = own


def busy_ns() -> int | None:
    """How long the calling thread's device has computed; None if it is no such device."""
    if _pace is None:
        return None
    _pace.catch_up()
    return _pace.busy_ns


def now_ns() -> int:
    """When the calling thread's device has computed what the thread has, by the clock ``time.perf_counter_ns``: later than now by what has
    not taken effect yet, earlier where others have had the core. Does not sleep: who has slept computes more slowly."""
    return time.perf_counter_ns() if _pace is None else _pace.free_ns()


def catch_up() -> None:
    """Before something that others notice."""
    if _pace is not None:
        _pace.catch_up()


def resume() -> None:
    """After waiting for others."""
    if _pace is not None:
        _pace.resume()
