"""What compiled code sees of a structure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from soap.simulator.compiled.handles import arrays_of, handle
from soap.simulator.compiled.jit import entry


class Inner(NamedTuple):
    items: NDArray[np.int32]


class Outer(NamedTuple):
    cube: NDArray[np.float64]
    inner: Inner
    matrix: NDArray[np.int8]


@entry
def look(outer: Outer, found: NDArray[np.float64]) -> None:
    found[0], found[1], found[2] = outer.cube.shape
    found[3], found[4] = outer.cube[1, 2, 3], outer.matrix[1, 0]
    found[5], found[6] = len(outer.inner.items), outer.inner.items[-1]
    outer.matrix[0, 1] = 9


@pytest.mark.parametrize("part", [lambda inner: inner, handle], ids=["structure", "handle"])
def test_fields_are_the_structures_own_arrays(part: Callable[[Inner], Inner]) -> None:
    cube, matrix = np.arange(24.0).reshape(2, 3, 4), np.arange(6, dtype=np.int8).reshape(3, 2)
    found = np.zeros(7)
    look(handle(Outer(cube, part(Inner(np.arange(5, dtype=np.int32))), matrix)), found)
    assert found.tolist() == [2, 3, 4, cube[1, 2, 3], matrix[1, 0], 5, 4]
    assert matrix[0, 1] == 9


def test_types_differ_if_those_of_parts_do() -> None:
    cube, matrix = np.zeros((2, 3, 4)), np.zeros((3, 2), np.int8)
    inner = (Inner(np.zeros(5, kind)) for kind in (np.int32, np.int32, np.int64))
    same, again, other = (handle(Outer(cube, part, matrix)) for part in inner)
    kinds = [own._numba_type_ for own in cast(list[Any], [same, again, other])]
    assert kinds[0] == kinds[1] != kinds[2]


@entry
def look_at_arrays(outer: Outer, found: NDArray[np.float64]) -> None:
    plain = arrays_of(outer)
    for i in range(plain.matrix.shape[1]):
        found[i] = plain.matrix[1, i] + len(plain.inner.items)
    plain.cube[1, 0, 0] = 7


def test_arrays_of_a_handle_are_the_structures_own() -> None:
    cube, found = np.zeros((2, 3, 4)), np.zeros(3)
    look_at_arrays(handle(Outer(cube, Inner(np.arange(5, dtype=np.int32)), np.arange(6, dtype=np.int8).reshape(2, 3))), found)
    assert found.tolist() == [8, 9, 10]
    assert cube[1, 0, 0] == 7


def test_arrays_are_contiguous() -> None:
    with pytest.raises(ValueError, match="items of Inner is not contiguous"):
        handle(Inner(np.zeros(4, np.int32)[::2]))
