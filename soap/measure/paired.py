"""Whether one strategy is really faster than another: by their times turn by turn, each pair measured right behind each other. Whatever
slows a machine down for a while hits both of a pair, so their ratio stays. The median of the ratios, and its interval from their order
alone (the sign test's), assume nothing about how the noise is distributed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

CONFIDENCE = 0.95
"""Confidence that the median of the ratios is at least ``Gain.at_least``."""


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times as fast one strategy is as another. ``at_least``: with ``CONFIDENCE``; 0 if fewer than five rounds tell nothing."""

    ratio: float
    at_least: float
    rounds: int


def gain(usual_ns: Sequence[int], other_ns: Sequence[int]) -> Gain:
    """The other strategy's gain over the usual one, from times of the same rounds. ValueError unless both have equally many."""
    ratios = sorted(usual / max(1, other) for usual, other in zip(usual_ns, other_ns, strict=True))
    if not ratios:
        raise ValueError("no times; expected those of one round at least")
    below = _certainly_below(len(ratios))
    return Gain(median(ratios), 0.0 if below is None else ratios[below], len(ratios))


def _certainly_below(count: int) -> int | None:
    """Position, in order, of the greatest of so many values that is at most the median of their distribution, with ``CONFIDENCE``; None
    if there is none. As many values lie below the median as a coin shows heads in as many throws."""
    likely, place = 0.0, None
    for below in range(count):
        likely += comb(count, below) / 2**count  # probability of at most so many below
        if likely > 1 - CONFIDENCE:
            break
        place = below
    return place
