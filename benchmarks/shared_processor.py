"""An emulated device on which several threads of a process compute in turn, as a server's threads do, and a worker's beside them.

A device does one thing at a time. Whoever has it computes to the end, at the device's even rate (``virtual_clock``); what is computed takes
effect, and the next one has the device, when a device with such a share of a core would have come so far. Communication holds no device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from soap.emulation.placement import VirtualClock
from soap.runtime.system.clock import Clock


class _OwnClock(VirtualClock):
    def not_before(self, free_ns: int) -> None:
        """The device was not free before this time, on the clock ``time.perf_counter_ns``: it computed for another thread."""
        self._free_ns = max(self._free_ns, free_ns)


class SharedProcessor:
    """``share``: cores that the device has, at most 1. ``busy_ns``: how long it has computed for all threads."""

    def __init__(self, share: float) -> None:
        self.share, self.busy_ns = share, 0
        self._lock, self._clocks = threading.Lock(), threading.local()
        self._free_ns = 0

    def take(self) -> None:
        """Wait for the device; the calling thread has it from then on."""
        self._lock.acquire()
        clock = self._clock()
        clock.resume()
        clock.not_before(self._free_ns)
        self._before_ns = clock.busy_ns()

    def give(self) -> None:
        """Return when the device has computed what the thread has; the next one has it then."""
        clock = self._clock()
        self.busy_ns += clock.busy_ns() - self._before_ns
        self._free_ns = clock.now_ns()
        self._lock.release()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Within this context the thread has the device."""
        self.take()
        try:
            yield
        finally:
            self.give()

    def _clock(self) -> _OwnClock:
        """The calling thread's: processor time is counted by thread."""
        found: _OwnClock | None = getattr(self._clocks, "own", None)
        if found is None:
            found = self._clocks.own = _OwnClock(self.share)
        return found


class InTurn(Clock):
    """The clock of a thread that has the device except while it communicates (``soap.runtime.system.clock.install``)."""

    def __init__(self, processor: SharedProcessor) -> None:
        self._processor = processor

    def catch_up(self) -> None:
        """Give the device to others while the thread communicates."""
        self._processor.give()

    def resume(self) -> None:
        """Take it again."""
        self._processor.take()
