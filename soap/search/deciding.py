"""Which of the plans that a search found is kept: only one that is surely faster than what users know, and of equals the simplest.

All are compared under the same draws of the costs (``simulator.draws``), more of them than the search has seen: a plan that was chosen for
its luck in a few draws has none in others. Plan a *wins* against plan b in a draw if it is faster there. It is *surely* faster if it wins
in at least the share ``confidence`` of the draws, and is faster on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from soap.strategy.config import Strategy

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
    """``kept``: the plan to use. ``leader``: the one with the shortest mean time. ``reference``: what a plan must surely beat, None if
    there is no such plan. ``confidence``: in which share of the ``draws``."""

    kept: Timed
    leader: Timed
    reference: Timed | None
    confidence: float
    draws: int

    @property
    def keeps_reference(self) -> bool:
        """Whether no plan was sure enough."""
        return self.kept is self.reference


def _surely_beats(plan: Timed, reference: Timed | None, confidence: float) -> bool:
    """Whether it wins often enough, and is faster on average: few draws in which it loses by much count, too."""
    return reference is None or (plan.wins(reference) >= confidence and plan.mean_ns < reference.mean_ns)


def decide(plans: Sequence[Timed], reference: Timed | None, confidence: float) -> Decision:
    """Choose among ``plans``. ``reference``: data parallelism if it is possible, else the best start; it is one of the plans or not.

    Of those that surely beat the reference the fastest is taken, or, of those that are as good as it, the simplest; the reference if
    there are none. With a confidence of 0 the leader is taken, whatever it is.
    """
    everyone = list(plans) if reference is None or any(plan is reference for plan in plans) else [reference, *plans]
    leader = min(everyone, key=lambda plan: (plan.mean_ns, plan.complexity))
    sure = [plan for plan in everyone if plan is not reference and _surely_beats(plan, reference, confidence)]
    draws = len(leader.times_ns)
    if confidence == 0:
        return Decision(leader, leader, reference, confidence, draws)
    if not sure:
        assert reference is not None  # without a reference every plan is sure
        return Decision(reference, leader, reference, confidence, draws)
    first = min(sure, key=lambda plan: (plan.mean_ns, plan.complexity))
    alike = [plan for plan in sure if plan is first or (first.wins(plan) < confidence and plan.mean_ns <= ALIKE * first.mean_ns)]
    kept = min(alike, key=lambda plan: (plan.complexity, plan.mean_ns))
    return Decision(kept, leader, reference, confidence, draws)
