"""Which cores ranks get: their own where they come out even."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.emulation.emulate import BUSIEST, computing_and_communicating, cores_by_rank, usable_cores


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


@pytest.mark.parametrize(
    ("shares", "cores", "expected"),
    [
        ([0.375] * 4, (0, 1), ((0, 1), ())),  # 1.5 cores of two: none can be spared
        ([0.375 / 4] * 4, (0, 1), ((0,), (1,))),
        ([0.125] * 4, (0, 1), ((0,), (1,))),
        ([0.13] * 4, (0, 1), ((0, 1), ())),
        ([0.5] * 4, (3, 5, 6, 7, 9, 11), ((3, 5, 6, 7), (9, 11))),
        ([0.25, 0.25], range(8), ((0,), (1,))),
        ([1.5], range(8), (tuple(range(8)), ())),
    ],
)
def test_cores_that_only_communicate(
    shares: list[float], cores: Sequence[int], expected: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    assert computing_and_communicating(shares, cores) == expected


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=20), st.integers(1, 40))
def test_cores_are_not_shared_where_some_only_communicate(shares: list[float], count: int) -> None:
    computing, communicating = computing_and_communicating(shares, range(count))
    assert computing and computing + communicating == tuple(range(len(computing) + len(communicating)))
    assert len(communicating) <= len(computing)
    assert not communicating or sum(shares) <= BUSIEST * len(computing)


def test_only_what_this_process_may_use() -> None:
    assert set(usable_cores()) == os.sched_getaffinity(0)
