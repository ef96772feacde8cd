"""Scheduling of gloo's threads by the kernel. On Linux; elsewhere nothing changes.

*Loop threads* serve gloo's connections. If another thread holds a connection's lock, the loop thread spins on it while the socket has data.
If it has just displaced that other thread from its core, both are stuck until the scheduler's next tick: a sum of 1600 bytes over four
processes on two cores took 6 ms (every tenth: 10 ms) instead of 2 ms. As a *batch* thread it waits for its turn and displaces nobody.

But a thread that waits behind a computation waits until that ends, or until the next tick. gloo's *worker threads* hold such locks but do
not spin, so they may be *prompt* instead. (Prompt loop threads made sums behind long computations faster still, but those behind short ones
slower.)
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from contextlib import suppress
from pathlib import Path

GLOO_LOOPS, GLOO_WORKERS = "gloo_tcp", "pt_gloo"
"""Prefixes of thread names: threads that serve gloo's connections, and threads that run its collectives."""
THREADS = Path("/proc/self/task")
SLICE_NS = 100_000
"""Time slice of a prompt thread: the kernel's minimum. A thread with a shorter slice displaces one with a longer slice (Linux 6.12)."""
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""The kernel's struct sched_attr: size, policy, flags, nice, priority, runtime (the slice), deadline, period."""


def calm_gloo() -> None:
    """Keep gloo's loop threads from displacing other threads. Call it again after adding groups, which start such threads."""
    if sys.platform == "linux":
        for thread in os.listdir(THREADS):
            with suppress(OSError):  # the thread has ended meanwhile, or the system refuses
                if thread_name(int(thread)).startswith(GLOO_LOOPS):
                    os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def be_prompt(thread: int) -> None:
    """Let this thread of the process displace computing threads as soon as it has work, if the kernel allows to choose time slices."""
    call = _SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if call is not None:
        attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, 0, 0, SLICE_NS, 0, 0)
        ctypes.CDLL(None).syscall(call, thread, attributes, 0)  # if it is refused, nothing changes


def thread_name(thread: int) -> str:
    """The name of one of this process's threads; OSError if it has ended."""
    return (THREADS / str(thread) / "comm").read_text(encoding="utf-8", errors="replace")
