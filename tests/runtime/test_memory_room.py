"""What a rank frees is kept where there is room for it, and what the process holds stays within its limit."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from soap.runtime.system import malloc, memory_room
from soap.runtime.system.memory_room import LEARNED, MemoryRoom, room_within

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the GNU C library's allocator")

STEPS = """
import json, resource
import torch
from soap.runtime.system import malloc
from soap.runtime.system.memory_room import MemoryRoom, held_bytes

MB, STEPS = 10**6, 8

def filled(size):
    return torch.ones(size * MB, dtype=torch.uint8)

def step(look, see):
    '''Holds 60 MB at most, in pieces that do not fit into each other's holes.'''
    kept = [filled(3) for _ in range(20)]
    see()
    look()
    kept = kept[::2]
    look()
    for size in (5, 6, 10):
        look()
        later = [filled(size) for _ in range(30 // size)]
        see()
        del later

def run(begin, look):
    '''(most that is held beside what was there, page faults of a step: of the last two)'''
    first, seen = held_bytes(), []
    for number in range(STEPS):
        if number == STEPS - 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        begin()
        step(look, lambda: seen.append(held_bytes()))
    return (max(seen) - first) / MB, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 2

def nothing():
    pass

filled(100)
malloc.keep_freed_memory()
malloc.give_back()
found = {"all kept": run(nothing, nothing)}
malloc.give_freed_memory_back()
malloc.give_back()
found["given back"] = run(nothing, nothing)
for limit in (75, 61):
    malloc.keep_freed_memory()
    room = MemoryRoom(limit * MB)
    found[str(limit)] = run(lambda: room.begin("step"), room.look)
print(json.dumps(found))
"""


@pytest.mark.slow
@LINUX
def test_what_is_freed_is_kept_within_the_limit() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, timeout=120, env={})
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    found = json.loads(done.stdout)


class Process:
    """Memory as the kernel would tell of it. ``live``: what is in use; ``held``: that and what is free but kept."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.live = self.held = self.given_back = 0
        self.keeps = True
        patch.setattr(memory_room, "held_bytes", lambda: self.held)
        for name, work in (("give_back", self._give_back), ("keep_freed_memory", self._keep), ("give_freed_memory_back", self._give_all_back)):
            patch.setattr(malloc, name, work)

    def _give_back(self) -> None:
        self.given_back += 1
        self.held = self.live

    def _keep(self) -> bool:
        self.keeps = True
        return True

    def _give_all_back(self) -> bool:
        self.keeps = False
        return True

    def take(self, count: int) -> None:
        """New memory, though some may be free: it is not where it would have to be."""
        self.live += count
        self.held += count

    def free(self, count: int) -> None:
        self.live -= count
        self.held -= 0 if self.keeps else count


def test_nothing_is_given_back_where_a_step_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    room = MemoryRoom(100)
    for _ in range(LEARNED):
        room.begin("step")
        process.take(40)
        room.look()
        process.free(40)
    learned = process.given_back
    for _ in range(5):
        room.begin("step")
        process.held = max(process.held, process.live + 40)  # what is free is used again
        room.look()
    assert learned == 1 + 2 * LEARNED == process.given_back and process.keeps


def test_what_is_free_goes_back_before_it_would_be_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    room, most = MemoryRoom(100), 0
    for number in range(8):
        room.begin("step")
        process.take(60)
        most = max(most, process.held)
        process.free(50)
        before = process.given_back
        room.look()
        assert number < LEARNED or process.given_back == before + 1  # 60 + 45 would be too much
        process.take(45)
        most = max(most, process.held)
        process.free(55)
    assert most == 60 <= 100 and process.keeps


def test_where_nothing_is_left_large_pieces_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    room, seen = MemoryRoom(100), []
    for _ in range(LEARNED + 2):
        room.begin("step")
        process.take(70)
        room.look()
        seen.append(process.keeps)
        process.take(35)  # too much, whatever is given back
        process.free(35)
        room.look()
        seen.append(process.keeps)
        process.free(70)
    assert seen == [True, True] * LEARNED + [False, True] * 2


def test_other_runs_have_needs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    room = MemoryRoom(100, there_bytes=20)
    for run, need in (("step", 10), ("evaluation", 30)) * 4:
        room.begin(run)
        process.take(need)
        process.free(need)
    assert process.given_back == 1 + 2 * LEARNED + 2  # 80 are left: 10, 30, 10 and 30 are kept, another 10 would be too much


def test_a_process_with_room_looks_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    Process(monkeypatch)
    assert room_within(100, 150) is None and isinstance(room_within(100, 149), MemoryRoom)
    monkeypatch.setattr(malloc, "keep_freed_memory", lambda: False)  # the user has settings of the library's, or it is another one
    assert room_within(100, 149) is None


@LINUX
def test_the_kernel_tells_what_is_held() -> None:
    before = memory_room.held_bytes()
    tensor = torch.ones(50 * 10**6, dtype=torch.uint8)
    assert 45 * 10**6 < memory_room.held_bytes() - before < 55 * 10**6, tensor.numel()
