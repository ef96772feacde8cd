"""Keeps what a rank frees as long as the holes between what it holds leave room for what comes next, which is known from the steps before;
else all that is free goes back (docs/internals/runtime.md, *Memory*)."""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch

from soap.runtime.system import process

LEARNED = 2
"""At so many visits of a place what is free goes back before it, so that all that is needed there shows: the first one also allocates what
stays, such as the optimizer's states."""
SURPRISE = 16
"""One of so many parts of a limit is left for growth that was not expected."""
LITTLE_BYTES = 16 * 2**20
"""Holes of so little are kept above what the process comes to in any case: it takes as much for itself, beside tensors, and of its limit no
plan counts that."""
_PAGE_BYTES = resource.getpagesize()


@dataclass(slots=True)
class _Place:
    """A moment of a step: until the next one the process grows by ``needs_bytes`` if nothing is free, and grew by ``grew_bytes`` last."""

    visits: int = 0
    needs_bytes: int = 0
    grew_bytes: int = 0


class MemoryRoom:
    """A process may hold ``limit_bytes`` more than now, of which ``there_bytes`` are there. Linux, GNU's C library (``room_within``). Where
    a run turns out to leave room for all holes, it no longer looks."""

    def __init__(self, limit_bytes: int, there_bytes: int = 0) -> None:
        process.give_back()
        surprise, before = limit_bytes // SURPRISE, held_bytes() - there_bytes
        self._most_bytes, self._trusted_bytes = before + limit_bytes - surprise, max(surprise, LITTLE_BYTES)
        self._ample_bytes = before + int(limit_bytes / process.HOLES)
        self._places: dict[Hashable, _Place] = {}
        self._begun: Counter[Hashable] = Counter()
        self._peaks: Counter[Hashable] = Counter()
        self._looks = True
        self._last: _Place | None = None
        self._last_run: Hashable = None
        self._held_bytes = 0
        self._gave_back = False
        self._run: Hashable = None
        self._moment = 0

    def begin(self, run: Hashable) -> None:
        """A sequence of looks begins, named ``run``: those of one name are the same each time."""
        self._run, self._moment = run, 0
        self._begun[run] += 1
        self._looks = True
        if self._begun[run] > LEARNED + 1 and self._peaks[run] <= self._ample_bytes:
            self._looks, self._last = False, None
        self.look()

    def look(self) -> None:
        """Give back what is free if too much would be held until the next look."""
        if not self._looks:
            return
        held = held_bytes()
        if self._last is not None:
            self._note(self._last, held)
        place = self._places.setdefault((self._run, self._moment), _Place())
        place.visits, self._moment = place.visits + 1, self._moment + 1
        more = place.grew_bytes if place.needs_bytes <= self._trusted_bytes else place.needs_bytes
        self._gave_back = place.visits <= LEARNED or held + more > self._most_bytes
        if self._gave_back:
            process.give_back()
            held = held_bytes()
        self._last, self._last_run, self._held_bytes = place, self._run, held

    def _note(self, place: _Place, held: int) -> None:
        """Learn from what is held at the look after a place."""
        grown = held - self._held_bytes
        if place.visits <= LEARNED:
            self._peaks[self._last_run] = max(self._peaks[self._last_run], held)
        if not self._gave_back:
            place.grew_bytes = grown
        elif place.visits <= LEARNED:
            place.needs_bytes = max(0, grown)
        else:
            place.needs_bytes = max(place.needs_bytes, grown)
        if place.visits == LEARNED:  # less is not possible
            self._most_bytes = max(self._most_bytes, held + LITTLE_BYTES)


def room_within(limit_bytes: int, there_bytes: int = 0) -> MemoryRoom | None:
    """For a process that has ``limit_bytes``, ``there_bytes`` of it already: what looks after its memory; None if the C library leaves no
    choice. From then on freed memory is kept."""
    return MemoryRoom(limit_bytes, there_bytes) if process.keep_freed_memory() else None


def stored_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """What these tensors take, those that share memory together."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def held_bytes() -> int:
    """The anonymous memory that this process holds, of Linux's ``statm``. Kernels from 6.2 to 6.15 may say up to 32 pages a core less."""
    file = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        _, resident, shared, *_ = os.read(file, 128).split()
    finally:
        os.close(file)
    return (int(resident) - int(shared)) * _PAGE_BYTES
