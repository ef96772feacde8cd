"""Which runs of operators do not keep what their backward passes need, so that a strategy fits: a knapsack, filled greedily.

Runs are those of ``recomputation.runs_of``. What becomes of them instead is ``soap.search.recomputing``'s or ``soap.search.offloading``'s.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple

from soap.search.starts import Start
from soap.simulator.simulate import is_large
from soap.strategy.config import Strategy
from soap.strategy.recomputation import LIGHT

MOST_BASES = 3
"""So many of the starts that do not fit, the fastest ones, are made to fit."""
MOST_ON_A_LINE = 5
"""Layers that are alike save alike, so a line is right at once, or not at all."""


class Step(NamedTuple):
    """A run gets this mark (``strategy.marks``): what that saves and costs beyond the step before it, on the device where it is most."""

    run: int
    mark: int
    saved_bytes: int
    added_ns: int


@dataclass(frozen=True)
class Budgeted:
    """A strategy in which as few runs as fit give up what they keep. ``runs``: how many, out of ``of_runs``; ``selective``: of these, how
    many are recomputed but for their products. ``added_ns``: what their second forward passes, or copies, take on the busiest device,
    whether or not anything waits for that. ``least_ns``: what is too little takes: if a run saves as many bytes and costs as much whatever
    others do, no choice that fits takes less (the linear relaxation of the knapsack, whose best fractional answer goes by bytes per
    time)."""

    strategy: Strategy
    runs: int
    selective: int
    of_runs: int
    added_ns: int
    least_ns: int

    @property
    def gap(self) -> float:
        """By what share ``added_ns`` may exceed the least of this kind; infinite if nothing is known of that."""
        return self.added_ns / self.least_ns - 1 if self.least_ns else inf


def fewest(
    steps: Iterable[Step], of_runs: int, made: Callable[[Mapping[int, int]], Strategy], share: Callable[[Strategy], float]
) -> Budgeted:
    """As few steps as it takes to fit: first what saves most bytes for its time, the earliest among equals, because those hold theirs the
    longest. All of them if that is not enough. ``made``: the strategy in which runs have these marks. ``share``: a strategy's peak by the
    limit; asked about log2(number of steps) times, less often where it is on a line with the bytes saved."""
    order = sorted(steps, key=lambda step: (-step.saved_bytes / max(1, step.added_ns), step.run, step.mark))

    def first(count: int) -> dict[int, int]:
        return {step.run: step.mark for step in order[:count]}

    saved_bytes = [*accumulate((step.saved_bytes for step in order), initial=0)]
    shares = dict[int, float]()  # by number of steps
    low, high, strategies = 0, len(order), dict[int, Strategy]()  # ``high`` steps fit, or all do not
    while high - low > 1:
        middle = _between(low, high, saved_bytes, shares)
        strategies[middle] = made(first(middle))
        shares[middle] = share(strategies[middle])
        low, high = (middle, high) if shares[middle] > 1 else (low, middle)
    added_ns, marks = [step.added_ns for step in order], first(high)
    selective = sum(mark == LIGHT for mark in marks.values())
    return Budgeted(made(marks), len(marks), selective, of_runs, sum(added_ns[:high]), sum(added_ns[: max(0, high - 1)]))


def _between(low: int, high: int, saved_bytes: Sequence[int], shares: Mapping[int, float]) -> int:
    """The number of steps to ask about next, above ``low`` and below ``high``: where the line through the two nearest shares of the
    limit reaches it; the middle if fewer are known, they do not fall, or that has been tried a few times."""
    near = sorted((own for own in shares if shares[own] < inf), key=lambda own: min(abs(own - low), abs(own - high)))[:2]
    if len(near) < 2 or len(shares) > MOST_ON_A_LINE or (falls := (shares[min(near)] - shares[max(near)])) <= 0:
        return (low + high) // 2
    each_bytes = (saved_bytes[max(near)] - saved_bytes[min(near)]) / falls
    wanted_bytes = saved_bytes[near[0]] + (shares[near[0]] - 1) * each_bytes
    return min(high - 1, max(low + 1, bisect_left(saved_bytes, wanted_bytes)))


def bases_of(starts: Sequence[Start], share: Callable[[Strategy], float], all_of: Callable[[Strategy], Strategy]) -> Iterator[Start]:
    """The fastest ``MOST_BASES`` starts that do not fit, are faster than all that do, and fit with all of their runs changed
    (``all_of``). One alone if they are large. ``share``: as in ``fewest``."""
    count, best_ns = 0, min((start.cost_ns for start in starts if start.fits), default=inf)
    lacking = [start for start in starts if not start.fits and start.cost_ns < best_ns]
    for start in sorted(lacking, key=lambda start: start.cost_ns):
        if share(all_of(start.strategy)) <= 1:
            yield start
            count += 1
        if count == (1 if is_large(start.strategy) else MOST_BASES):
            return
