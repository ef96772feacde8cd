"""A thread's processor time as it would be on a core that is always equally fast.

What a virtual machine calls a core is often half of one. While a neighbour computes on the other half, or fills the caches that both
use, everything here takes 10% to 30% longer, for milliseconds or for minutes (a product of matrices on a box with nothing else to do:
1.5 to 2.0 ms in the medians of following seconds). An emulated device must compute at an even rate, and what is measured of it today
must hold tomorrow.

So a fixed piece of work, the *reference work*, is timed now and then, on the thread itself and only while it computes: a timer that
runs with the thread's processor time sends a signal, whose handler takes the sample (``reference_kernel``). Processor time is
multiplied by the time that the reference work should take, divided by the time that it takes. Half of it is multiplications; half reads
memory outside of a core's own cache. On a box that was busy in this way products, convolutions, additions and tanh together varied by
9% from second to second, and by 3% when divided by it. It reads huge pages, since small ones would make it differ between processes.

Only on Linux. Elsewhere, and before ``start``, ``thread_time_ns`` is the thread's plain processor time.
"""

from __future__ import annotations

import atexit
import ctypes
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from soap.errors import RuntimeFailure

if TYPE_CHECKING:
    from soap.emulation.reference_kernel import ReferenceState

VERSION = 2
"""Version of the piece of work; since 2 its memory is in huge pages."""
INTERVAL_NS = 2_000_000
"""Processor time between two samples. Most kernels check at their next tick, which comes every 1 to 10 ms."""
REFERENCE_SECONDS, MOST_SECONDS = 0.5, 10.0
"""Processor time that is spent on samples, and at most spent where fewer than ``LEAST_SAMPLES`` came: a busy virtual machine's kernel
looks at timers less often."""
LEAST_SAMPLES = 20
SIGNAL_ABOVE_FIRST = 5
"""The timer's signal, counted from the first one without a meaning of its own (SIGRTMIN)."""
TO_THREAD = 4
"""SIGEV_THREAD_ID."""
SA_SIGINFO, SA_RESTART = 0x4, 0x10000000


class _Action(ctypes.Structure):
    """The C library's struct sigaction."""

    _fields_ = (("handler", ctypes.c_void_p), ("mask", ctypes.c_ulong * 16), ("flags", ctypes.c_int), ("restorer", ctypes.c_void_p))


class _Event(ctypes.Structure):
    """The kernel's struct sigevent."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("rest", ctypes.c_int * 11),
    )


class _ReferenceWork:
    """Takes samples of the calling thread, from now on until ``close``. ``reference_ns``: the time that the work should take; 0: the
    time of the first sample."""

    def __init__(self, reference_ns: float) -> None:
        from soap.emulation import reference_kernel as kernel

        self._kernel = kernel
        self.thread = threading.get_ident()
        self.state: ReferenceState = kernel.clear(_spare.pop() if _spare else kernel.new_memory())
        self._libc = ctypes.CDLL(None, use_errno=True)
        number = signal.SIGRTMIN + SIGNAL_ABOVE_FIRST
        action = _Action(kernel.sample.address, (ctypes.c_ulong * 16)(), SA_SIGINFO | SA_RESTART, None)
        event = _Event(self.state.ctypes.data, number, TO_THREAD, threading.get_native_id())
        self._timer = ctypes.c_void_p()
        interval = (ctypes.c_long * 4)(0, INTERVAL_NS, 0, INTERVAL_NS)
        self._call("sigaction", number, ctypes.byref(action), None)
        self._call("timer_create", kernel.THREAD_CLOCK, ctypes.byref(event), ctypes.byref(self._timer))
        self.state[kernel.REFERENCE_NS] = self.state[kernel.TAKES_NS] = reference_ns
        self.state[kernel.EVEN_NS] = self.state[kernel.MARK_NS] = time.thread_time_ns()
        self._call("timer_settime", self._timer, 0, ctypes.byref(interval), None)

    def close(self) -> None:
        """Stop taking samples."""
        self._call("timer_delete", self._timer)
        _spare.append(self.state)

    def even_ns(self) -> int:
        """The thread's even time."""
        kernel, state = self._kernel, self.state
        while True:
            count = state[kernel.COUNT]
            since, takes = time.thread_time_ns() - state[kernel.MARK_NS], state[kernel.TAKES_NS]
            even = state[kernel.EVEN_NS] + (since * state[kernel.REFERENCE_NS] / takes if takes > 0 else since)
            if state[kernel.COUNT] == count:  # otherwise a sample was taken meanwhile
                return int(even)

    def _call(self, name: str, *arguments: object) -> None:
        if getattr(self._libc, name)(*arguments):
            raise RuntimeFailure(f"{name}: error {ctypes.get_errno()}; expected that a thread may have a timer of its processor time")


_spare: list[ReferenceState] = []
"""Memory of closed states, for reuse. None is freed: when a timer is deleted, a signal may still be under way."""
_running: _ReferenceWork | None = None


def _own() -> _ReferenceWork | None:
    """The calling thread's state, if it has one."""
    return _running if _running is not None and _running.thread == threading.get_ident() else None


def start(reference_ns: float) -> None:
    """From now on the calling thread's time is even. ``reference_ns``: time of the reference work on a core as fast as it should be.
    For one thread of a process at a time. RuntimeFailure if the system refuses."""
    global _running
    if _own() is not None:
        return
    stop()
    _running = _ReferenceWork(reference_ns)


@atexit.register
def stop() -> None:
    """From now on the thread's time is its plain processor time again."""
    global _running
    ended, _running = _running, None
    if ended is not None:
        ended.close()


def reference_ns() -> float | None:
    """Time that the calling thread's reference work should take; None if the thread's time is not even."""
    own = _own()
    return None if own is None else float(own.state[own._kernel.REFERENCE_NS])


def thread_time_ns() -> int:
    """The calling thread's processor time, even if ``start`` was called. Only differences have a meaning."""
    own = _own()
    return time.thread_time_ns() if own is None else own.even_ns()


def measured_reference_ns() -> float | None:
    """Time of the reference work, sampled while the calling thread computes for half a second, or longer where samples are rare; None
    if the system has no such timers."""
    if sys.platform != "linux":
        return None
    import numpy as np

    work, numbers, found = _ReferenceWork(0.0), np.ones(1 << 19), list[float]()
    kernel, state = work._kernel, work.state
    try:
        began_s, count = time.thread_time(), 0.0
        while (spent_s := time.thread_time() - began_s) < MOST_SECONDS and (spent_s < REFERENCE_SECONDS or len(found) < LEAST_SAMPLES):
            numbers.sum()
            if state[kernel.COUNT] > count:
                count = state[kernel.COUNT]
                found.append(float(state[kernel.TAKES_NS]))
    finally:
        work.close()
    return float(np.median(found)) if len(found) >= LEAST_SAMPLES else None
