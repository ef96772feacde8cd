"""Dictionaries that grow: values to indices in order of first appearance, with how often each came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from soap.preprocessing import kernel

FIRST_PLACES = 1 << 10
NO_WEIGHTS: NDArray[np.int64] = np.empty(0, np.int64)


@dataclass(frozen=True)
class Texts:
    """Texts one after the other: text i is ``data[bounds[i]:bounds[i + 1]]``."""

    data: NDArray[np.uint8]
    bounds: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.bounds) - 1


class IdEncoder:
    """A dictionary of ids (uint64)."""

    def __init__(self) -> None:
        self._known = 0
        self._table = np.full(FIRST_PLACES, -1, np.int32)
        self._seen = np.empty(FIRST_PLACES // 2, np.uint64)
        self._counts = np.empty(FIRST_PLACES // 2, np.int64)

    def add(self, values: NDArray[np.uint64], weights: NDArray[np.int64] = NO_WEIGHTS) -> NDArray[np.int32]:
        """Indices of values (columns, rows), which are new row by row, and in a row by column. ``weights``: how often each row counts."""
        codes = np.empty(values.shape, np.int32)
        position = 0
        while True:
            position, self._known = kernel.add_ids(values, weights, position, self._known, self._table, self._seen, self._counts, codes)
            if position == values.size:
                return codes
            self._grow()

    def _grow(self) -> None:
        places = 4 * len(self._table)
        self._table = np.full(places, -1, np.int32)
        self._seen, self._counts = _longer(self._seen, places // 2), _longer(self._counts, places // 2)
        kernel.place_ids(self._seen, self._known, self._table)

    @property
    def values(self) -> NDArray[np.uint64]:
        """All values, by index."""
        return self._seen[: self._known]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often each came."""
        return self._counts[: self._known]


class TextEncoder:
    """A dictionary of texts (bytes)."""

    def __init__(self) -> None:
        self._known = self._used = 0
        self._table = np.full(FIRST_PLACES, -1, np.int32)
        self._hashes = np.empty(FIRST_PLACES // 2, np.uint64)
        self._counts = np.empty(FIRST_PLACES // 2, np.int64)
        self._bounds = np.zeros(FIRST_PLACES // 2 + 1, np.int64)
        self._text = np.empty(FIRST_PLACES, np.uint8)

    def add(
        self, data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64], weights: NDArray[np.int64] = NO_WEIGHTS
    ) -> NDArray[np.int32]:
        """Indices of the texts ``data[starts:ends]`` (columns, rows); see ``IdEncoder.add``."""
        codes = np.empty(starts.shape, np.int32)
        position = 0
        while True:
            position, self._known, self._used = kernel.add_texts(
                data, (starts, ends), weights, position, self._known, self._table, self._hashes, self._text, self._bounds, self._used,
                self._counts, codes,
            )  # fmt: skip
            if position == starts.size:
                return codes
            column, row = position % len(starts), position // len(starts)
            self._grow(int(ends[column, row] - starts[column, row]))

    def _grow(self, more: int) -> None:
        if self._known >= len(self._hashes):
            places = 4 * len(self._table)
            self._table = np.full(places, -1, np.int32)
            self._hashes, self._counts = _longer(self._hashes, places // 2), _longer(self._counts, places // 2)
            self._bounds = _longer(self._bounds, places // 2 + 1)
            kernel.place_texts(self._hashes, self._known, self._table)
        if self._used + more > len(self._text):
            self._text = _longer(self._text, 2 * len(self._text) + more)

    @property
    def values(self) -> Texts:
        """All texts, by index."""
        return Texts(self._text[: self._used], self._bounds[: self._known + 1])

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often each came."""
        return self._counts[: self._known]


def _longer(array: NDArray[Any], length: int) -> NDArray[Any]:
    grown = np.empty(length, array.dtype)
    grown[: len(array)] = array
    return grown
