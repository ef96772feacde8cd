"""Which runs of operators do not keep what their backward passes need, so that a strategy fits: a knapsack, filled greedily.

Runs are those of ``recomputation.runs_of``. What becomes of them instead is ``soap.search.recomputing``'s or ``soap.search.offloading``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, cast

from soap.search.able import Able
from soap.search.metropolis import Evaluator
from soap.search.starts import Start
from soap.simulator.simulate import is_large
from soap.strategy.config import Strategy
from soap.strategy.recomputation import LIGHT

MOST_BASES = 3
"""So many of the starts that do not fit, the fastest ones, are made to fit."""

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


def lacking_by(evaluator: Evaluator) -> Callable[[Strategy], bool]:
    """Whether a strategy lacks memory, as an evaluator says."""
    able = cast(Able, evaluator)
    return lambda strategy: able.peak_share(strategy) > 1


def fewest(
    steps: Iterable[Step], of_runs: int, made: Callable[[Mapping[int, int]], Strategy], lacks: Callable[[Strategy], bool]
) -> Budgeted:
    """As few steps as it takes to fit: first what saves most bytes for its time, the earliest among equals, because those hold theirs the
    longest. All of them if that is not enough. ``made``: the strategy in which runs have these marks. ``lacks``: whether a strategy lacks
    memory; asked about log2(number of steps) times."""
    order = sorted(steps, key=lambda step: (-step.saved_bytes / max(1, step.added_ns), step.run, step.mark))

    def first(count: int) -> dict[int, int]:
        return {step.run: step.mark for step in order[:count]}

    low, high, strategies = 0, len(order), dict[int, Strategy]()  # ``high`` steps fit, or all do not
    while high - low > 1:
        middle = (low + high) // 2
        strategies[middle] = made(first(middle))
        low, high = (middle, high) if lacks(strategies[middle]) else (low, middle)
    added_ns, marks = [step.added_ns for step in order], first(high)
    selective = sum(mark == LIGHT for mark in marks.values())
    return Budgeted(made(marks), len(marks), selective, of_runs, sum(added_ns[:high]), sum(added_ns[: max(0, high - 1)]))


def bases_of(starts: Sequence[Start], evaluator: Evaluator, all_of: Callable[[Strategy], Strategy]) -> Iterator[Start]:
    """The fastest ``MOST_BASES`` starts that do not fit, are faster than all that do, and fit with all of their runs changed
    (``all_of``). One alone if they are large."""
    able, count = cast(Able, evaluator), 0
    best_ns = min((start.cost_ns for start in starts if start.fits), default=inf)
    lacking = [start for start in starts if not start.fits and start.cost_ns < best_ns]
    for start in sorted(lacking, key=lambda start: start.cost_ns):
        whole = all_of(start.strategy)
        if able.peak_share(whole) <= 1:
            yield start
            count += 1
        if count == (1 if is_large(start.strategy) else MOST_BASES):
            return
