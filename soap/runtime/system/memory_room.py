"""Keeps what a rank frees as long as the holes between what it holds leave room for what comes next.

Freed memory that is kept is there at once when it is allocated again; memory that went back to the system comes with pages that are cleared
anew, one fault each. But kept memory has holes: a step whose tensors take 450 MB took 680 to 720 MB. Where a rank has room for that
(``malloc.HOLES``), it keeps everything and looks no further. Where it has not, it looks between the actions of each step how much the
process holds. A step does the same again and again, so it is known by how much memory grows until the next look. Only if that would pass
the limit, what is free goes back (one call, ``malloc.give_back``); and where even this leaves too little room, as around the peak, large
pieces are not kept at all until there is room again.

What counts is what the kernel says of the process: anonymous memory beyond what it had when its tensors were about to be made. So holes,
kernels' workspaces and Python's own objects are part of it.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Hashable
from dataclasses import dataclass

from soap.runtime.system import malloc

LEARNED = 2
"""At so many visits of a place what is free goes back before it, so that all that is needed there shows: the first one also allocates what
stays, such as the optimizer's states."""
_PAGE_BYTES = resource.getpagesize()


@dataclass(slots=True)
class _Place:
    """A moment of a step. ``needs_bytes``: by how much the process grows until the next moment."""

    visits: int = 0
    needs_bytes: int = 0


class MemoryRoom:
    """What a process may hold: ``limit_bytes`` more than when this is made, of which ``there_bytes`` are there already. Linux, GNU's C
    library (``room_within`` asks for both)."""

    def __init__(self, limit_bytes: int, there_bytes: int = 0) -> None:
        malloc.give_back()
        self._most_bytes = held_bytes() - there_bytes + limit_bytes
        self._places: dict[Hashable, _Place] = {}
        self._last: _Place | None = None
        self._held_bytes = 0
        self._keeps = True
        self._run: Hashable = None
        self._moment = 0

    def begin(self, run: Hashable) -> None:
        """A sequence of looks begins, named ``run``: those of one name are the same each time."""
        self._run, self._moment = run, 0
        self.look()

    def look(self) -> None:
        """See to it that what the process holds until the next look does not pass the limit."""
        held = held_bytes()
        if self._last is not None:
            self._note(self._last, held - self._held_bytes)
        place = self._places.setdefault((self._run, self._moment), _Place())
        place.visits, self._moment = place.visits + 1, self._moment + 1
        learns = place.visits <= LEARNED
        if self._keeps and (learns or held + place.needs_bytes > self._most_bytes):
            malloc.give_back()
            held = held_bytes()
        keeps = learns or held + place.needs_bytes <= self._most_bytes
        if keeps is not self._keeps:
            (malloc.keep_freed_memory if keeps else malloc.give_freed_memory_back)()
        self._last, self._held_bytes, self._keeps = place, held, keeps

    def _note(self, place: _Place, grown_bytes: int) -> None:
        """Learn by how much the process has grown since a place. Where large pieces go back, what was needed meanwhile does not show."""
        if place.visits <= LEARNED:
            place.needs_bytes = max(0, grown_bytes)
        elif self._keeps:
            place.needs_bytes = max(place.needs_bytes, grown_bytes)


def room_within(most_bytes: int, limit_bytes: int, there_bytes: int = 0) -> MemoryRoom | None:
    """For a process that may hold ``most_bytes`` and has ``limit_bytes``, ``there_bytes`` of it already: what looks after its memory; None if
    there is room for all holes, or the C library does not let us choose. From then on freed memory is kept."""
    able = malloc.keep_freed_memory()
    return MemoryRoom(limit_bytes, there_bytes) if able and most_bytes * malloc.HOLES > limit_bytes else None


def held_bytes() -> int:
    """The anonymous memory that this process holds, of Linux's ``statm``. Kernels from 6.2 to 6.15 may say up to 32 pages a core less."""
    file = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        _, resident, shared, *_ = os.read(file, 128).split()
    finally:
        os.close(file)
    return (int(resident) - int(shared)) * _PAGE_BYTES
