"""Numbered lists of whole numbers, for compiled code to look up (``state.Lists``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soap.simulator.compiled.communication import fill_table
from soap.simulator.compiled.growing import Growing
from soap.simulator.compiled.handles import handle
from soap.simulator.compiled.state import Lists

LONGEST = 1 << 17
"""Items that a list may have at most."""


class GrowingLists:
    """Lists under numbers in the order in which they were added. What is added takes time in proportion to its own length."""

    def __init__(self) -> None:
        self._ptr, self._item = Growing(np.int64), Growing(np.int32)
        self._ptr.add([0])
        self._table, self._entered = np.full(64, -1, np.int32), 0
        self._missing = np.zeros(LONGEST + 1, np.int32)

    def add(self, entry: Sequence[int]) -> None:
        """One more list, which is not there yet."""
        self._item.add(entry)
        self._ptr.add([self._item.size])

    def arrays(self) -> Lists:
        """For compiled code, valid until the next call. Nothing is missing."""
        count = self._ptr.size - 1
        if 4 * count > len(self._table):
            size = len(self._table)
            while size < 8 * count:
                size *= 2
            self._table, self._entered = np.full(size, -1, np.int32), 0
        self._missing[0] = 0
        lists = Lists(ptr=self._ptr.array(), item=self._item.array(), table=self._table, missing=self._missing)
        if self._entered < count:
            fill_table(handle(lists), self._entered)
        self._entered = count
        return lists


def missing_entry(lists: Lists) -> tuple[int, ...]:
    """What compiled code has looked for in vain."""
    return tuple(lists.missing[1 : 1 + lists.missing[0]].tolist())
