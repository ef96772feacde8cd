"""This process and the system: when it ends, whether it keeps memory that it frees, and how gloo's threads are scheduled."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """From now on the kernel kills this process when the thread that has started it ends. On other systems than Linux: nothing."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Numbers of mallopt(3)."""
HOLES = 1.5
"""A process that keeps all that it frees may take so many times what it may hold: 450 MB that were held at most took 678 to 722 MB
(2026-11-27, ``tests/runtime/test_hard_limit.py``)."""
OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Make this process keep and reuse the memory that it frees. Returns whether that worked.

    A step frees what it has allocated, and the next one allocates the same again. The GNU C library gives large pieces back each time,
    which the system clears: a convolution with 64 MiB of outputs takes 3.4 times as long. Where holes between what is held might not fit,
    ``memory_room`` decides when something goes back.

    It is not done with another C library than GNU's, nor if the user has settings of their own: mallopt(3)'s environment variables, or
    ``glibc.malloc`` in ``GLIBC_TUNABLES``.
    """
    own = any(name in environment for name in OWN_SETTINGS) or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
    if own or sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Never map a piece by itself, and never give back the end of the heap. (Other threads' heaps cannot hold large pieces: these still go.)
    return mallopt is not None and all([mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, -1)])


def give_back() -> None:
    """Give all pages that are free back to the system, once."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


GLOO_LOOPS, GLOO_WORKERS = "gloo_tcp", "pt_gloo"
"""Prefixes of thread names: threads that serve gloo's connections, and threads that run its collectives."""
THREADS = Path("/proc/self/task")
SLICE_NS = 100_000
"""Time slice of a prompt thread: the kernel's minimum. A thread with a shorter slice displaces one with a longer slice (Linux 6.12)."""
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""The kernel's struct sched_attr: size, policy, flags, nice, priority, runtime (the slice), deadline, period."""


def calm_gloo() -> None:
    """Keep gloo's loop threads from displacing other threads: batch threads wait for their turn. One that displaces a thread which holds a
    connection's lock spins until the scheduler's next tick: a small sum took 6 ms instead of 2. Call it again after adding groups, which
    start such threads."""
    if sys.platform == "linux":
        for thread in os.listdir(THREADS):
            with suppress(OSError):  # the thread has ended meanwhile, or the system refuses
                if thread_name(int(thread)).startswith(GLOO_LOOPS):
                    os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def be_prompt(thread: int) -> None:
    """Let this thread of the process displace computing threads as soon as it has work, if the kernel allows to choose time slices: gloo's
    worker threads, which hold locks but do not spin."""
    call = _SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if call is not None:
        attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, 0, 0, SLICE_NS, 0, 0)
        ctypes.CDLL(None).syscall(call, thread, attributes, 0)  # if it is refused, nothing changes


def thread_name(thread: int) -> str:
    """The name of one of this process's threads; OSError if it has ended."""
    return (THREADS / str(thread) / "comm").read_text(encoding="utf-8", errors="replace")
