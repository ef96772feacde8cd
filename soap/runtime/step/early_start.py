"""Starting exchanges of gradients while the backward pass of a segment goes on.

A segment's gradients are complete one by one. What a rank would start right behind the segment, and what waits for nobody, starts as soon
as its gradient is there; in the order of the program, which all ranks share. Where messages are no collectives, a sum may also start before
the gradients of activations that the segment sends back. ``docs/architecture.md`` draws the control flow.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from soap.runtime.program.actions import ActionKind
from soap.runtime.step.micro_batch import MicroBatch

Key = tuple[ActionKind, int]
"""An action that starts an exchange: its kind and subject."""


@dataclass(frozen=True)
class SyncSchedule:
    """When a rank's gradients are complete, by one program (``sync_schedule``).

    ``contributions``: synchronization -> how often a segment's backward pass may give it a gradient before its first exchange. ``follow``:
    segment -> exchanges that are started right behind it.
    """

    contributions: Mapping[int, int]
    follow: Mapping[int, Sequence[Key]]


class EarlyStart:
    """Starts exchanges while a segment's backward pass goes on: each as soon as its gradient is complete, in the order of the program,
    which all ranks share. Its own action finds an exchange started. ``start``: a method that starts one; its object is not kept alive.
    ``is_open``: whether a micro-batch is under way."""

    def __init__(self, start: Callable[[ActionKind, int], object]) -> None:
        self._start = weakref.WeakMethod(start)
        self._follow: Mapping[int, Sequence[Key]] = {}
        self._missing: dict[int, int] = {}
        self._startable: list[Key] = []
        self.is_open = False

    @contextmanager
    def step(self, schedule: SyncSchedule, part: MicroBatch) -> Iterator[None]:
        """A micro-batch; only in the last one anything is started, and outside of steps nothing."""
        self._follow = schedule.follow if part.last else {}
        self._missing = dict(schedule.contributions)
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False
            self._missing = {}

    @contextmanager
    def segment(self, number: int) -> Iterator[None]:
        """The backward pass of a segment."""
        self._startable = list(self._follow.get(number, ()))
        yield
        self._startable = []

    def arrived(self, number: int) -> None:
        """A segment has given its part of the gradient of a synchronization."""
        if number not in self._missing:
            return  # a backward pass of somebody else's
        self._missing[number] -= 1
        while self._startable and self._missing[self._startable[0][1]] == 0:
            kind, subject = self._startable.pop(0)
            start = self._start()
            assert start is not None  # its object has called
            start(kind, subject)
