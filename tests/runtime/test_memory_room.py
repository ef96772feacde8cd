"""What a rank frees is kept where there is room for it, and what the process holds stays within its limit."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys

import pytest

from soap.runtime.system import memory_room
from soap.runtime.system import process as malloc
from soap.runtime.system.memory_room import LEARNED, LITTLE_BYTES, MemoryRoom, room_within

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the GNU C library's allocator")

STEPS = """
import json, resource
import torch
from soap.runtime.system import process as malloc
from soap.runtime.system.memory_room import MemoryRoom, held_bytes

MB, STEPS = 10**6, 6

def filled(size):
    return torch.ones(size * MB, dtype=torch.uint8)

def step(look, see):
    '''Holds 120 MB at most, in pieces that do not fit into each other's holes.'''
    kept = []
    for _ in range(10):
        look()
        kept.append(filled(12))
    see()
    kept = kept[::2]
    for size in (13, 14, 15):
        later = []
        for _ in range(60 // size):
            look()
            later.append(filled(size))
        see()

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

filled(200)
malloc.keep_freed_memory()
malloc.give_back()
found = {"all kept": run(nothing, nothing)}
malloc.give_back()
found["all given back"] = run(malloc.give_back, malloc.give_back)
for name, limit in (("within", 150), ("above", 100)):
    room = MemoryRoom(limit * MB)
    found[name] = run(lambda: room.begin("step"), room.look)
print(json.dumps(found))
"""


@pytest.mark.slow
@LINUX
def test_what_is_freed_is_kept_within_the_limit() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, timeout=120, env={})
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[float, float]] = json.loads(done.stdout)
    (all_kept, _), (least, faults) = found["all kept"], found["all given back"]
    assert all_kept > 150 > 125 > least, found
    for name in ("within", "above"):
        most, own_faults = found[name]
        assert most <= 150 and own_faults < 0.9 * faults, found


class Process:
    """Memory as the kernel would tell of it. ``live``: what is in use; ``held``: that and what is free but kept."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.live = self.held = self.given_back = 0
        patch.setattr(memory_room, "held_bytes", lambda: self.held)
        patch.setattr(malloc, "give_back", self._give_back)
        patch.setattr(malloc, "keep_freed_memory", lambda: True)

    def _give_back(self) -> None:
        self.given_back += 1
        self.held = self.live

    def take(self, count: int) -> None:
        """New memory, though some may be free: it is not where it would have to be."""
        self.live += count
        self.held += count

    def free(self, count: int) -> None:
        self.live -= count


GIB = 2**30


def test_nothing_is_given_back_where_a_step_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    room = MemoryRoom(10 * GIB)
    for _ in range(LEARNED):
        room.begin("step")
        process.take(4 * GIB)
        room.look()
        process.free(4 * GIB)
    learned = process.given_back
    for _ in range(5):
        room.begin("step")
        process.held = max(process.held, process.live + 4 * GIB)  # what is free is used again
        room.look()
    assert learned == 1 + 2 * LEARNED == process.given_back


def test_what_is_free_goes_back_before_it_would_be_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only before what needs much: what needs little is trusted to grow as it did last."""
    process = Process(monkeypatch)
    room, most = MemoryRoom(8 * GIB), 0
    for number in range(8):
        room.begin("step")
        process.take(6 * GIB)
        most = max(most, process.held)
        process.free(5 * GIB)
        before = process.given_back
        room.look()
        assert number < LEARNED or process.given_back == before + 1  # 6 + 4.5 would be too much
        process.take(9 * GIB // 2)
        most = max(most, process.held)
        before = process.given_back
        room.look()
        assert number < LEARNED or process.given_back == before
        process.free(11 * GIB // 2)
    assert most == 6 * GIB


def test_up_to_what_is_needed_anyway_all_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that comes to more than its limit whatever it gives back keeps that much, and a little more."""
    process = Process(monkeypatch)
    room, most = MemoryRoom(GIB), 0
    for number in range(8):
        room.begin("step")
        for _ in range(200):
            process.live += LITTLE_BYTES
            process.held = max(process.held, process.live)
            room.look()
        process.take(LITTLE_BYTES if number == 5 else 0)  # all holes are too small for what comes
        most, process.live = max(most, process.held), 0
    assert process.given_back == 1 + 201 * LEARNED + 1 and most == 201 * LITTLE_BYTES > GIB


def test_other_runs_have_needs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    room = MemoryRoom(16 * GIB, there_bytes=GIB)  # of which a sixteenth is left for surprises: 14
    given_back = []
    for run, need in (("step", 4 * GIB), ("evaluation", 10 * GIB)) * 4:
        room.begin(run)
        given_back.append(process.given_back)
        process.take(need)
        process.free(need)
    assert given_back == [2, 3, 4, 5, 5, 6, 6, 7]  # 4 and 10 of each are new: the next 10 would be too much


@pytest.mark.parametrize(("limit", "looks"), [(6 * GIB - 1, 1 + 2 * 8), (6 * GIB, 1 + 2 * (LEARNED + 1))])
def test_a_process_with_room_looks_no_further(limit: int, looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1.5 times what it needs. Each look asks once, and once more after giving back."""
    process, asked = Process(monkeypatch), 0

    def held() -> int:
        nonlocal asked
        asked += 1
        return process.held

    monkeypatch.setattr(memory_room, "held_bytes", held)
    room = room_within(limit)
    assert room is not None
    for _ in range(8):
        room.begin("step")
        process.live, process.held = 4 * GIB, max(process.held, 4 * GIB)
        room.look()
        process.live = 0
    assert asked - (process.given_back - 1) == looks


def test_whoever_has_settings_of_the_allocator_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc, "keep_freed_memory", lambda: False)
    assert room_within(100) is None


@LINUX
def test_the_kernel_tells_what_is_held() -> None:
    before = memory_room.held_bytes()
    with mmap.mmap(-1, 50 * 10**6, flags=mmap.MAP_PRIVATE) as pages:  # not of the allocator, which may have kept some
        for at in range(0, len(pages), mmap.PAGESIZE):
            pages[at] = 1
        after = memory_room.held_bytes()
    assert 45 * 10**6 < after - before < 55 * 10**6
