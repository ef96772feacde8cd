"""Arrays that are appended to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Growing:
    """One dimension, one type."""

    def __init__(self, kind: type[np.integer[Any]]) -> None:
        self._kind, self._parts, self._joined = kind, list[NDArray[Any]](), np.zeros(0, kind)
        self.size = 0

    def add(self, values: NDArray[Any] | Sequence[int]) -> int:
        """Append; where the values begin."""
        part = np.asarray(values, self._kind).ravel()
        self._parts.append(part)
        self.size += len(part)
        return self.size - len(part)

    def array(self) -> NDArray[Any]:
        """Everything so far."""
        if self._parts:
            self._joined = np.concatenate([self._joined, *self._parts])
            self._parts = []
        return self._joined
