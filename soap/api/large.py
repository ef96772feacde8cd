"""Predictions of plans whose tasks are too many to be told one by one."""

from __future__ import annotations

from dataclasses import dataclass

from soap.simulator.simulate import MOST_PLANNED_TILES, Simulator, tile_count
from soap.strategy.config import Strategy


@dataclass(frozen=True)
class LargePrediction:
    """The time and memory of two of many equal copies. ``peak_bytes``, ``available_bytes``: of the device that is filled most, its
    expected peak, and its memory. ``tiles``: of the two copies."""

    makespan_ns: int
    peak_bytes: int
    available_bytes: int
    copies: int
    tiles: int


def large_prediction(simulator: Simulator, strategy: Strategy) -> LargePrediction | None:
    """The time and the memory of a plan by compiled code; None if it has few tiles, or is not made of equal
    copies."""
    folding = "" if tile_count(strategy) <= MOST_PLANNED_TILES else simulator.folding(strategy, nearly=True)
    if isinstance(folding, str) or tile_count(folding.copies.strategy) <= MOST_PLANNED_TILES:
        return None
    from soap.simulator.folded_bound import folded_engine  # numba

    engine = folded_engine(folding, simulator.costs)
    engine.load(folding.copies.strategy)
    makespan_ns, limits = engine.simulate(), simulator.topology.memory_limits
    expected = simulator.expected_folded(folding, engine)
    fullest = max(range(len(limits)), key=lambda device: expected[device] / limits[device])
    return LargePrediction(makespan_ns, expected[fullest], limits[fullest], folding.count, tile_count(folding.copies.strategy))
