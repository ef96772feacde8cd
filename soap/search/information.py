"""Which unknown errors of the costs matter to the choice among plans, and what knowing them would be worth.

The times of plans under many draws (``simulator.draws``) follow from the errors' scores, which are independent, with mean 0 and variance 1.
They are explained by as few errors as possible (``respond``): one after the other the error is taken that correlates most with what is
left of the plans' times relative to each other (orthogonal matching pursuit: Pati, Rezaiifar & Krishnaprasad 1993), as long as that
correlation is more than chance gives the best of so many candidates (``CHANCE``). Errors that matter hide each other less in this way than
if each were correlated with the times by itself.

- The *share* of an error is the part of the variance of ln(time / time of the reference) that it explains alone: a first-order Sobol index
  (Sobol' 1993; Saltelli et al., "Global Sensitivity Analysis", 2008).
- The *value of information* of a group of errors is by how much the expected time drops if they are known before a plan is chosen:
  min over plans of E[time] - E[min over plans of E[time | errors of the group]], the expected value of partial perfect information. The
  inner expectation is the regression of the times on the group's scores (Strong, Oakley & Brennan, "Estimating multiparameter partial
  expected value of perfect information from a probabilistic sensitivity analysis sample", 2014), here of ln(time), with a line and a
  parabola for each error. It is what knowing is worth at most: a measurement leaves an error of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Name = tuple[str, ...]

CHANCE = 0.05
"""Probability that an error without any influence is taken, by Bonferroni's bound over all candidates."""
ROUNDING = 1e-12
"""Share of a time below which a value is only how sums were rounded."""
DRAWS_PER_ERROR = 8
"""At most one error is taken for so many draws: each has two coefficients for every plan."""


@dataclass(frozen=True)
class Responses:
    """How the times of plans follow from those errors that matter. ``times_ns``: [plan, draw]. ``names``: of the errors taken, the most
    important first. ``scores``: [error, draw]. ``effects``: [error, plan, draw], by how much an error alone changes ln(time) in each draw,
    on average over all other errors."""

    times_ns: Floats
    names: tuple[Name, ...]
    scores: Floats
    effects: Floats

    def value_ns(self, group: Collection[Name]) -> float:
        """The value of information of errors that become known together, in ns; at least 0."""
        own = [place for place, name in enumerate(self.names) if name in group]
        if not own or len(self.times_ns) < 2:
            return 0.0
        means = self.times_ns.mean(axis=1)
        factors = np.exp(self.effects[own].sum(axis=0))
        informed = means[:, None] * factors / factors.mean(axis=1, keepdims=True)
        value = float(means.min() - informed.min(axis=0).mean())
        return value if value > ROUNDING * means.min() else 0.0

    @property
    def value_of_all_ns(self) -> float:
        """The value of knowing everything: E[min over plans] against the plan that is best on average."""
        return float(self.times_ns.mean(axis=1).min() - self.times_ns.min(axis=0).mean())

    def shares(self, plan: int, reference: int) -> dict[Name, float]:
        """By error, the share of the variance of ln(time of ``plan`` / time of ``reference``) that it explains; at most 1 together."""
        difference = _log_ratio(self.times_ns, plan, reference)
        whole = float(difference @ difference)
        if whole <= 0 or not self.names:
            return dict.fromkeys(self.names, 0.0)
        fitted = _fit(self.scores, difference)
        parts = fitted**2 * (self.scores**2).sum(axis=1) / whole
        return {name: float(part) for name, part in zip(self.names, parts / max(1.0, float(parts.sum())), strict=True)}


def respond(times_ns: Floats, scores: Mapping[Name, Floats], reference: int = 0) -> Responses:
    """Find the errors that decide among plans. ``times_ns``: [plan, draw]. ``scores``: by error, [draw]. ``reference``: the plan to which
    the others are compared."""
    times_ns = np.asarray(times_ns, np.float64)
    names = sorted(scores)
    every = np.array([scores[name] for name in names], np.float64).reshape(len(names), times_ns.shape[1])
    every = every - every.mean(axis=1, keepdims=True)
    taken: dict[int, float] = {}
    for plan in range(len(times_ns)):
        if plan != reference:
            difference = _log_ratio(times_ns, plan, reference)
            for place, explained in _pursue(every, difference):
                taken[place] = max(taken.get(place, 0.0), explained)
    order = sorted(taken, key=lambda place: (-taken[place], names[place]))
    own = every[order]
    return Responses(times_ns, tuple(names[place] for place in order), own, _effects(times_ns, own))


def _pursue(scores: Floats, difference: Floats) -> list[tuple[int, float]]:
    """The errors that explain a difference between two plans, each with its share of the difference's variance."""
    draws = scores.shape[1]
    whole = float(difference @ difference)
    norms = np.sqrt((scores**2).sum(axis=1))
    able = norms > 0
    if whole <= 1e-24 * draws or not able.any():
        return []
    bound = NormalDist().inv_cdf(1 - CHANCE / (2 * int(able.sum()))) ** 2 / draws  # of a squared correlation by chance
    norms[~able] = np.inf
    found: list[int] = []
    coefficients, left = np.zeros(0), difference
    while len(found) < draws // DRAWS_PER_ERROR:
        remaining = float(left @ left)
        if remaining <= 1e-12 * whole:
            break
        alike = (scores @ left) ** 2 / norms**2 / remaining
        best = int(np.argmax(alike))
        if alike[best] <= bound or best in found:
            break
        found.append(best)
        coefficients = _fit(scores[found], difference)
        left = difference - coefficients @ scores[found]
    return [(place, float((own * norms[place]) ** 2 / whole)) for place, own in zip(found, coefficients, strict=True)]


def _effects(times_ns: Floats, scores: Floats) -> Floats:
    """[error, plan, draw]: each error's line and parabola, fitted together to ln(time) of the plans."""
    bends = scores**2 - (scores**2).mean(axis=1, keepdims=True)
    logs = np.log(np.maximum(times_ns, 1.0))
    centred = logs - logs.mean(axis=1, keepdims=True)
    errors = len(scores)
    effects = np.zeros((errors, *times_ns.shape))
    if errors:
        fitted = np.linalg.lstsq(np.concatenate([scores, bends]).T, centred.T, rcond=None)[0]
        effects += fitted[:errors, :, None] * scores[:, None] + fitted[errors:, :, None] * bends[:, None]
    return effects


def _fit(scores: Floats, values: Floats) -> Floats:
    found: Floats = np.asarray(np.linalg.lstsq(scores.T, values, rcond=None)[0], np.float64)
    return found


def _log_ratio(times_ns: Floats, plan: int, reference: int) -> Floats:
    """[draw]: ln(time / reference's time), around its mean."""
    found = np.log(np.maximum(times_ns[plan], 1.0) / np.maximum(times_ns[reference], 1.0))
    centred: Floats = np.asarray(found - found.mean(), np.float64)
    return centred
