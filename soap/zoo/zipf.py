"""Ids that are distributed like words and users' ids: a few are frequent, most are rare. How uneven they are is solved from how many
different ones a batch has.

Rank r of ``rows`` (the most frequent is 0) has the probability that the density x^-s has on [r + 1, r + 2) within [1, rows + 1): Zipf's
law with exponent s, in a form whose sums are known. For s = 1 it is the log-uniform distribution from which sampled softmax draws
candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import expm1, gcd, log, log1p, log10
from typing import Any

import torch
from torch import Tensor

MOST_EXPONENT = 20.0
"""Largest exponent: nearly all draws are then of one row."""
STEPS = 60
"""Steps of bisection: exact to double precision."""
EXACT, BINS = 2048, 2048
"""Number of ranks that are summed one by one, and of bins, ever wider, for those behind them."""


@dataclass(frozen=True)
class Zipf:
    """The distribution over ranks 0 to ``rows`` - 1."""

    rows: int
    exponent: float

    def probability(self, ranks: Tensor) -> Tensor:
        """Probability of one draw, for ranks of a floating-point type."""
        return self._below(ranks + 1) - self._below(ranks)

    def draw(self, *shape: int) -> Tensor:
        """Ids, drawn independently by the default generator on the default device."""
        along = torch.rand(shape, dtype=torch.float64)
        power = 1 - self.exponent
        if abs(power) < 1e-9:
            ends = torch.exp(along * log(self.rows + 1))
        else:
            ends = (1 + along * expm1(power * log(self.rows + 1))) ** (1 / power)
        return self.ids((ends - 1).long().clamp(0, self.rows - 1))

    def draw_different(self, count: int) -> Tensor:
        """Ids, no two of them equal, as if drawn one after the other, with repeated ones put back."""
        ranks = torch.arange(self.rows, dtype=torch.float64)
        noise = -torch.log(-torch.log(torch.rand(self.rows, dtype=torch.float64)))
        return self.ids(torch.topk(torch.log(self.probability(ranks)) + noise, count).indices)

    def ids(self, ranks: Tensor) -> Tensor:
        """Ids of ranks. Frequent ids are spread over all rows, as hashing spreads them, so that equal parts of a table are read equally
        often."""
        return ranks * _multiplier(self.rows) % self.rows

    def ranks(self, ids: Tensor) -> Tensor:
        """The inverse of ``ids``."""
        return ids * pow(_multiplier(self.rows), -1, self.rows) % self.rows if self.rows > 1 else ids

    def different(self, draws: float) -> float:
        """How many different ids so many draws are expected to have."""
        edges = _edges(self.rows)
        counts = edges[1:] - edges[:-1]
        each = (self._below(edges[1:]) - self._below(edges[:-1])) / counts
        return float((counts * -torch.expm1(draws * torch.log1p(-each.clamp(max=1 - 1e-15)))).sum())

    def draws_for(self, different: float) -> float:
        """How many draws are expected to have so many different ids, fewer than there are."""
        low, high = 0.0, float(different)
        while self.different(high) < different:
            low, high = high, 2 * high
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.different(middle) < different else (low, middle)
        return high

    def _below(self, ranks: Tensor) -> Tensor:
        """Probability of all ranks below these."""
        power = 1 - self.exponent
        if abs(power) < 1e-9:
            return torch.log1p(ranks) / log1p(self.rows)
        return torch.expm1(power * torch.log1p(ranks)) / expm1(power * log1p(self.rows))


@cache
def zipf(rows: int, draws: int, alpha: float) -> Zipf:
    """The distribution from which so many draws touch a share ``alpha`` of the rows on average; equally likely rows if that share is
    too large."""
    low, high = 0.0, MOST_EXPONENT
    if Zipf(rows, low).different(draws) <= alpha * rows:
        return Zipf(rows, low)
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if Zipf(rows, middle).different(draws) > alpha * rows else (low, middle)
    return Zipf(rows, (low + high) / 2)


def repeating(rows: int, draws: int, share: float) -> Zipf:
    """The distribution from which so many draws have this share of different ids, or fewer if there are fewer rows."""
    return zipf(rows, draws, min(1.0, share * draws / rows))


def _edges(rows: int) -> Tensor:
    """Edges of bins of ranks, on the CPU whatever the default device is."""
    options: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    if rows <= EXACT:
        return torch.arange(rows + 1, **options)
    rest = torch.logspace(log10(EXACT), log10(rows), BINS + 1, **options).round()
    return torch.cat([torch.arange(EXACT, **options), torch.unique_consecutive(rest)])


@cache
def _multiplier(rows: int) -> int:
    """A number without common divisor with ``rows``, near their golden section, so that neighbours are mapped far apart."""
    number = max(1, round(rows * 0.618033988749895))
    while gcd(number, rows) != 1:
        number += 1
    return number
