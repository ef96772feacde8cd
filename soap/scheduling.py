"""Which of this process's threads the kernel's scheduler prefers. On Linux; elsewhere nothing changes.

gloo's loop thread asks for a connection's lock and, if another thread has it, asks again at once, for as long as the socket has something
for it. Where it has displaced just that other thread from its core, both are stuck until the scheduler's next tick: a sum of 1600
bytes over four processes on two cores took 6 ms (every tenth: 10 ms) instead of 2. As a *batch* thread it waits for its turn instead of
displacing others.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

GLOO_LOOPS = "gloo_tcp"
"""What the names of threads that serve gloo's connections begin with."""
THREADS = Path("/proc/self/task")


def calm_gloo() -> None:
    """No loop thread of gloo displaces another thread from now on. To be called when groups, which bring such threads, have been added."""
    if sys.platform == "linux":
        for thread in os.listdir(THREADS):
            with suppress(OSError):  # it has ended meanwhile, or the system refuses
                if (THREADS / thread / "comm").read_text(encoding="utf-8", errors="replace").startswith(GLOO_LOOPS):
                    os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))
