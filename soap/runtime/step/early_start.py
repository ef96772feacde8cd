"""Early start: exchanging gradients while the backward pass of a segment still runs, each as soon as its own gradient is complete, in the
program's order. docs/internals/runtime.md (*Synchronization*) draws the control flow."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from soap.runtime.program.actions import ActionKind, MicroBatch
from soap.runtime.system.memory_room import MemoryRoom

Key = tuple[ActionKind, int]
"""An action that starts an exchange: its kind and subject."""


@dataclass(frozen=True)
class SyncSchedule:
    """When a rank's gradients are complete in one program (made by ``step.sync_schedule``).

    ``contributions``: synchronization -> how many gradients segments contribute before its first exchange may start. ``follow``: segment ->
    exchanges that start right after it, in order. ``always``: those of them that start so in every micro-batch, not in the last one alone.
    """

    contributions: Mapping[int, int]
    follow: Mapping[int, Sequence[Key]]
    always: Mapping[int, Sequence[Key]]


class EarlyStart:
    """Starts each exchange as soon as its gradient is complete, in the program's order. When the program reaches the exchange's own action,
    it has started already. ``start``: the bound method that starts an exchange (held weakly). ``room``: a segment's backward pass may be
    all of a step's, so memory is looked at whenever a gradient has come. ``is_open``: True during a micro-batch."""

    def __init__(self, start: Callable[[ActionKind, int], object], room: MemoryRoom | None = None) -> None:
        self._start, self._room = weakref.WeakMethod(start), room
        self._follow: Mapping[int, Sequence[Key]] = {}
        self._missing: dict[int, int] = {}
        self._startable: list[Key] = []
        self.is_open = False

    @contextmanager
    def step(self, schedule: SyncSchedule, part: MicroBatch) -> Iterator[None]:
        """The time of one micro-batch. Exchanges start early in it, and never outside of steps."""
        self._follow = schedule.follow if part.last else schedule.always
        self._missing = dict(schedule.contributions)
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False
            self._missing = {}

    @contextmanager
    def segment(self, number: int) -> Iterator[None]:
        """The time of a segment's backward pass."""
        self._startable = list(self._follow.get(number, ()))
        yield
        self._startable = []

    def arrived(self, number: int) -> None:
        """Note that a segment has contributed to the gradient of a synchronization, and start what is complete."""
        if number not in self._missing:
            return  # the user's own backward pass, outside of a step
        if self._room is not None:
            self._room.look()
        self._missing[number] -= 1
        while self._startable and self._missing[self._startable[0][1]] == 0:
            kind, subject = self._startable.pop(0)
            start = self._start()
            assert start is not None  # its object is calling us
            start(kind, subject)
