"""Keeping the memory that a training process frees.

A training step frees what it has allocated, and the next step allocates the same again. The GNU C library returns pieces of more than 32
MiB to the system each time, and the system has to clear the pages before it hands them out anew. A convolution with 64 MiB of outputs then
takes 3.4 times as long, and the time varies with what else the machine does. GPUs have torch's caching allocator against that; CPUs have
this.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Numbers of mallopt(3)."""
OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Make this process keep and reuse the memory that it frees. Returns whether that worked.

    It is not done with another C library than GNU's, nor if the user has settings of their own: mallopt(3)'s environment variables, or
    ``glibc.malloc`` in ``GLIBC_TUNABLES``.
    """
    own = any(name in environment for name in OWN_SETTINGS) or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
    if own or sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Never map a piece by itself, and never give back the end of the heap. (Other threads' heaps cannot hold large pieces: these still go.)
    return all(mallopt(*setting) for setting in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1)))
