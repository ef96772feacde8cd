"""The search finds the global optimum of small nets; ``benchmarks.optimality`` does the same with 100 seeds."""

from __future__ import annotations

import pytest

from benchmarks.optimality import SMALL, Small, find
from tests.extent import often

SEEDS, ENOUGH = 10, 9
QUICK = [small for small in SMALL if small.devices < 4]
"""Branch and bound takes minutes for what is left out here."""
PAIRS = [small for small in QUICK if small.devices == 2 and small.net.__name__ != "rnnlm"]


@pytest.mark.slow
@pytest.mark.parametrize("small", often(QUICK, PAIRS), ids=lambda own: f"{own.net.__name__}-{own.devices}")
def test_the_global_optimum_is_found(small: Small) -> None:
    found = find(small, SEEDS)
    assert found.strategies > 10**6
    assert found.count >= ENOUGH
