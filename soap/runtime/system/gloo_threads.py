"""Which of this process's threads the kernel's scheduler prefers. On Linux; elsewhere nothing changes.

gloo's loop thread asks for a connection's lock and, if another thread has it, asks again at once, for as long as the socket has something
for it. Where it has displaced just that other thread from its core, both are stuck until the scheduler's next tick: a sum of 1600
bytes over four processes on two cores took 6 ms (every tenth: 10 ms) instead of 2. As a *batch* thread it waits for its turn instead of
displacing others.

What waits for its turn behind a computation waits until that ends, or for the kernel's next tick. gloo's worker threads, which hold such
locks but spin for none, may be prompt instead. (Prompt loops made sums behind long computations quicker still, but those behind short ones
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
"""What the names of threads begin with that serve gloo's connections, and that do its collectives."""
THREADS = Path("/proc/self/task")
SLICE_NS = 100_000
"""Of a prompt thread: the least that the kernel knows. A thread with a shorter slice displaces one with a longer (Linux 6.12)."""
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""The kernel's struct sched_attr: size, policy, flags, nice, priority, runtime (the slice), deadline, period."""


def calm_gloo() -> None:
    """No loop thread of gloo displaces another thread from now on. To be called when groups, which bring such threads, have been added."""
    if sys.platform == "linux":
        for thread in os.listdir(THREADS):
            with suppress(OSError):  # it has ended meanwhile, or the system refuses
                if thread_name(int(thread)).startswith(GLOO_LOOPS):
                    os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def be_prompt(thread: int) -> None:
    """This thread of ours displaces what computes as soon as it has something to do, where the kernel has slices to be chosen."""
    call = _SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if call is not None:
        attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, 0, 0, SLICE_NS, 0, 0)
        ctypes.CDLL(None).syscall(call, thread, attributes, 0)  # where it is refused nothing changes


def thread_name(thread: int) -> str:
    """Of this process's; OSError if it has ended."""
    return (THREADS / str(thread) / "comm").read_text(encoding="utf-8", errors="replace")
