"""Who clicks in made-up data: a logistic model whose parameters are known, so that what is learnt from the clicks can be judged by it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BIAS = -1.85
ID_EFFECT, NUMBER_EFFECT = 0.3, 0.1
"""Standard deviations: of what an id adds to the log-odds, and of what a number's logarithm is multiplied by."""
USUAL_LOG = 1.9
"""Near the mean of the numbers' logarithms, from which their effects count."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def probabilities(
    numbers: NDArray[np.int64], no_number: NDArray[np.bool_], ids: NDArray[np.int64], no_id: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Of a click, for each row. ``numbers``, ``ids``: (rows, columns); ``no_...``: where there is none, which adds nothing."""
    rows, columns = ids.shape
    odds = np.full(rows, BIAS)
    for column in range(columns):
        odds += np.where(no_id[:, column], 0.0, ID_EFFECT * effects(column, ids[:, column]))
    for column in range(numbers.shape[1]):
        slope = NUMBER_EFFECT * float(effects(columns + column, np.zeros(1, np.int64))[0])
        odds += np.where(no_number[:, column], 0.0, slope * (np.log1p(np.maximum(numbers[:, column], 0)) - USUAL_LOG))
    found: NDArray[np.float64] = 1 / (1 + np.exp(-odds))
    return found


def effects(column: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number for each id of a column, always the same: over all ids they are even, with mean 0 and variance 1."""
    mixed = ids.astype(np.uint64) * np.uint64(64) + np.uint64(column)
    with np.errstate(over="ignore"):  # splitmix64 (Steele, Lea, Flood, OOPSLA 2014)
        mixed = (mixed + np.uint64(1)) * _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    found: NDArray[np.float64] = (mixed / 2.0**64 - 0.5) * np.sqrt(12)
    return found
