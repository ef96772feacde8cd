"""What a process does with memory that it frees: it keeps it, or gives it back where it has little to spare.

A training step frees what it has allocated, and the next step allocates the same again. The GNU C library returns pieces of more than 32
MiB to the system each time, and the system has to clear the pages before it hands them out anew. A convolution with 64 MiB of outputs then
takes 3.4 times as long, and the time varies with what else the machine does. GPUs have torch's caching allocator against that; CPUs have
this. The price are holes between what is held: where these might not fit, ``memory_room`` decides when something goes back.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Numbers of mallopt(3)."""
USUAL_MMAP_MAX, GIVEN_BACK_BYTES = 65_536, 2**20
"""How many pieces may be mapped by themselves (the library's default), and how large these are at least when memory is short."""
HOLES = 1.5
"""A process that keeps all that it frees may take so many times what it may hold: 450 MB that were held at most took 678 to 722 MB
(2026-11-27, ``tests/runtime/test_hard_limit.py``)."""
OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Make this process keep and reuse the memory that it frees. Returns whether that worked.

    It is not done with another C library than GNU's, nor if the user has settings of their own: mallopt(3)'s environment variables, or
    ``glibc.malloc`` in ``GLIBC_TUNABLES``.
    """
    # Never map a piece by itself, and never give back the end of the heap. (Other threads' heaps cannot hold large pieces: these still go.)
    return _set(((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1)), environment)


def give_freed_memory_back(environment: Mapping[str, str] = os.environ) -> bool:
    """The opposite: large pieces go back to the system as soon as they are free. Returns whether that worked, as above."""
    sizes = (M_MMAP_THRESHOLD, GIVEN_BACK_BYTES), (M_TRIM_THRESHOLD, GIVEN_BACK_BYTES)
    return _set(((M_MMAP_MAX, USUAL_MMAP_MAX), *sizes), environment)


def give_back() -> None:
    """Give all pages that are free back to the system, once."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set(settings: Sequence[tuple[int, int]], environment: Mapping[str, str]) -> bool:
    """Make these settings, unless the user has some, or the library knows none."""
    own = any(name in environment for name in OWN_SETTINGS) or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
    if own or sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(*setting) for setting in settings])
