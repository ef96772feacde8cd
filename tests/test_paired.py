"""What turns of two strategies, in pairs, say of their times."""

from __future__ import annotations

from itertools import product
from statistics import median

import pytest

from soap.measure.paired import CONFIDENCE, gain


def test_the_interval_of_a_median_is_that_of_the_sign_test() -> None:
    ratios = [1.3, 0.9, 1.2, 1.1, 1.25, 1.15, 1.05, 1.4]
    found = gain([round(1000 * ratio) for ratio in ratios], [1000] * len(ratios))
    # Of eight, at most one below the median has a probability of 9/256, at most two of 37/256.
    assert (found.ratio, found.at_least, found.rounds) == (pytest.approx(median(ratios)), 1.05, 8)


@pytest.mark.parametrize(("rounds", "place"), [(5, 0), (7, 0), (8, 1), (13, 3), (20, 5)])
def test_its_lower_end_is_above_the_median_no_more_often_than_it_says(rounds: int, place: int) -> None:
    ratios = list(range(101, 101 + rounds))
    assert gain([100 * one for one in ratios], [100] * rounds).at_least == ratios[place]
    if rounds <= 13:  # all ways in which values can lie beside their median
        wrong = sum(sum(below) <= place for below in product((0, 1), repeat=rounds))
        assert wrong / 2**rounds <= 1 - CONFIDENCE


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_few_rounds_tell_nothing_however_clear(rounds: int) -> None:
    found = gain([300] * rounds, [100] * rounds)
    assert (found.ratio, found.at_least, found.rounds) == (3.0, 0.0, rounds)


def test_what_hits_both_of_a_pair_does_not_count() -> None:
    slow = [1, 1, 7, 1, 3, 1, 1, 20, 1, 1]
    assert gain([110 * one for one in slow], [100 * one for one in slow]).at_least == pytest.approx(1.1)


@pytest.mark.parametrize(("usual", "other"), [([], []), ([1], [1, 2])])
def test_times_that_are_no_pairs_are_refused(usual: list[int], other: list[int]) -> None:
    with pytest.raises(ValueError, match=r"no times|argument"):
        gain(usual, other)
