"""Numbered lists of whole numbers that compiled code looks up (``state.Lists``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soap.simulator.compiled.communication import fill_table
from soap.simulator.compiled.growing import Growing, are_same
from soap.simulator.compiled.handles import handle
from soap.simulator.compiled.state import Lists

LONGEST = 1 << 17
"""Most items of a list."""

FIRST_TABLE = 1024
"""Places in a hash table, a power of two."""


class GrowingLists:
    """Lists, numbered in the order in which they are added. Adding one takes time in proportion to its length."""

    def __init__(self) -> None:
        self._ptr, self._item = Growing(np.int64), Growing(np.int32)
        self._ptr.add([0])
        self._table, self._entered = np.full(FIRST_TABLE, -1, np.int32), 0
        self._missing = np.zeros(LONGEST + 1, np.int32)
        self._arrays: Lists | None = None
        self._handle: Lists

    def add(self, entry: Sequence[int]) -> None:
        """Add a list that is not there yet."""
        self._item.add(entry)
        self._ptr.add([self._item.size])

    def arrays(self) -> Lists:
        """The tables for compiled code, with room behind what is there: the same ones until that is full. Clears ``missing``."""
        count = self._ptr.size - 1
        self._missing[0] = 0
        if 4 * count > len(self._table):
            size = len(self._table)
            while size < 8 * count:
                size *= 2
            self._table, self._entered = np.full(size, -1, np.int32), 0
        found = Lists(ptr=self._ptr.room, item=self._item.room, table=self._table, missing=self._missing)
        if self._arrays is None or not are_same(self._arrays, found):
            self._arrays, self._handle = found, handle(found)
        if self._entered < count:
            fill_table(self._handle, self._entered, count)
        self._entered = count
        return self._arrays


def missing_entry(lists: Lists) -> tuple[int, ...]:
    """The list that compiled code has not found."""
    return tuple(lists.missing[1 : 1 + lists.missing[0]].tolist())
