"""Regions of all tiles of an operator at once: arrays of int64 [tile, dimension, start or stop]."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from soap.model.regions import Box
from soap.simulator.compiled.graph_arrays import Longs


def volumes(region: np.ndarray) -> Longs:
    """[tile]: elements in its region."""
    found: Longs = np.prod(region[:, :, 1] - region[:, :, 0], axis=1, dtype=np.int64)
    return found


def distinct(region: np.ndarray) -> tuple[Longs, Longs]:
    """(first tiles of distinct regions, [tile]: which of these its region is). Many tiles, as there are with micro-batches, have few."""
    place = np.zeros(len(region), np.int64)
    for column in region.reshape(len(region), -1).T:
        if (column != column[0]).any():
            lowest, highest = int(column.min()), int(column.max())
            place = np.unique(place * (highest - lowest + 1) + column - lowest, return_inverse=True)[1]
    _, first, place = np.unique(place, return_index=True, return_inverse=True)
    return first, place


def by_lengths(intervals: np.ndarray, of: Callable[[Box], int]) -> Longs:
    """[tile]: what follows from the lengths of its intervals alone, worked out once for equal ones."""
    first, place = distinct(intervals[:, :, 1] - intervals[:, :, 0])
    return np.array([of(cell) for cell in boxes_of(intervals[first])], np.int64)[place]


def boxes_of(region: np.ndarray) -> list[Box]:
    """The regions as boxes."""
    return [tuple((start, stop) for start, stop in box) for box in region.tolist()]
