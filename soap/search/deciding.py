"""Two of the plans that a search found: the fastest on average, and a safe one, which is surely faster than what users know, and of equals
the simplest.

All are compared under the same draws of the costs (``simulator.draws``), more of them than the search has seen: a plan that was chosen for
its luck in a few draws has none in others. Plan a *wins* against plan b in a draw if it is faster there. It is *surely* faster if it wins
in at least the share ``confidence`` of the draws, and is faster on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from soap.strategy.config import Strategy

Answer: TypeAlias = Literal["fastest", "safe"]
FASTEST: Answer = "fastest"
SAFE: Answer = "safe"

DEFAULT_CONFIDENCE = 0.9
LEAST_CHANCE = 0.1
"""A plan that is faster in at most this share of the draws is neither run nor worth measuring for, whatever confidence is asked for."""
DECIDING_DRAWS = 64
"""With 64 draws a share of 0.9 is known to within 0.07 (two standard deviations of a binomial share)."""

ALIKE = 1.01
"""A plan is as good as the fastest one if that does not surely beat it and their mean times differ by at most this factor."""

RANGE = (0.1, 0.9)
"""Quantiles between which 80% of the draws lie."""


@dataclass(frozen=True)
class Timed:
    """A plan with its times under all draws, in ns. ``usual_ns``: under the most likely costs. ``unlike``: operators and parameters
    that are configured unlike the plan that it must beat. ``messages``: communications in an iteration."""

    name: str
    strategy: Strategy
    usual_ns: int
    times_ns: tuple[int, ...]
    unlike: int = 0
    messages: int = 0

    @cached_property
    def _times(self) -> NDArray[np.float64]:
        return np.array(self.times_ns, np.float64)

    def wins(self, other: Timed) -> float:
        """The share of the draws in which it is faster than another plan; equal times count half."""
        return float(np.mean((self._times < other._times) + 0.5 * (self._times == other._times)))

    def gains(self, other: Timed) -> NDArray[np.float64]:
        """[draw]: how many times as fast as another plan it is."""
        gains: NDArray[np.float64] = other._times / self._times
        return gains

    @property
    def mean_ns(self) -> float:
        """Its mean time."""
        return float(self._times.mean())

    def quantiles_ns(self, shares: Sequence[float] = RANGE) -> list[int]:
        """The times that such shares of the draws are below."""
        return [round(float(own)) for own in np.quantile(self._times, shares)]

    @property
    def complexity(self) -> tuple[int, int]:
        """The simpler of two plans has the smaller one."""
        return self.unlike, self.messages


@dataclass(frozen=True)
class Decision:
    """``safe``: the fastest plan that surely beats ``reference``, or, of those that are as good as it, the simplest; the reference if there
    are none, which is None if there is nothing to beat. ``fastest``: the plan with the shortest mean time; the safe one if that is as good.
    ``confidence``: in which share of the ``draws`` a safe plan must be faster. ``answer``: which of both is to be used."""

    fastest: Timed
    safe: Timed
    reference: Timed | None
    confidence: float
    draws: int
    answer: Answer

    @property
    def kept(self) -> Timed:
        """The plan to use."""
        return self.fastest if self.answer == FASTEST else self.safe

    @property
    def other_answer(self) -> Answer:
        """Which of both plans is not the answer, though it may be the same plan."""
        return SAFE if self.answer == FASTEST else FASTEST


def _surely_beats(plan: Timed, reference: Timed | None, confidence: float) -> bool:
    """Whether it wins often enough, and is faster on average: few draws in which it loses by much count, too."""
    return reference is None or (plan.wins(reference) >= confidence and plan.mean_ns < reference.mean_ns)


def decide(plans: Sequence[Timed], reference: Timed | None, confidence: float) -> Decision:
    """The fastest and the safe one of ``plans``. ``reference``: data parallelism if it is possible, else the best start; it is one of the
    plans or not. ``confidence``: how often the safe one must win; it is the answer, unless that is 0: then the fastest one is, and the safe
    one is that of ``DEFAULT_CONFIDENCE``."""
    everyone = list(plans) if reference is None or any(plan is reference for plan in plans) else [reference, *plans]
    fastest = min(everyone, key=lambda plan: (plan.mean_ns, plan.complexity))
    asked = confidence or DEFAULT_CONFIDENCE
    sure = [plan for plan in everyone if plan is not reference and _surely_beats(plan, reference, asked)]
    safe = _safe(sure, reference, asked)
    if any(plan is fastest for plan in sure):  # then the safe one is as good as it, and no less simple
        fastest = safe
    return Decision(fastest, safe, reference, asked, len(fastest.times_ns), SAFE if confidence else FASTEST)


def _safe(sure: Sequence[Timed], reference: Timed | None, confidence: float) -> Timed:
    """``sure``: the plans that surely beat the reference."""
    if not sure:
        assert reference is not None  # without a reference every plan is sure
        return reference
    first = min(sure, key=lambda plan: (plan.mean_ns, plan.complexity))
    alike = [plan for plan in sure if plan is first or (first.wins(plan) < confidence and plan.mean_ns <= ALIKE * first.mean_ns)]
    return min(alike, key=lambda plan: (plan.complexity, plan.mean_ns))
