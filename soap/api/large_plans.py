"""The time and memory of plans of very many tiles: two of equal copies are played, and a few of many micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from soap import collector
from soap.model.batch import samples_of
from soap.model.other_batch import with_samples
from soap.simulator.simulate import MOST_PLANNED_TILES, Simulator, tile_count
from soap.strategy.config import Strategy
from soap.strategy.stages import chunks_of, devices_of_stages

OFF_LINE = 1e-3
"""Figures of three numbers of micro-batches lie on a line if, by the second difference, that of all is off by at most this share."""


@dataclass(frozen=True)
class LargePrediction:
    """The time and memory of a large plan: of two of ``copies`` equal copies of the model, or of all of it if there is one.
    ``peak_bytes``, ``available_bytes``: of the device that is filled most, its expected peak, and its memory. ``lacking_bytes``: those that
    hosts lack. ``tiles``: those that were played. ``microbatches``: so many were played at most, and the rest follows on a line; 0: all."""

    makespan_ns: int
    peak_bytes: int
    available_bytes: int
    lacking_bytes: int
    copies: int
    tiles: int
    microbatches: int = 0

    @property
    def fits(self) -> bool:
        """Whether neither devices nor hosts lack memory."""
        return self.peak_bytes <= self.available_bytes and not self.lacking_bytes


@dataclass(frozen=True)
class _Played:
    """What was played. ``peaks``: by device of the cluster, in bytes."""

    makespan_ns: int
    peaks: Sequence[int]
    lacking_bytes: int
    copies: int
    tiles: int
    microbatches: int = 0


@collector.seldom()
def large_prediction(
    simulator: Simulator, strategy: Strategy, *, whole: bool = True, tiles: int | None = None
) -> LargePrediction | None:  # fmt: skip
    """The time and the memory of a plan by compiled code; None if it has at most ``tiles`` tiles (``MOST_PLANNED_TILES``), folded if it is
    made of equal copies. ``whole``: also of a plan that is not."""
    least = MOST_PLANNED_TILES if tiles is None else tiles
    if tile_count(strategy) <= least:
        return None
    folding = simulator.folding(strategy, nearly=True)
    folded = not isinstance(folding, str)
    if tile_count(strategy if isinstance(folding, str) else folding.copies.strategy) <= least or not (folded or whole):
        return None
    played, limits = _steadily(simulator, strategy) or _played(simulator, strategy), simulator.topology.memory_limits
    fullest = max(range(len(limits)), key=lambda device: played.peaks[device] / limits[device])
    rest = played.lacking_bytes, played.copies, played.tiles, played.microbatches
    return LargePrediction(played.makespan_ns, played.peaks[fullest], limits[fullest], *rest)


def _played(simulator: Simulator, strategy: Strategy) -> _Played:
    from soap.simulator.engine import Engine  # numba
    from soap.simulator.folded_bound import folded_engine

    found = simulator.folding(strategy, nearly=True)
    folding = None if isinstance(found, str) else found
    if folding is None:
        simulator.know_groups(strategy)
    own = strategy if folding is None else folding.copies.strategy
    engine = Engine(simulator.shared) if folding is None else folded_engine(folding, simulator.costs)
    engine.load(own)
    makespan_ns = engine.play()
    peaks, lacking_bytes = simulator.played_in(strategy, engine, folding)
    return _Played(makespan_ns, peaks, lacking_bytes, 1 if folding is None else folding.count, tile_count(own))


def _steadily(simulator: Simulator, strategy: Strategy) -> _Played | None:
    """The plan from three numbers of micro-batches, if these are far fewer than it has and lie on a line; else None.

    Once a pipeline is full, each further micro-batch (with several chunks on a stage, each further round of as many as there are stages)
    takes as long as the one before, and devices hold as much as before, or more by as much.
    """
    samples, all_of_them = samples_of(simulator.graph), strategy.microbatches
    if samples is None or samples % all_of_them or any(sync.contract.by_rows for sync in strategy.parameters.values()):
        return None
    for first, step in _numbers(simulator, strategy):
        found = []
        for count in (first, first + step, first + 2 * step):
            graph = with_samples(simulator.graph, samples * count // all_of_them)
            if isinstance(graph, str):
                return None
            fewer = Simulator(graph, simulator.topology, simulator.costs, simulator.optimizer_states, simulator.training)
            found.append(_played(fewer, replace(strategy, microbatches=count)))
        times = (all_of_them - first) // step
        makespan_ns = on_line([own.makespan_ns for own in found], times)
        peaks = [on_line(own, times) for own in zip(*(own.peaks for own in found), strict=True)]
        known = [peak for peak in peaks if peak is not None]
        if makespan_ns is not None and len(known) == len(peaks) and not any(own.lacking_bytes for own in found):
            return replace(found[-1], makespan_ns=makespan_ns, peaks=known, microbatches=first + 2 * step)
    return None


def _numbers(simulator: Simulator, strategy: Strategy) -> Iterator[tuple[int, int]]:
    """(the first number of micro-batches, the step to the next), as long as three such cost at most half of all."""
    stages = len(devices_of_stages(simulator.graph, strategy)) if strategy.stages else 1
    chunks = max(chunks_of(simulator.graph, strategy.stages), default=0) + 1
    step, count = stages if chunks > stages else 1, strategy.microbatches
    first = stages + 1
    while True:
        first += (count - first) % step
        if 6 * (first + step) > count:
            return
        yield first, step
        first *= 2


def on_line(three: Sequence[int], times: int) -> int | None:
    """The value ``times`` steps from the first of three at equal distances; None unless they lie on a line."""
    first, second, third = three
    found = first + times * max(second - first, third - second)
    return found if times * abs(third - 2 * second + first) <= OFF_LINE * found else None
