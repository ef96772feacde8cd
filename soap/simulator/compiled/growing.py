"""Arrays that grow at their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Growing:
    """An array of one dimension and one type. Adding values takes time in proportion to their number."""

    def __init__(self, kind: type[np.integer[Any] | np.floating[Any]]) -> None:
        self._kind, self._room = kind, np.zeros(64, kind)
        self.size = 0

    def add(self, values: NDArray[Any] | Sequence[float]) -> int:
        """Append values; returns where they begin."""
        part = np.asarray(values, self._kind).ravel()
        first, self.size = self.size, self.size + len(part)
        if self.size > len(self._room):
            room = np.zeros(2 * self.size, self._kind)
            room[:first] = self._room[:first]
            self._room = room
        self._room[first : self.size] = part
        return first

    def array(self) -> NDArray[Any]:
        """Everything so far; later additions do not change it."""
        return self._room[: self.size]
