"""Which rows steps touch: what holds for any counts, and what is known in closed form."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from soap.errors import ModelError
from soap.model.sparse_access import HALVINGS, Lookup, RowAccess, scaled, uniform


def lookups(*indices: int) -> tuple[Lookup, ...]:
    return tuple(Lookup(operator, 0, (0,), count) for operator, count in enumerate(indices))


@st.composite
def accesses(draw: st.DrawFn) -> RowAccess:
    """Any legal counts: each entry between half of the one before and all of it."""
    rows, counts = draw(st.integers(1, 500)), draw(st.lists(st.integers(0, 300), min_size=1, max_size=3))
    most = min(rows, sum(counts))
    touched = [draw(st.integers(min(1, most), most))]
    for _ in range(draw(st.integers(0, 9))):
        touched.append(draw(st.integers(-(-touched[-1] // 2), touched[-1])))
    return RowAccess(rows, lookups(*counts), tuple(touched), measured=draw(st.booleans()))


@given(accesses())
def test_more_look_ups_touch_no_fewer_rows_and_never_more_than_there_are(access: RowAccess) -> None:
    found = [access.touched_by(indices) for indices in range(access.indices + 3)]
    assert found == sorted(found)
    assert all(rows <= min(access.rows, indices) for indices, rows in enumerate(found))
    assert found[-3:] == [access.touched[0]] * 3


@given(accesses())
def test_rows_touched_by_halves_are_the_entries(access: RowAccess) -> None:
    for k, rows in enumerate(access.touched):
        if access.indices % 2**k == 0:
            part = access.indices >> k
            assert access.touched_by(part) == min(part, rows)


@given(accesses(), st.integers(0, 300), st.integers(0, 300))
def test_between_entries_counts_lie_on_the_line(access: RowAccess, a: int, b: int) -> None:
    """Against the interpolation done with exact fractions, by search rather than by shifts."""
    from fractions import Fraction
    from math import ceil

    total, indices = access.indices, min(a + b, access.indices)
    points = [(Fraction(total, 2**k), rows) for k, rows in enumerate(access.touched)]
    above = min((point for point in points if point[0] >= indices), key=lambda point: point[0])
    below = max((point for point in points if point[0] <= indices), key=lambda point: point[0], default=(Fraction(0), 0))
    x0, x1 = below[0], above[0]
    line = Fraction(above[1]) if x0 == x1 else below[1] + (above[1] - below[1]) * (indices - x0) / (x1 - x0)
    assert access.touched_by(indices) == min(indices, ceil(line))


@given(st.integers(1, 10**9), st.lists(st.integers(0, 10**7), min_size=1, max_size=3))
def test_equally_likely_rows(rows: int, counts: list[int]) -> None:
    access = uniform(rows, lookups(*counts))
    total = sum(counts)
    assert len(access.touched) <= HALVINGS + 1
    assert access.touched[0] == pytest.approx(rows * (1 - (1 - 1 / rows) ** total), abs=1 + 1e-6 * total)
    assert (access.measured, access.given, access.source) == (False, False, "assumed")


@pytest.mark.parametrize(
    ("rows", "indices", "touched"),
    [(1, 5, (1, 1, 1)), (2, 2, (2, 1)), (10, 1, (1,)), (10, 0, (0,)), (10, 18, (9, 7, 4, 3, 2)), (1000, 4, (4, 2, 1))],
)
def test_equally_likely_rows_by_hand(rows: int, indices: int, touched: tuple[int, ...]) -> None:
    """10 rows, 18 look-ups: 10 * (1 - 0.9^18) = 8.5; by half of them 6.1; …"""
    assert uniform(rows, lookups(indices)).touched == touched


@given(accesses(), st.floats(0.001, 1))
def test_another_alpha(access: RowAccess, alpha: float) -> None:
    limit = min(access.rows, access.indices)
    wanted = max(1, round(alpha * access.rows))
    assume(wanted <= limit)
    found = scaled(access, alpha)
    assert found.touched[0] == wanted
    assert (found.rows, found.lookups, found.measured, found.source) == (access.rows, access.lookups, access.measured, "given")


def test_another_alpha_keeps_the_overlap_of_parts() -> None:
    access = RowAccess(1000, lookups(400), (100, 60, 30), measured=True)
    assert scaled(access, 0.2).touched == (200, 120, 60)
    assert scaled(access, 0.001).touched == (1, 1, 1)
    assert scaled(access, 0.4).touched == (400, 200, 100)  # no more rows than are looked up


@pytest.mark.parametrize("alpha", [0.0, -0.5, 1.5, 0.5, float("nan")])
def test_impossible_alpha(alpha: float) -> None:
    with pytest.raises(ModelError, match=r"^alpha .*: expected more than 0 and at most 0\.4, since a batch looks up 400 rows of 1000$"):
        scaled(uniform(1000, lookups(400)), alpha)


@pytest.mark.parametrize("touched", [(), (5,), (3, 4), (4, 1), (-1,), (0,), (2, 1, 0)])
def test_impossible_counts(touched: Sequence[int]) -> None:
    with pytest.raises(ModelError, match=r"^rows touched by a batch, its half, … .*: expected whole numbers, at most 4, "):
        RowAccess(10, lookups(4), tuple(touched))
