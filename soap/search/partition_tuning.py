"""Into how many partitions servers cut sparse parameters, from a few short runs: the mathematics of ``soap-tune``, without the runs.

The model for an iteration's time is theta0 + theta1 / P + theta2 * P (Kim et al., "Parallax", EuroSys 2019, equation 1): P partitions
share aggregation and updates, and each has a cost of its own. P is tried from the number of hosts on, doubled until the time rises,
then halved below the number of hosts in the same way. The choice is the fitted curve's minimum within the tried range, unless a run was
faster than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from statistics import mean, median

import numpy as np

from soap.errors import SoapError
from soap.strategy.sync_contracts import MAX_PARTITIONS

MOST_SAMPLES = 5
ITERATIONS = 20
"""Default number of iterations of a run, the first half of which is dropped."""
BATCHES = 4
"""Default number of batches that a run takes in turn."""
ROUNDING = 1e-9
"""Relative margin: a run that is on the curve does not count as below it."""
FEWEST_TO_FIT = 3
"""As many samples as the curve has coefficients. With fewer, the best sample is taken."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One short run. ``time_ns``: per iteration; None if the run failed (partitions too large for a server's memory)."""

    partitions: int
    time_ns: float | None


@dataclass(frozen=True, slots=True)
class Curve:
    """``theta0 + theta1 / P + theta2 * P`` nanoseconds, none of them negative."""

    theta0_ns: float
    theta1_ns: float
    theta2_ns: float

    def time_ns(self, partitions: int) -> float:
        """An iteration's time with so many partitions."""
        return self.theta0_ns + self.theta1_ns / partitions + self.theta2_ns * partitions


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was tried and chosen. ``curve``: None if there were too few samples to fit one."""

    samples: tuple[Sample, ...]
    curve: Curve | None
    partitions: int

    @property
    def deviation(self) -> float:
        """Relative root mean square of the samples' distances from the curve; 0 without a curve."""
        if self.curve is None:
            return 0.0
        ran = [(sample.partitions, sample.time_ns) for sample in self.samples if sample.time_ns is not None]
        return sqrt(mean((self.curve.time_ns(partitions) / time - 1) ** 2 for partitions, time in ran))


def settled_ns(iterations_ns: Sequence[float]) -> float:
    """A run's time per iteration: the median, without the first half of the iterations, in which it warms up."""
    return median(iterations_ns[len(iterations_ns) // 2 :])


def next_partitions(samples: Sequence[Sample], hosts: int, most: int = MAX_PARTITIONS) -> int | None:
    """The number of partitions to try after these samples, which are in the order of trying; None if there are enough. At most ``most``
    partitions."""
    start = min(hosts, most)
    if len(samples) >= MOST_SAMPLES:
        return None
    upward = [sample for sample in samples if sample.partitions >= start]
    if not upward:
        return start
    times = [sample.time_ns for sample in upward if sample.time_ns is not None]
    rose = len(times) > 1 and times[-1] > times[-2]
    broke = bool(times) and upward[-1].time_ns is None
    if not (rose or broke) and 2 * upward[-1].partitions <= most:
        return 2 * upward[-1].partitions
    return _below(samples, upward[0])


def _below(samples: Sequence[Sample], start: Sample) -> int | None:
    """The next smaller number below the first that was tried. If that one failed there is none: fewer partitions would be still larger."""
    downward = [start, *(sample for sample in samples if sample.partitions < start.partitions)]
    last = downward[-1]
    if last.time_ns is None or last.partitions == 1:
        return None
    before = downward[-2].time_ns if len(downward) > 1 else None
    rose = before is not None and last.time_ns > before
    return None if rose else last.partitions // 2


def choose(samples: Sequence[Sample]) -> Tuning:
    """The best number of partitions by the fitted curve, between the fewest and the most that ran; the smallest of several. If a run
    took less than the curve's minimum, the curve does not describe it, and the fastest run's number is taken. Example: servers with
    equal numbers of equal partitions are better balanced than the curve knows."""
    ran = {sample.partitions: sample.time_ns for sample in samples if sample.time_ns is not None}
    if not ran:
        tried = ", ".join(str(sample.partitions) for sample in samples) or "none"
        raise SoapError(f"no run succeeded, with partitions: {tried}; expected at least one that fits into the servers' memory")
    curve = fit(list(ran.items())) if len(ran) >= FEWEST_TO_FIT else None
    best = min(sorted(ran), key=lambda partitions: ran[partitions])
    if curve is not None:
        fitted = min(range(min(ran), max(ran) + 1), key=curve.time_ns)
        best = best if ran[best] < curve.time_ns(fitted) * (1 - ROUNDING) else fitted
    return Tuning(tuple(samples), curve, best)


def fit(points: Sequence[tuple[int, float]]) -> Curve:
    """The curve with the least squares of (partitions, time in nanoseconds) among those without negative coefficients. It is the best
    of all curves that leave out some of the terms and have no negative coefficient: the optimum is among them."""
    partitions = np.array([number for number, _ in points], dtype=np.float64)
    times = np.array([time for _, time in points], dtype=np.float64)
    columns = np.stack([np.ones_like(partitions), 1 / partitions, partitions], axis=1)
    scales = columns.max(axis=0)
    best, least = np.zeros(3), float("inf")
    for terms in (list(chosen) for count in (1, 2, 3) for chosen in combinations(range(3), count)):
        found = np.linalg.lstsq(columns[:, terms] / scales[terms], times, rcond=None)[0]
        error = float(np.sum((columns[:, terms] / scales[terms] @ found - times) ** 2))
        if (found >= 0).all() and error < least:
            best, least = np.zeros(3), error
            best[terms] = found / scales[terms]
    return Curve(*(float(theta) for theta in best))
