"""This process and the system: when it ends, and whether it keeps memory that it frees."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress

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
