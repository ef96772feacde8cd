"""Which runs of operators do not keep what their backward passes need, so that a strategy fits: a knapsack, filled greedily.

Runs are those of ``recomputation.runs_of``. What becomes of them instead is ``soap.search.recomputing``'s or ``soap.search.offloading``'s.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from statistics import median
from typing import NamedTuple, cast

from soap.search.able import Able
from soap.search.metropolis import Evaluator
from soap.search.starts import Start
from soap.simulator.simulate import is_large
from soap.strategy.config import Strategy
from soap.strategy.recomputation import LIGHT

MOST_BASES = 3
"""So many of the starts that do not fit, the fastest ones, are made to fit."""
LEAST_OF_ESTIMATE = 0.7
"""Exact peaks were 0.75 to 1.1 of estimates (``compiled.memory_estimate``): what has an estimate further above the limit hardly fits."""
UNCLEAR = 0.1
"""An estimate that is corrected by earlier answers is believed if it is further from the limit than this share of it."""

MOST_ON_A_LINE = 5
"""Layers that are alike save alike, so a line is right at once, or not at all."""


class Step(NamedTuple):
    """A run gets this mark (``strategy.kept``): what that saves and costs beyond the step before it, on the device where it is most."""

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


def hardly_fits(share: float | None) -> bool:
    """Whether a strategy with this estimated share of the limit hardly fits. None: nothing is known."""
    return share is not None and share * LEAST_OF_ESTIMATE > 1


class Judge:
    """Says whether strategies lack memory: by an estimate where that is clear, as an exact answer may take seconds. Of strategies that
    differ in what they recompute or offload alone, exact peaks are nearly the same share of their estimates.

    ``estimated_share``: the estimated peak by the limit of the device that is filled most; 0 or infinite where bounds decide, None if
    nothing is known. ``peak_share``: the same exactly. ``ratios``: exact by estimated shares, as far as they are known. ``has_time``:
    whether there is time for the exact answer; if not, the estimate counts.
    """

    def __init__(
        self,
        estimated_share: Callable[[Strategy], float | None],
        peak_share: Callable[[Strategy], float],
        ratios: list[float] | None = None,
        has_time: Callable[[Strategy], bool] = lambda strategy: True,
    ) -> None:
        self._estimated_share, self._peak_share, self._has_time = estimated_share, peak_share, has_time
        self._ratios = [] if ratios is None else ratios
        self._last: tuple[Strategy, float] | None = None

    def lacks(self, strategy: Strategy) -> bool:
        """Whether a strategy lacks memory, perhaps by an estimate."""
        share = self._estimated_share(strategy)
        if share is None:
            return self.surely_lacks(strategy)
        expected = share * median(self._ratios) if self._ratios else share
        clear = abs(expected - 1) > UNCLEAR if self._ratios else hardly_fits(share)
        if share in (0, inf) or clear or not self._has_time(strategy):
            return expected > 1
        return self.surely_lacks(strategy, share)

    def surely_lacks(self, strategy: Strategy, share: float | None = None) -> bool:
        """The exact answer, from which it learns if the estimated ``share`` is given; False if there is no time for it."""
        if (known := self.known_share(strategy)) is not None:
            return known > 1
        if not self._has_time(strategy):
            return False
        exact = self._peak_share(strategy)
        if share and inf not in (share, exact):
            self._ratios.append(exact / share)
        self._last = strategy, exact
        return exact > 1

    def known_share(self, strategy: Strategy) -> float | None:
        """The exact peak by the limit if this is the last strategy of which it was asked for."""
        return self._last[1] if self._last is not None and self._last[0] is strategy else None


def judge_of(evaluator: Evaluator) -> Judge:
    """A judge by what an evaluator says."""
    able = cast(Able, evaluator)

    def estimated_share(strategy: Strategy) -> float | None:
        evaluator.makespan_ns(strategy)  # then it knows the strategy
        return able.estimated_share(strategy)

    return Judge(estimated_share, able.peak_share)


def fewest(
    steps: Iterable[Step], of_runs: int, made: Callable[[Mapping[int, int]], Strategy], judge: Judge
) -> Budgeted:
    """As few steps as it takes to fit: first what saves most bytes for its time, the earliest among equals, because those hold theirs the
    longest. All of them if that is not enough. ``made``: the strategy in which runs have these marks. ``judge``: asked about log2(number of
    steps) times, less often where it knows peaks exactly, on a line with the bytes saved; that what is found fits is always known
    exactly."""
    order = sorted(steps, key=lambda step: (-step.saved_bytes / max(1, step.added_ns), step.run, step.mark))

    def first(count: int) -> dict[int, int]:
        return {step.run: step.mark for step in order[:count]}

    saved_bytes = [*accumulate((step.saved_bytes for step in order), initial=0)]
    shares = dict[int, float]()  # exact ones, by number of steps
    low, high, strategies = 0, len(order), dict[int, Strategy]()  # ``high`` steps fit, or all do not
    while high - low > 1:
        middle = _between(low, high, saved_bytes, shares)
        strategies[middle] = made(first(middle))
        low, high = (middle, high) if judge.lacks(strategies[middle]) else (low, middle)
        if (share := judge.known_share(strategies[middle])) is not None and share < inf:
            shares[middle] = share
        if high - low == 1 and high < len(order) and high not in shares and judge.surely_lacks(strategies[high]):
            low, high = high, len(order)
    added_ns, marks = [step.added_ns for step in order], first(high)
    selective = sum(mark == LIGHT for mark in marks.values())
    return Budgeted(made(marks), len(marks), selective, of_runs, sum(added_ns[:high]), sum(added_ns[: max(0, high - 1)]))


def _between(low: int, high: int, saved_bytes: Sequence[int], shares: Mapping[int, float]) -> int:
    """The number of steps to ask about next, above ``low`` and below ``high``: where the line through the two nearest exact shares of the
    limit reaches it; the middle if fewer are known, they do not fall, or that has been tried a few times."""
    near = sorted(shares, key=lambda own: min(abs(own - low), abs(own - high)))[:2]
    if len(near) < 2 or len(shares) > MOST_ON_A_LINE or (falls := (shares[min(near)] - shares[max(near)])) <= 0:
        return (low + high) // 2
    each_bytes = (saved_bytes[max(near)] - saved_bytes[min(near)]) / falls
    wanted_bytes = saved_bytes[near[0]] + (shares[near[0]] - 1) * each_bytes
    return min(high - 1, max(low + 1, bisect_left(saved_bytes, wanted_bytes)))


def bases_of(starts: Sequence[Start], evaluator: Evaluator, all_of: Callable[[Strategy], Strategy]) -> Iterator[Start]:
    """The fastest ``MOST_BASES`` starts that do not fit, are faster than all that do, and may fit with all of their runs changed
    (``all_of``): what lacks memory even then, certainly or by an estimate, is no base. One alone if they are large."""
    able, count = cast(Able, evaluator), 0
    best_ns = min((start.cost_ns for start in starts if start.fits), default=inf)
    lacking = [start for start in starts if not start.fits and start.cost_ns < best_ns]
    for start in sorted(lacking, key=lambda start: start.cost_ns):
        whole = all_of(start.strategy)
        evaluator.makespan_ns(whole)  # then the bound knows the strategy
        share = able.estimated_share(whole)
        if able.least_overflow_bytes(whole) == 0 and not hardly_fits(share) and (share is not None or able.peak_share(whole) <= 1):
            yield start
            count += 1
        if count == (1 if is_large(start.strategy) else MOST_BASES):
            return
