"""When tasks of ``soap-preprocess`` ended, step by step, for its report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Step:
    name: str
    tasks: int
    size_bytes: int
    begin_s: float
    ends_s: list[float] = field(default_factory=list)


class Steps:
    """Takes down when each step began and each of its tasks ended, in seconds since this was made."""

    def __init__(self) -> None:
        self._origin_s = time.monotonic()
        self._steps: list[_Step] = []

    def begin(self, step: str, tasks: int, size_bytes: int) -> None:
        """A step begins."""
        self._steps.append(_Step(step, tasks, size_bytes, self._now_s()))

    def seen(self) -> None:
        """A task of the step has ended."""
        self._steps[-1].ends_s.append(self._now_s())

    def documents(self) -> list[dict[str, Any]]:
        """Plain values, step by step: ``name``, ``tasks``, ``bytes`` of input, ``begin_s``, ``ends_s``, ``seconds``."""
        return [
            {
                "name": step.name,
                "tasks": step.tasks,
                "bytes": step.size_bytes,
                "begin_s": step.begin_s,
                "ends_s": list(step.ends_s),
                "seconds": (step.ends_s[-1] if step.ends_s else step.begin_s) - step.begin_s,
            }
            for step in self._steps
        ]

    def _now_s(self) -> float:
        return time.monotonic() - self._origin_s
