"""Threads that the kernel's scheduler prefers, as the kernel itself tells."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import struct
import sys
import threading

import pytest

from soap.runtime.system.process import SLICE_NS, be_prompt, thread_name

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}
ATTRIBUTES = struct.Struct("=IIQiIQQQ")
KERNEL = tuple(map(int, re.findall(r"\d+", platform.release())[:2])) if sys.platform == "linux" else (0, 0)


def slice_ns(thread: int) -> int:
    found = ctypes.create_string_buffer(ATTRIBUTES.size)
    assert ctypes.CDLL(None).syscall(SCHED_GETATTR[platform.machine()], thread, found, ATTRIBUTES.size, 0) == 0
    return int(ATTRIBUTES.unpack(found.raw)[5])


@pytest.mark.skipif(KERNEL < (6, 12) or platform.machine() not in SCHED_GETATTR, reason="slices cannot be chosen before Linux 6.12")
def test_a_prompt_thread_has_a_short_slice() -> None:
    slices: list[int] = []

    def run() -> None:
        thread = threading.get_native_id()
        be_prompt(thread)
        slices.append(slice_ns(thread))
        assert os.sched_getscheduler(thread) == os.SCHED_OTHER

    own = threading.Thread(target=run)
    own.start()
    own.join()
    assert slices == [SLICE_NS] and slice_ns(0) > SLICE_NS


@pytest.mark.skipif(sys.platform != "linux", reason="other systems name threads elsewhere")
def test_a_thread_that_has_ended_has_no_name() -> None:
    assert thread_name(threading.get_native_id()) != ""
    with pytest.raises(OSError):
        thread_name(2**30)
    be_prompt(2**30)  # nothing to say
