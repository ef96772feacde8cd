"""Plans of very many tiles, played by compiled code: as two of equal copies, and of many micro-batches as few.

Once a pipeline is full, each further micro-batch (with several chunks on a stage, each further round of as many as there are stages) takes
as long as the one before, and devices hold as much as before, or more by as much. Three numbers of micro-batches are played, with as many
samples fewer. If times and peaks lie on lines, those of all follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from soap.model.batch import samples_of
from soap.simulator.memory.sizes import overflow_bytes
from soap.simulator.simulate import MOST_PLANNED_TILES, Simulator, tile_count
from soap.strategy.config import Strategy
from soap.strategy.stages import chunks_of, devices_of_stages

if TYPE_CHECKING:
    from soap.simulator.draws import Draws

PERIODS = (1, 2, 6, 12, 24)
"""Steps between numbers of micro-batches, in units: each is a multiple of the ones before, and those of patterns that repeat."""
OFF_LINE = 1e-3
"""Figures of three numbers of micro-batches lie on a line if, by the second difference, that of all is off by at most this share."""


@dataclass(frozen=True)
class Played:
    """A plan's time, or its cost under draws; by device of the cluster the peak to expect; bytes that hosts lack. ``copies``: of so many
    equal ones two were played. ``tiles``: those that were played. ``microbatches``: so many were played at most, of more; 0: all."""

    makespan_ns: int
    peaks: Sequence[int]
    lacking_bytes: int
    copies: int
    tiles: int
    microbatches: int = 0

    def overflow_bytes(self, simulator: Simulator) -> int:
        """Bytes of memory that devices and hosts lack, added up."""
        return overflow_bytes(self.peaks, simulator.topology) + self.lacking_bytes


def folded(simulator: Simulator, strategy: Strategy) -> Strategy:
    """What is played of a plan: two of its equal copies if it is made of them, else all of it."""
    found = simulator.folding(strategy, nearly=True)
    return strategy if isinstance(found, str) else found.copies.strategy


def played(simulator: Simulator, strategy: Strategy, draws: Draws | None = None) -> Played:
    """The plan, all of its micro-batches, by an engine of its own."""
    from soap.simulator.drawn_engine import make_engine  # numba
    from soap.simulator.folded_bound import folded_engine

    found = simulator.folding(strategy, nearly=True)
    folding = None if isinstance(found, str) else found
    if folding is None:
        simulator.know_groups(strategy)
    own = strategy if folding is None else folding.copies.strategy
    engine = make_engine(simulator.shared, draws) if folding is None else folded_engine(folding, simulator.costs, draws)
    engine.load(own)
    makespan_ns = engine.play() if draws is None else engine.simulate()
    peaks, lacking_bytes = simulator.played_in(strategy, engine, folding)
    return Played(makespan_ns, peaks, lacking_bytes, 1 if folding is None else folding.count, tile_count(own))


def steadily_played(
    simulator: Simulator, strategy: Strategy, draws: Draws | None = None, tiles: int = MOST_PLANNED_TILES
) -> Played | None:  # fmt: skip
    """The plan from three numbers of micro-batches, if these are far fewer than it has and lie on a line, and it has more than ``tiles``
    tiles; else None. StrategyError if the strategy does not fit the graph or the cluster."""
    samples, count = samples_of(simulator.graph), strategy.microbatches
    if samples is None or samples % count or tile_count(strategy) <= tiles or not few_are_enough(simulator, strategy):
        return None
    if tile_count(folded(simulator, strategy)) <= tiles:
        return None
    known_plays: dict[int, Played] = {}
    for first, step in _numbers(simulator, strategy):
        numbers = first, first + step, first + 2 * step
        for fewer in (own for own in numbers if own not in known_plays):
            smaller = simulator.of_samples(samples * fewer // count)
            if isinstance(smaller, str):
                return None
            known_plays[fewer] = played(smaller, replace(strategy, microbatches=fewer), draws)
        found = [known_plays[fewer] for fewer in numbers]
        times = (count - first) // step
        makespan_ns = on_line([own.makespan_ns for own in found], times)
        peaks = [on_line(own, times) for own in zip(*(own.peaks for own in found), strict=True)]
        known = [peak for peak in peaks if peak is not None]
        if makespan_ns is not None and len(known) == len(peaks) and not any(own.lacking_bytes for own in found):
            return replace(found[-1], makespan_ns=makespan_ns, peaks=known, microbatches=first + 2 * step)
    return None


def few_are_enough(simulator: Simulator, strategy: Strategy) -> bool:
    """Whether a plan has so many micro-batches that three numbers of few may stand for them."""
    dense = not any(sync.contract.by_rows for sync in strategy.parameters.values())
    return strategy.microbatches > 1 and dense and next(_numbers(simulator, strategy), None) is not None


def _numbers(simulator: Simulator, strategy: Strategy) -> Iterator[tuple[int, int]]:
    """(the first number of micro-batches, the step to the next), as long as three such cost at most half of all. The later the further
    apart (``PERIODS``), as devices may take turns in a pattern of some micro-batches."""
    stages = len(devices_of_stages(simulator.graph, strategy)) if strategy.stages else 1
    chunks = max(chunks_of(simulator.graph, strategy.stages), default=0) + 1
    unit, count = stages if chunks > stages else 1, strategy.microbatches
    first = stages + 1
    for period in PERIODS:
        for step in dict.fromkeys((unit * period, unit)):
            own = first + (count - first) % step
            if 6 * (own + step) <= count:
                yield own, step
        first *= 2


def on_line(three: Sequence[int], times: int) -> int | None:
    """The value ``times`` steps from the first of three at equal distances; None unless they lie on a line."""
    first, second, third = three
    found = first + times * max(second - first, third - second)
    return found if times * abs(third - 2 * second + first) <= OFF_LINE * found else None
