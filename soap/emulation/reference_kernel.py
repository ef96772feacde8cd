"""The reference work itself: a fixed piece of work, timed in a signal's handler. It is compiled, because Python would run its own
handler too late.

A thread's state is one array of numbers, to which the timer's signal points. The handler runs between two instructions of the thread,
so it calls nothing that allocates memory or takes a lock.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import numpy as np
from numba import (  # type: ignore[attr-defined]  # carray is public, though its package does not say so
    carray,
    cfunc,
    njit,
    types,
)
from numba.extending import intrinsic

ReferenceState = np.ndarray[tuple[int], np.dtype[np.float64]]

EVEN_NS, MARK_NS, TAKES_NS, REFERENCE_NS, COUNT, SPENT_NS, PLACE, SUM, CLOCK = range(9)
"""Places in a state: the even time up to the last sample; the processor time at its end; the time of the reference work, smoothed, and
the time that it should take; the number of samples and their total time; where the next sample reads; a result to compute; and two
numbers of a clock."""
HEAD = 16
NEAR, FAR = 1024, 1 << 18
"""Count of numbers that stay in the first cache, and of those behind them that do not stay in the second."""
ROUNDS, STRETCH = 720, 4096
"""How often a sample goes over the near numbers, and how many of the far ones it reads; both take about equally long."""
HUGE_BYTES = 1 << 21
SMOOTHING = 0.1
"""Weight of the newest sample."""
MOST = 2.0
"""A sample counts as at most so many times the usual time: it may have been interrupted."""
THREAD_CLOCK = 3
"""CLOCK_THREAD_CPUTIME_ID."""
VALUE = 3
"""Where a siginfo_t has the timer's pointer, in units of eight bytes."""

_clock_gettime: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.CPointer(types.int64)))


def _cast(result: Any) -> Any:
    """An intrinsic that makes an address a pointer to numbers of this type."""

    @intrinsic
    def cast(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, chosen: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(chosen.return_type))

        return types.CPointer(result)(types.int64), generate

    return cast


_reals, _integers = _cast(types.float64), _cast(types.int64)


def new_memory() -> ReferenceState:
    """Memory for a state. It is in huge pages, if the system has them. Small pages differ between processes, and with them the time of
    the reference work (steps of a model took 0.87 to 0.98 times their processor time in five processes, and 1.03 to 1.07 times in huge
    pages)."""
    size = 8 * (HEAD + NEAR + FAR)
    memory = mmap.mmap(-1, size + 2 * HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.float64)
    begin = -whole.ctypes.data % HUGE_BYTES // 8
    return whole[begin : begin + size // 8]


def clear(state: ReferenceState) -> ReferenceState:
    """A state before a thread's first sample. Its numbers are ordinary ones, which no processor treats specially."""
    state[:] = 1
    state[:HEAD] = 0
    return state


@njit(cache=True)
def _now_ns(address):  # type: ignore[no-untyped-def]
    clock = _integers(address + 8 * CLOCK)
    _clock_gettime(THREAD_CLOCK, clock)
    parts = carray(clock, 2)
    return parts[0] * 1e9 + parts[1]


@njit(cache=True, fastmath=True)
def _near(state, rounds):  # type: ignore[no-untyped-def]
    total = 0.0
    half = NEAR // 2
    for _ in range(rounds):
        for i in range(half):
            total += state[HEAD + i] * state[HEAD + half + i]
    return total


@njit(cache=True, fastmath=True)
def _far(state, place):  # type: ignore[no-untyped-def]
    total = 0.0
    for i in range(STRETCH):
        total += state[HEAD + NEAR + place + i]
    return total


@cfunc(types.void(types.int32, types.CPointer(types.int64), types.voidptr), cache=True)
def sample(_signal, info, _context):  # type: ignore[no-untyped-def]
    """A signal's handler (SA_SIGINFO): scales what was computed since the last sample by that sample's time, and takes another one."""
    address = carray(info, VALUE + 1)[VALUE]
    state = carray(_reals(address), HEAD + NEAR + FAR)
    began = _now_ns(address)
    if state[TAKES_NS] > 0:  # otherwise nothing is known yet
        state[EVEN_NS] += (began - state[MARK_NS]) * state[REFERENCE_NS] / state[TAKES_NS]
    state[SUM] = _near(state, 1)  # brings it into the cache
    start = _now_ns(address)
    place = int(state[PLACE])
    state[SUM] += _near(state, ROUNDS) + _far(state, place)
    end = _now_ns(address)
    state[PLACE] = (place + STRETCH) % FAR
    takes = state[TAKES_NS]
    state[TAKES_NS] = takes + SMOOTHING * (min(end - start, MOST * takes) - takes) if takes > 0 else end - start
    state[MARK_NS] = end
    state[SPENT_NS] += end - began
    state[COUNT] += 1
