"""What decides a choice, where it is known by construction."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from numpy.typing import NDArray

from soap.search.information import Name, Responses, respond
from soap.simulator.draws import Draws, Error

NORMAL = NormalDist()
DRAWS = 512
Floats = NDArray[np.float64]


def scores(names: list[str], draws: int = DRAWS, seed: int = 0) -> dict[Name, Floats]:
    """As draws of costs have them."""
    source = Draws(None, draws, seed)  # type: ignore[arg-type]
    return {(name,): np.log(source.factors([Error((name,), 1.0)])) for name in names}


def other_errors(count: int) -> list[str]:
    return [f"other {number}" for number in range(count)]


def best_of_two(usual: float, mean: float, spread: float) -> float:
    """E[min(c exp(spread z), usual)] with E[c exp(spread z)] = mean: usual less the price of a put option (Black & Scholes 1973)."""
    d1 = (math.log(mean / usual) + spread**2 / 2) / spread
    return usual - (usual * NORMAL.cdf(-(d1 - spread)) - mean * NORMAL.cdf(-d1))


def test_shares_are_those_of_the_variances_that_make_the_difference() -> None:
    known = scores(["a", "b", "c", *other_errors(200)])
    log_ratio = 0.3 * known["a",] - 0.2 * known["b",] + 0.1 * known["c",]
    found = respond(np.array([1e6 * np.exp(log_ratio), np.full(DRAWS, 1e6)]), known, reference=1)
    assert found.names == (("a",), ("b",), ("c",))
    shares = found.shares(0, 1)
    for name, variance in zip("abc", (0.09, 0.04, 0.01), strict=True):
        assert shares[name,] == pytest.approx(variance / 0.14, abs=0.03)
    assert sum(shares.values()) == pytest.approx(1, abs=1e-9)


def test_what_makes_both_plans_alike_slower_decides_nothing() -> None:
    known = scores(["both", "one", *other_errors(50)])
    both = np.exp(0.5 * known["both",])
    found = respond(np.array([1e6 * both * np.exp(0.1 * known["one",]), 1e6 * both]), known, reference=1)
    assert found.names == (("one",),)
    assert found.shares(0, 1)["one",] == pytest.approx(1)


@pytest.mark.parametrize("seed", range(8))
def test_chance_is_not_taken_for_influence(seed: int) -> None:
    """With 300 errors the best of them correlates by chance, and is left out."""
    known = scores(other_errors(300), draws=64, seed=seed)
    noise = np.random.default_rng(seed).normal(size=64)
    largest = max(float(own @ noise) ** 2 / float(own @ own) / float(noise @ noise) for own in known.values())
    found = respond(np.array([1e6 * np.exp(0.1 * noise), np.full(64, 1e6)]), known, reference=1)
    assert largest > 0.05 and sum(found.shares(0, 1).values()) < 0.25 and len(found.names) <= 1


@pytest.mark.parametrize("mean", [0.9, 0.98, 1.0, 1.05])
def test_value_of_information_is_that_of_the_closed_form(mean: float) -> None:
    """One plan's time is exp(s z), the other's is known: what knowing z is worth is an option's price."""
    spread, usual = 0.2, 1e7
    known = scores(["a", *other_errors(100)])
    times = mean * usual * np.exp(spread * known["a",] - spread**2 / 2)
    found = respond(np.array([times, np.full(DRAWS, usual)]), known, reference=1)
    expected = min(mean * usual, usual) - best_of_two(usual, mean * usual, spread)
    assert found.value_ns([("a",)]) == pytest.approx(expected, rel=0.03)
    assert found.value_of_all_ns == pytest.approx(expected, rel=0.03)
    assert found.value_ns([("other 1",)]) == found.value_ns([]) == 0


def test_two_errors_are_worth_what_their_sum_is_to_one_plan() -> None:
    """The rest of the uncertainty, which no candidate explains, is averaged over."""
    known = scores(["a", "b", "hidden", *other_errors(60)])
    hidden = known.pop(("hidden",))
    usual, spread = 1e7, math.hypot(0.12, 0.16)
    times = usual * np.exp(0.12 * known["a",] - 0.16 * known["b",] + 0.05 * hidden - (spread**2 + 0.05**2) / 2)
    found = respond(np.array([times, np.full(DRAWS, usual)]), known, reference=1)
    assert set(found.names) == {("a",), ("b",)}
    both = found.value_ns([("a",), ("b",)])
    assert both == pytest.approx(usual - best_of_two(usual, usual, spread), rel=0.05)
    for name, alone in (("a", 0.12), ("b", 0.16)):
        assert found.value_ns([(name,)]) == pytest.approx(usual - best_of_two(usual, usual, alone), rel=0.08)
    assert both < found.value_of_all_ns < 1.1 * both


def test_a_plan_that_always_wins_leaves_nothing_to_know() -> None:
    known = scores(["a"])
    found = respond(np.array([1e6 * np.exp(0.05 * known["a",]), np.full(DRAWS, 2e6)]), known, reference=1)
    assert found.names == (("a",),) and found.value_ns([("a",)]) == 0 == found.value_of_all_ns


def test_of_three_plans_an_error_counts_that_decides_between_any_two() -> None:
    known = scores(["a", "b", *other_errors(20)])
    plans = np.array([np.full(DRAWS, 1e6), 1e6 * np.exp(0.1 * known["a",]), 1e6 * np.exp(0.2 * known["b",])])
    found = respond(plans, known, reference=0)
    assert set(found.names) == {("a",), ("b",)}
    assert found.shares(1, 0)["a",] == pytest.approx(1, abs=0.01) and found.shares(2, 0)["b",] == pytest.approx(1, abs=0.01)
    assert found.shares(1, 0)["b",] == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("times", [[[5.0] * 64], [[5.0] * 64, [5.0] * 64]])
def test_equal_or_single_plans_have_nothing_that_decides(times: list[list[float]]) -> None:
    found = respond(np.array(times), scores(["a"], 64))
    assert isinstance(found, Responses) and found.names == () and found.value_ns([("a",)]) == 0


def test_an_error_without_spread_over_the_draws_is_no_candidate() -> None:
    known = scores(["a"], 64) | {("flat",): np.zeros(64)}
    found = respond(np.array([1e6 * np.exp(0.1 * known["a",]), np.full(64, 1e6)]), known, reference=1)
    assert found.names == (("a",),)
