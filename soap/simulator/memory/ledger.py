"""What devices hold from when to when, written down piece by piece, and the curve that this makes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from soap.plan.plan import Plan
from soap.simulator.memory.transit import Send, send_spans

ENDS, EARLY, LATE, BEGINS = range(4)
"""In which order things happen at one time."""


@dataclass(frozen=True)
class MemoryCurve:
    """What one device holds: ``bytes_held[i]`` from ``times_ns[i]`` on (int64 arrays of one length; times rise from 0)."""

    times_ns: NDArray[np.int64]
    bytes_held: NDArray[np.int64]

    @property
    def peak_bytes(self) -> int:
        """The most at any time."""
        return int(self.bytes_held.max())


class Ledger:
    """Collects, for each device, when bytes come or go."""

    def __init__(self, plan: Plan, end_ns: int) -> None:
        self._plan, self._end_ns = plan, end_ns
        self._changes: list[list[tuple[int, int, int]]] = [[] for _ in range(plan.device_count)]
        self._sends: list[list[Send]] = [[] for _ in range(plan.device_count)]

    def hold(self, device: int, start_ns: int, end_ns: int, size: int, *, early: bool = False, late: bool = False) -> None:
        """A device holds so many bytes for so long. At one time ends come before beginnings; but what begins ``early`` is made from what
        ends ``late``."""
        if size and end_ns >= start_ns + (not (early or late)):
            ends = LATE if late or end_ns == start_ns else ENDS
            self._changes[device] += [(start_ns, EARLY if early else BEGINS, size), (end_ns, ends, -size)]

    def send(self, device: int, start_ns: int, answer_ns: int, size: int, held: int | None = None) -> None:
        """A device sends something, and has it until ``answer_ns`` or until later sends push it out. ``held``: see ``Send``; None: all."""
        self._sends[device].append(Send(start_ns, answer_ns, size, size if held is None else held))

    def arrived(self, device: int, end_ns: int) -> int:
        """When it is seen that what was sent until ``end_ns`` has left: libraries for CPUs cannot tell before they are asked."""
        return end_ns if device in self._plan.accelerators else self._end_ns

    def curves(self) -> tuple[MemoryCurve, ...]:
        """Of each device."""
        for device, sends in enumerate(self._sends):
            for start, end, size in send_spans(sends):
                self.hold(device, start, end, size)
            sends.clear()
        return tuple(_curve(changes) for changes in self._changes)


def _curve(changes: Iterable[tuple[int, int, int]]) -> MemoryCurve:
    level, points = 0, {0: 0}
    for time_ns, together in groupby(sorted(changes), key=itemgetter(0)):
        most = 0
        for _, order, change in together:
            level += change
            if order == EARLY:
                most = level
        points[time_ns] = max(level, most)
    return MemoryCurve(np.array(list(points), np.int64), np.array(list(points.values()), np.int64))
