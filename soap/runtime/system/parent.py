"""Processes that are to live no longer than the one that has started them."""

from __future__ import annotations

import ctypes
import signal
from contextlib import suppress

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """From now on the kernel kills this process when the thread that has started it ends. On other systems than Linux: nothing."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
