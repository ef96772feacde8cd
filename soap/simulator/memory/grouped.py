"""Least and greatest values of groups, and ranges of rows, as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Longs = NDArray[np.int64]
Bools = NDArray[np.bool_]

_LIMITS = np.iinfo(np.int64)


def least(keys: Longs, values: Any, size: int, default: Any) -> Longs:
    """[size]: the least of the values with this key; ``default``, a number or one for each key, if there are none."""
    found = np.full(size, _LIMITS.max)
    np.minimum.at(found, keys, np.broadcast_to(values, keys.shape))
    return np.where(found == _LIMITS.max, default, found)


def most(keys: Longs, values: Any, size: int, default: Any) -> Longs:
    """[size]: the greatest of the values with this key; ``default``, a number or one for each key, if there are none."""
    found = np.full(size, _LIMITS.min)
    np.maximum.at(found, keys, np.broadcast_to(values, keys.shape))
    return np.where(found == _LIMITS.min, default, found)


def owners(begins: Longs) -> Longs:
    """For each row of a table the number of its owner, whose rows are ``begins[number]:begins[number + 1]``."""
    return np.repeat(np.arange(len(begins) - 1), np.diff(begins))


def rows_of(begins: Longs, numbers: Longs) -> tuple[Longs, Longs]:
    """(places in ``numbers``, rows): all rows of these owners, one owner after the other."""
    counts = begins[numbers + 1] - begins[numbers]
    place = np.repeat(np.arange(len(numbers)), counts)
    within = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
    return place, begins[numbers][place] + within


def distinct(keys: Longs) -> Longs:
    """All keys once, ascending. Fast where they nearly are."""
    found = np.sort(keys, kind="stable")
    return found[np.append(True, found[1:] != found[:-1])] if len(found) else found


def total(keys: Longs, values: Any, size: int) -> Longs:
    """[size]: the sum of the values with this key."""
    found = np.zeros(size, np.int64)
    np.add.at(found, keys, np.broadcast_to(values, keys.shape))
    return found


def any_of(keys: Longs, size: int) -> Bools:
    """[size]: whether a key is there."""
    found = np.zeros(size, np.bool_)
    found[keys] = True
    return found


def number_groups(*columns: Longs) -> tuple[Longs, Longs]:
    """(number of each row's group, first row of each group). Rows with equal values in all columns are a group; groups are numbered in the
    order of these values, of the first column first."""
    order = np.lexsort(columns[::-1])
    new = np.ones(len(order), np.bool_)
    new[1:] = np.any([np.diff(column[order]) for column in columns], axis=0)
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.cumsum(new) - 1
    return numbers, order[new]
