"""The fastest plan and the safe one: only a sure one is safe, and of equals the simplest."""

from __future__ import annotations

import pytest

from soap.search.deciding import DEFAULT_CONFIDENCE, Timed, decide
from soap.strategy.config import Strategy


def plan(name: str, *times: int, unlike: int = 0, messages: int = 0) -> Timed:
    return Timed(name, Strategy({}), times[0], times, unlike, messages)


USUAL = plan("data_parallel", 100, 100, 100, 100)


def test_a_plan_that_wins_often_enough_is_taken() -> None:
    found = plan("found", 90, 95, 99, 101, unlike=3)
    for confidence, kept in ((0.75, found), (0.76, USUAL)):
        decision = decide([found, USUAL], USUAL, confidence)
        assert decision.kept is decision.safe is kept and decision.fastest is found and found.wins(USUAL) == 0.75
        assert (decision.answer, decision.confidence) == ("safe", confidence)


def test_equal_times_are_half_a_win() -> None:
    assert plan("same", 100, 100, 90, 110).wins(USUAL) == 0.5


def test_of_equals_the_simplest_is_taken() -> None:
    best = plan("best", 80, 80, 81, 82, unlike=40)
    simple = plan("simple", 80, 81, 81, 81, unlike=2, messages=9)
    simpler = plan("simpler", 80, 81, 81, 81, unlike=2, messages=3)
    slower = plan("slower", 83, 83, 84, 84, unlike=1)
    decision = decide([best, simple, simpler, slower], USUAL, 0.9)
    assert decision.safe is decision.fastest is simpler
    unsure = plan("unsure", 70, 70, 70, 110, unlike=50)
    decision = decide([best, simple, simpler, unsure], USUAL, 0.9)
    assert decision.safe is simpler and decision.fastest is unsure
    assert decide([best, slower], USUAL, 0.9).kept is best  # it surely beats the simpler one


def test_a_simple_plan_that_is_much_slower_in_some_draws_is_no_equal() -> None:
    best, simple = plan("best", 80, 80, 80, 80, unlike=9), plan("simple", 79, 79, 99, 99)
    assert decide([best, simple], USUAL, 0.9).kept is best


def test_data_parallelism_that_leads_is_kept() -> None:
    decision = decide([plan("found", 120, 120, 99, 120)], USUAL, 0.9)
    assert decision.kept is decision.fastest is decision.safe is USUAL


def test_without_confidence_the_fastest_is_taken_and_without_a_reference_the_best() -> None:
    found = plan("found", 99, 99, 99, 102, unlike=3)
    decision = decide([found], USUAL, 0.0)
    assert decision.kept is decision.fastest is found and decision.safe is USUAL  # by the default confidence
    assert (decision.answer, decision.other_answer, decision.confidence) == ("fastest", "safe", DEFAULT_CONFIDENCE)
    assert decide([found, plan("other", 200, 200, 200, 200)], None, 0.9).kept is found


@pytest.mark.parametrize("confidence", [0.5, 0.9, 1.0])
def test_quantiles_and_gains(confidence: float) -> None:
    found = plan("found", 50, 25, 200, 100)
    assert found.gains(USUAL).tolist() == [2.0, 4.0, 0.5, 1.0]
    assert found.quantiles_ns((0.0, 0.5, 1.0)) == [25, 75, 200]
    assert decide([found], USUAL, confidence).kept is (found if confidence == 0.5 else USUAL)


def test_a_plan_that_is_slower_on_average_is_not_taken_however_often_it_wins() -> None:
    usual, rarely_slow = plan("data_parallel", *[100] * 64), plan("found", *[99] * 60, *[300] * 4)
    decision = decide([rarely_slow], usual, 0.9)
    assert decision.kept is decision.fastest is usual and rarely_slow.wins(usual) > 0.9
    mostly_slow = plan("found", 90, 90, 90, *[105] * 7)
    usual = plan("data_parallel", *[100] * 10)
    assert decide([mostly_slow], usual, 0.3).kept is usual
    lucky = plan("lucky", 10, 10, 10, *[105] * 7)
    assert decide([lucky], usual, 0.3).kept is lucky and decide([lucky], usual, 0.31).kept is usual
