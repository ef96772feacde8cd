"""What a rank frees is kept where there is room for it, and what the process holds stays within its limit."""

from __future__ import annotations

import subprocess
import sys

import pytest

from soap.runtime.system import malloc, memory_room
from soap.runtime.system.memory_room import LEARNED, MemoryRoom, room_within

STEPS = """
import ctypes, json, resource, sys
import torch
from soap.runtime.system import malloc
from soap.runtime.system.memory_room import MemoryRoom, held_bytes

MB, STEPS, LIMIT = 10**6, 8, 100 * 10**6

def filled(size):
    return torch.ones(size, dtype=torch.uint8)

def step(look):
    '''Holds 60 MB at most, in pieces of sizes that do not fit into each other's holes.'''
    look()
    kept = [filled(3 * MB) for _ in range(20)]
    look()
    kept = kept[::2]
    for size in (5, 6, 7):
        look()
        later = [filled(size * MB) for _ in range(30 // size)]
        del later
    look()

def run(look, begin):
    '''(most that is held beside what was there, page faults of a step, the last steps' alone)'''
    most, first = 0, held_bytes()
    for number in range(STEPS):
        begin()
        if number == STEPS - 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        moments = []
        step(lambda: (look(), moments.append(held_bytes())))
        most = max(most, *moments, held_bytes())
    return most - first, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 2

nothing = lambda: None
malloc.keep_freed_memory()
found = {"kept": run(nothing, nothing)}
malloc.give_freed_memory_back()
malloc.give_back()
found["given back"] = run(nothing, nothing)
malloc.keep_freed_memory()
malloc.give_back()
room = MemoryRoom(LIMIT)
found["room"] = run(room.look, lambda: room.begin("step"))
malloc.keep_freed_memory()
malloc.give_back()
room = MemoryRoom(62 * MB)
found["little room"] = run(room.look, lambda: room.begin("step"))
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the GNU C library's allocator")
def test_what_is_freed_is_kept_within_the_limit() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, timeout=120, env={})
    assert done.returncode == 0, done.stderr
    print(done.stdout)
