"""Compiled helpers on arrays, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from numpy.typing import NDArray

from soap.simulator.compiled.arrays import copy, fill, sort
from soap.simulator.compiled.graph_arrays import Longs

longs = st.lists(st.integers(-(2**62), 2**62) | st.integers(-3, 3), max_size=40)


@njit
def sorted_part(array: Longs, first: int, last: int) -> None:
    sort(array, first, last)


@njit
def fill_and_copy(target: Longs, source: Longs, first: int, last: int, value: int) -> None:
    fill(target, 0, len(target), value)
    copy(target, len(target) - (last - first), source, first, last)


def spans(values: list[int]) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, len(values)), st.integers(0, len(values))).map(lambda ends: (min(ends), max(ends)))


@given(st.data(), longs)
def test_sort(data: st.DataObject, values: list[int]) -> None:
    first, last = data.draw(spans(values))
    array: NDArray[np.int64] = np.array(values, np.int64)
    sorted_part(array, first, last)
    assert array.tolist() == [*values[:first], *sorted(values[first:last]), *values[last:]]


@given(st.data(), longs)
def test_fill_and_copy(data: st.DataObject, values: list[int]) -> None:
    first, last = data.draw(spans(values))
    target = np.zeros(last - first + 2, np.int64)
    fill_and_copy(target, np.array(values, np.int64), first, last, -7)
    assert target.tolist() == [-7, -7, *values[first:last]]


def test_parts_are_not_for_python() -> None:
    with pytest.raises(TypeError, match="sort can only be called by compiled code"):
        sort(np.zeros(2, np.int64), 0, 2)
