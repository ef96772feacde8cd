"""Numbered lists of whole numbers, for compiled code to look up (``state.Lists``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soap.simulator.compiled.communication import fill_table
from soap.simulator.compiled.handles import handle
from soap.simulator.compiled.state import Lists

LONGEST = 1 << 17
"""Items that a list may have at most."""


def make_lists(entries: Sequence[Sequence[int]]) -> Lists:
    """The lists under their positions as numbers."""
    size = 64
    while size < 4 * len(entries):
        size *= 2
    lists = Lists(
        np.cumsum([0, *map(len, entries)], dtype=np.int64),
        np.array([item for entry in entries for item in entry], np.int32),
        np.full(size, -1, np.int32),
        np.zeros(LONGEST + 1, np.int32),
    )
    fill_table(handle(lists))
    return lists


def missing_entry(lists: Lists) -> tuple[int, ...]:
    """What compiled code has looked for in vain."""
    return tuple(lists.missing[1 : 1 + lists.missing[0]].tolist())
