"""Which cores ranks get: their own where they come out even."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.emulation.cores import cores_by_rank, usable_cores


@pytest.mark.parametrize(
    ("ranks", "cores", "expected"),
    [
        (4, (0, 1), ((0,), (1,), (0,), (1,))),
        (2, (2, 3, 5, 7), ((2, 3), (5, 7))),
        (3, (0, 1), ((0, 1), (0, 1), (0, 1))),
        (1, (4,), ((4,),)),
    ],
)
def test_cores(ranks: int, cores: tuple[int, ...], expected: tuple[tuple[int, ...], ...]) -> None:
    assert cores_by_rank(ranks, cores) == expected


@given(st.integers(1, 40), st.integers(1, 16))
def test_all_cores_are_used_alike(ranks: int, count: int) -> None:
    found = cores_by_rank(ranks, range(count))
    users = [sum(core in own for own in found) for core in range(count)]
    assert len(found) == ranks and len(set(users)) == 1 and users[0] > 0


def test_only_what_this_process_may_use() -> None:
    assert set(usable_cores()) == os.sched_getaffinity(0)
