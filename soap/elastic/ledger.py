"""Sets of numbers that are nearly all used up from the bottom: which leases are done, and which a partition has counted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from soap.elastic.faults import ElasticError


class Ledger:
    """A set of numbers from 0 on, kept as intervals: all below n, and a few beyond. So its size is that of the gaps, not of the numbers."""

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        """``intervals``: (start, stop), rising and apart from each other."""
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in intervals:
            if start >= stop or start < 0 or (self._stops and start <= self._stops[-1]):
                raise ElasticError(f"interval {start}:{stop} of a ledger; expected intervals that rise and do not touch")
            self._starts.append(start)
            self._stops.append(stop)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._stops[at]

    def __len__(self) -> int:
        """How many numbers there are."""
        return sum(self._stops) - sum(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self.intervals == other.intervals

    __hash__ = None  # type: ignore[assignment]

    @property
    def intervals(self) -> tuple[tuple[int, int], ...]:
        """The numbers as intervals (start, stop)."""
        return tuple(zip(self._starts, self._stops, strict=True))

    def add(self, number: int) -> bool:
        """Add a number; False if it is there already."""
        if number < 0:
            raise ElasticError(f"lease {number}; expected a number from 0 on")
        if number in self:
            return False
        at = bisect_right(self._starts, number)
        joins_before = at > 0 and self._stops[at - 1] == number
        joins_after = at < len(self._starts) and self._starts[at] == number + 1
        if joins_before and joins_after:
            self._stops[at - 1] = self._stops.pop(at)
            self._starts.pop(at)
        elif joins_before:
            self._stops[at - 1] = number + 1
        elif joins_after:
            self._starts[at] = number
        else:
            self._starts.insert(at, number)
            self._stops.insert(at, number + 1)
        return True

    def copy(self) -> Ledger:
        """A ledger of its own."""
        return Ledger(self.intervals)

    def array(self) -> NDArray[np.int64]:
        """(intervals, 2), int64."""
        return np.array(self.intervals, dtype=np.int64).reshape(-1, 2)

    @staticmethod
    def of(array: NDArray[np.int64]) -> Ledger:
        """From ``array``. ElasticError in one line if it is none."""
        if array.ndim != 2 or array.shape[1] != 2:
            raise ElasticError(f"a ledger of shape {list(array.shape)}; expected (intervals, 2)")
        return Ledger((int(start), int(stop)) for start, stop in array)
