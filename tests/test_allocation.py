"""Freed memory stays with the process: allocated again, its pages are there. Where memory is short it goes back."""

from __future__ import annotations

import subprocess
import sys

import pytest

from soap.runtime.system.process import keep_freed_memory

PAGES = """
import resource
import torch
from soap.runtime.system.process import give_back, keep_freed_memory

def faults(work):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def use():
    for _ in range(20):
        torch.ones(64 * 2**20, dtype=torch.uint8)

given_back = faults(use)
assert keep_freed_memory()
use()
kept = faults(use)
give_back()
short = faults(lambda: torch.ones(64 * 2**20, dtype=torch.uint8))
print(given_back, kept, short, faults(use))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the GNU C library's allocator")
def test_memory_is_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", PAGES], capture_output=True, text=True, timeout=120, env={})
    assert done.returncode == 0, done.stderr
    given_back, kept, short, kept_again = map(int, done.stdout.split())
    each = 64 * 2**20 // (2 * 2**20)  # at least one for each page, were they as large as they can be
    assert given_back >= 20 * each and short >= each
    assert max(kept, kept_again) < given_back / 10  # now and then a small piece is in the way


@pytest.mark.parametrize("own", [{"MALLOC_MMAP_MAX_": "65536"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=4096"}])
def test_settings_of_the_users_own_are_left_alone(own: dict[str, str]) -> None:
    assert not keep_freed_memory(own)
