"""A library of a few functions, for tests of how Python calls compiled ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from soap.simulator.compiled.graph_arrays import FloatRows, Floats, Ints
from soap.simulator.compiled.handles import arrays_of
from soap.simulator.compiled.jit import compiled
from soap.simulator.compiled.machine_code import Library

SMALL = Library("tests.simulator.compiled.small_library")

NO_ROOM, NO_ENTRY = "there is no room", "there is no such entry"


class Inner(NamedTuple):
    items: Ints


class Outer(NamedTuple):
    cube: np.ndarray[tuple[int, int, int], np.dtype[np.float64]]
    inner: Inner
    matrix: np.ndarray[tuple[int, int], np.dtype[np.int8]]


class Found(NamedTuple):
    numbers: Floats
    rows: FloatRows


@SMALL.entry
def look(outer: Outer, into: Found) -> None:
    found = into.numbers
    found[0], found[1], found[2] = outer.cube.shape
    found[3], found[4] = outer.cube[1, 2, 3], outer.matrix[1, 0]
    found[5], found[6] = len(outer.inner.items), outer.inner.items[-1]
    outer.matrix[0, 1] = 9


@SMALL.entry
def look_at_arrays(outer: Outer, into: Found) -> None:
    plain = arrays_of(outer)
    for i in range(plain.matrix.shape[1]):
        into.rows[1, i] = plain.matrix[1, i] + len(plain.inner.items)
    plain.cube[1, 0, 0] = 7


@compiled
def _half(number: float) -> float:
    return number / 2


@SMALL.entry
def half(number: float) -> float:
    return _half(number)


@SMALL.entry
def is_even(number: int) -> bool:
    return number % 2 == 0


@SMALL.entry
def quarter(number: int, halved: bool) -> int:
    if number == 0:
        raise LookupError(NO_ENTRY)
    if number > 1 << 40:
        raise MemoryError(NO_ROOM)
    return int(half(number)) // (1 if halved else 2)
