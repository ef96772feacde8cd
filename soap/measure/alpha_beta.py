"""Alpha-beta fits: time = alpha + beta * bytes, from measurements of which some may be far off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from soap.errors import ProfileError


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """Time of ``alpha_seconds`` for no bytes, and ``beta_seconds_per_byte`` more for each byte. ``deviation``: the median of |fit /
    measured - 1|."""

    alpha_seconds: float
    beta_seconds_per_byte: float
    deviation: float

    def seconds(self, size_bytes: int) -> float:
        """Seconds for so many bytes."""
        return self.alpha_seconds + self.beta_seconds_per_byte * size_bytes


def fit(sizes_bytes: Sequence[int], seconds: Sequence[float]) -> AlphaBeta:
    """The line with the least sum of |log(fit / measured)| among the lines through two of the points, and those through one that are
    level or begin at 0. Neither figure is negative.

    Logarithms, because small and large messages matter alike, and half the time is as wrong as twice the time. By |fit / measured - 1|
    a time of zero would only be an error of one, and a level line through some short messages would seem good enough for all. Absolute,
    not squared, so that a measurement which another program has slowed down counts little. ProfileError without two different sizes, or
    for times that are not above 0.
    """
    x, y = np.asarray(sizes_bytes, float), np.asarray(seconds, float)
    if x.shape != y.shape or len(np.unique(x)) < 2 or (x < 0).any() or not (np.isfinite(y) & (y > 0)).all():
        raise ProfileError("a fit needs times above 0 of at least two different sizes; measure more sizes")
    first, second = np.triu_indices(len(x), 1)
    apart = x[first] != x[second]
    first, second = first[apart], second[apart]
    slopes = (y[second] - y[first]) / (x[second] - x[first])
    level, steep = np.zeros_like(y), y[x > 0] / x[x > 0]
    betas = np.concatenate([slopes, level, steep])
    alphas = np.concatenate([y[first] - slopes * x[first], y, np.zeros_like(steep)])
    legal = (betas >= 0) & (alphas >= 0)
    alphas, betas = alphas[legal], betas[legal]
    ratios = (alphas[:, None] + betas[:, None] * x) / y
    with np.errstate(divide="ignore"):  # a line that begins at 0 is infinitely wrong about size 0
        best = int(np.abs(np.log(ratios)).sum(axis=1).argmin())
    return AlphaBeta(float(alphas[best]), float(betas[best]), float(np.median(np.abs(ratios[best] - 1))))
