"""A core that never sleeps: what wakes up on one that did is slower by up to a third for a while.

A core that has nothing to do is halted, also by the machine that this one may be virtual on, and comes back at a lower clock and with other
programs' data in its caches. (After 2 ms of sleep a loop of multiplications took 0.231 ms instead of 0.185 here, on a core kept awake
0.185.) Emulated devices wait for their share of the time all along; real ones would compute. So on each core that is to be kept awake a
process counts for ever, in a group that gets only what nobody else wants.

The process runs this very file, by itself: it needs nothing of the package, and starts at once.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1


@contextmanager
def kept_awake(cores: Sequence[int], group: Path | None) -> Iterator[None]:
    """Within this context these cores have something to do. ``group``: an idle control group for who does it; None: nothing happens, as it
    would take time from others."""
    wakers: list[subprocess.Popen[bytes]] = []
    try:
        for core in cores if group is not None else ():
            words = [sys.executable, "-I", "-S", __file__, str(core), str(group), str(os.getpid())]
            wakers.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        yield
    finally:
        for waker in wakers:
            waker.kill()
            waker.wait()


def main(words: Sequence[str]) -> None:
    """Arguments: core, control group, and the process with which this one ends."""
    core, group, parent = int(words[0]), Path(words[1]), int(words[2])
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is our parent's, which then ends us
    with suppress(OSError):  # the group, or the core, is gone meanwhile, and so is our task
        (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        os.sched_setaffinity(0, {core})
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        if os.getppid() == parent:
            any(itertools.repeat(False))


if __name__ == "__main__":
    main(sys.argv[1:])
