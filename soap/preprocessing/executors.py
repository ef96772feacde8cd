"""Who does tasks: the seam between what is to be done and where. This one does them in the calling process, one after the other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from soap.preprocessing.work import Done, Task, Work


@dataclass(frozen=True, slots=True)
class Lost:
    """A task whose process was killed."""

    task: Task


class Executor(Protocol):
    """Does tasks of one node. Errors of tasks are raised by ``wait``."""

    @property
    def processes(self) -> Sequence[int]:
        """Ids of its processes."""

    def used_bytes(self) -> int:
        """Memory of its processes."""

    def start(self, task: Task) -> None:
        """Begin a task."""

    def wait(self, limit_s: float) -> Sequence[Done | Lost]:
        """What has ended, after so many seconds at most."""

    def take_back(self) -> Task | None:
        """End the task that was begun last; it must be begun again."""

    def close(self) -> None:
        """End all processes."""


class InProcess:
    """Does tasks in this process. ``order``: draws which of those that were begun ends first (None: the first one)."""

    def __init__(self, work: Work, order: random.Random | None = None) -> None:
        self._work, self._order = work, order
        self._begun: list[Task] = []

    @property
    def processes(self) -> Sequence[int]:
        """None of its own."""
        return ()

    def used_bytes(self) -> int:
        """None of its own."""
        return 0

    def start(self, task: Task) -> None:
        """Remember a task."""
        self._begun.append(task)

    def wait(self, limit_s: float) -> Sequence[Done | Lost]:
        """Do one task."""
        from soap.preprocessing.steps import perform  # numba

        if not self._begun:
            return ()
        place = self._order.randrange(len(self._begun)) if self._order else 0
        return (perform(self._work, self._begun.pop(place)),)

    def take_back(self) -> Task | None:
        """Forget the last task."""
        return self._begun.pop() if self._begun else None

    def close(self) -> None:
        """Nothing to end."""
        self._begun.clear()
