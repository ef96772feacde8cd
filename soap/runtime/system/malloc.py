"""Memory that a training process frees stays with it.

A training step frees what it has allocated, and the next one allocates the same again. The GNU C library gives pieces of more than 32 MiB
back to the system each time, which hands them out anew as pages that it first has to clear: a convolution with 64 MiB of outputs then takes
3.4 times as long, and more or less of it depending on what else the machine does. GPUs have torch's caching allocator against that; CPUs
have this.
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
    """From now on this process keeps what it frees, and takes from that; whether it could be told so.

    Not where the C library is another one, and not if the user has settings of his own: mallopt(3)'s environment variables, or
    ``glibc.malloc`` among ``GLIBC_TUNABLES``.
    """
    own = any(name in environment for name in OWN_SETTINGS) or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
    if own or sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Never to map a piece by itself, nor to give the end of the heap back. (Other threads' heaps cannot hold such pieces: theirs still go.)
    return all(mallopt(*setting) for setting in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1)))
