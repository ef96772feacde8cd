"""Arrays that grow at their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST_ROOM = 1024


class Growing:
    """An array of one dimension and one type. Adding values takes time in proportion to their number. ``room``: what was added, and room
    behind it; another array once that is full."""

    def __init__(self, kind: type[np.integer[Any] | np.floating[Any]]) -> None:
        self._kind, self.room = kind, np.zeros(FIRST_ROOM, kind)
        self.size = 0

    def add(self, values: NDArray[Any] | Sequence[float]) -> int:
        """Append values; returns where they begin."""
        part = np.asarray(values, self._kind).ravel()
        first, self.size = self.size, self.size + len(part)
        if self.size > len(self.room):
            room = np.zeros(2 * self.size, self._kind)
            room[:first] = self.room[:first]
            self.room = room
        self.room[first : self.size] = part
        return first

    def array(self) -> NDArray[Any]:
        """Everything so far; later additions do not change it."""
        return self.room[: self.size]


class GrowingColumns:
    """The same of two dimensions, which grows along the second one."""

    def __init__(self, rows: int, kind: type[np.integer[Any] | np.floating[Any]]) -> None:
        self.room = np.zeros((rows, FIRST_ROOM), kind)
        self.size = 0

    def add(self, columns: NDArray[Any]) -> None:
        """Append columns, [row, column]."""
        first, self.size = self.size, self.size + columns.shape[1]
        if self.size > self.room.shape[1]:
            room = np.zeros((len(self.room), 2 * self.size), self.room.dtype)
            room[:, :first] = self.room[:, :first]
            self.room = room
        self.room[:, first : self.size] = columns


def are_same(before: Sequence[object], now: Sequence[object]) -> bool:
    """Whether two lists have the very same objects."""
    return all(a is b for a, b in zip(before, now, strict=True))
