"""Random delays of workers: nobody computes equally long each time, and how long decides what waiting a bound costs."""

from __future__ import annotations

from dataclasses import dataclass
from math import log1p, sqrt

import numpy as np

from soap.elastic.faults import ElasticError


@dataclass(frozen=True)
class Delays:
    """A lane's computations for a lease take a random factor of their time, with mean 1 and standard deviation ``spread``, log-normal,
    drawn for each lease by itself from ``seed``: the same however many leases are drawn."""

    spread: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.spread <= 10 or self.seed < 0:
            raise ElasticError(f"delays of spread {self.spread:g} with seed {self.seed}; expected 0 to 10, and a seed from 0 on")

    def factors(self, lanes: int, leases: int) -> list[list[float]]:
        """[lane][lease]."""
        if not self.spread:
            return [[1.0] * leases for _ in range(lanes)]
        sigma = sqrt(log1p(self.spread**2))
        return [
            np.exp(sigma * np.random.default_rng([self.seed, lane]).standard_normal(leases) - sigma**2 / 2).tolist()
            for lane in range(lanes)
        ]


NO_DELAYS = Delays()
