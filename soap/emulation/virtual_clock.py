"""A processor that is slower than this one: the results of a process take effect as late as on a device with a part of a core.

A device of an emulated cluster computes at an even rate. A CPU quota alone does not give that: a process that has waited may use a
whole period's time at once, and one that has used it up stands still, messages or not. So a process keeps a clock of its own, at which
its device is free. Its thread's processor time (even, if ``reference_work`` makes it so), divided by the share, is added to the clock.
Before the process communicates, which is when others can notice, it sleeps until then. Waiting for others adds nothing: a device that
waits computes nothing. What a device has waited for is there as soon as it has come, even if another device's process has the core at
that moment: a device's core is its own.

Without ``set_share`` all of this does nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

from soap.emulation import reference_work
from soap.runtime.system import clock
from soap.runtime.system.clock import Clock

LEAST_SLEEP_NS = 50_000
"""Shorter sleeps are not made at once, but together with later ones."""


class VirtualClock(Clock):
    """``share``: cores that the device has, at most 1."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._busy_ns = self._used_ns = self._free_ns = self._queued_ns = 0
        self._statistics = _open_statistics()
        self.go_on()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._statistics is not None:
            close(self._statistics)  # when the program ends, ``os`` may be gone before

    def catch_up(self) -> None:
        """Return when the device would have come so far."""
        late_ns = self.now_ns() - time.perf_counter_ns()
        if late_ns >= LEAST_SLEEP_NS:
            time.sleep(late_ns / 1e9)
        self._queued_ns = self._queued()

    def now_ns(self) -> int:
        """See ``Clock``."""
        used = reference_work.thread_time_ns()
        computed_ns = int((used - self._used_ns) / self.share)
        self._used_ns = used
        self._busy_ns += computed_ns
        self._free_ns += computed_ns
        return self._free_ns

    def busy_ns(self) -> int:
        """How long the device has computed."""
        self.catch_up()
        return self._busy_ns

    def resume(self) -> None:
        """What the device has waited for has come. It goes on now, or when it has finished what it had begun."""
        self._used_ns = reference_work.thread_time_ns()
        queued_ns = self._queued()
        self._free_ns = max(self._free_ns, time.perf_counter_ns() - (queued_ns - self._queued_ns))
        self._queued_ns = queued_ns

    def go_on(self) -> None:
        """The device is free from now on."""
        self._used_ns, self._free_ns = reference_work.thread_time_ns(), time.perf_counter_ns()
        self._queued_ns = self._queued()

    def not_before(self, free_ns: int) -> None:
        """The device was not free before this time, on the clock ``time.perf_counter_ns``: it computed for another thread."""
        self._free_ns = max(self._free_ns, free_ns)

    def _queued(self) -> int:
        """For how long the thread could have run so far, but others had the cores; 0 if the kernel does not tell."""
        return 0 if self._statistics is None else int(os.pread(self._statistics, 100, 0).split()[1])


def _open_statistics() -> int | None:
    """Figures of the calling thread: run time, time in the queue, and how often it was queued, in ns."""
    with suppress(OSError):
        return os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    return None


def set_share(share: float | None) -> None:
    """From now on the calling thread is such a device; None: no longer."""
    clock.install(None if share is None else VirtualClock(share))
