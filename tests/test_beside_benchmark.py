"""``benchmarks.beside_emulated``: which steps of two trainings are compared."""

from __future__ import annotations

import pytest

from benchmarks.beside_emulated import LEAST_COUNTED, together_ns
from soap.errors import RuntimeFailure
from soap.measure.iteration import WARM_UP_STEPS


def test_steps_count_while_both_train() -> None:
    """The second one is alone from 100 on, and quicker then; the first steps of each are none."""
    first = [*range(-50 * WARM_UP_STEPS, 0, 50), 0, *range(10, 101, 10)]
    second = [*range(-30 * WARM_UP_STEPS, 0, 30), 0, *range(20, 101, 20), *range(105, 200, 5)]
    assert together_ns([first, second]) == [10, 20]
    assert together_ns([second]) == [5]


def test_too_few_steps_together_are_one_line() -> None:
    first, second = [*range(0, 100, 10)], [*range(60, 200, 10)]
    with pytest.raises(RuntimeFailure, match=f"2 steps of a training while all train; expected {LEAST_COUNTED}: try more --seconds"):
        together_ns([first, second])
