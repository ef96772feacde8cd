"""As few runs as fit: how often memory is asked about."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from soap.search.to_fit import Step, fewest
from soap.strategy.config import Strategy

STEPS = [Step(run, 1, 10, 5) for run in range(160)]


def strategy_with(marks: Mapping[int, int]) -> Strategy:
    return Strategy({}, prefetch=len(marks))


@pytest.mark.parametrize("needed", [0, 1, 37, 80, 110, 159, 160])
def test_layers_that_save_alike_are_found_on_a_line(needed: int) -> None:
    """The share of the limit falls by a hundredth with each; a binary search asks 8 times."""
    asked = list[int]()

    def peak_share(strategy: Strategy) -> float:
        asked.append(strategy.prefetch)
        return 1 - (strategy.prefetch - needed) / 100

    found = fewest(STEPS, 160, strategy_with, peak_share)
    assert found.runs == found.strategy.prefetch == max(1, needed) and len(asked) <= 5
    assert needed in (0, 160) or {needed - 1, needed} - {0} <= {*asked}


def test_what_does_not_fall_on_a_line_is_halved() -> None:
    draw = random.Random(3)
    for _ in range(50):
        steps = [Step(run, 1, draw.randrange(1, 100), draw.randrange(1, 9)) for run in range(120)]
        shares = sorted((draw.random() * 2 for _ in range(121)), reverse=True)
        asked = list[int]()

        def peak_share(strategy: Strategy, shares: list[float] = shares, asked: list[int] = asked) -> float:
            asked.append(strategy.prefetch)
            return shares[strategy.prefetch]

        found = fewest(steps, 120, strategy_with, peak_share)
        assert found.runs == next((count for count in range(1, 121) if shares[count] <= 1), 120)
        assert len(asked) == len({*asked}) <= 14
