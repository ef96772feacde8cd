"""Predictions of plans whose tasks are too many to be told one by one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from soap.simulator.simulate import Simulator, is_planned, tile_count
from soap.strategy.config import Strategy


@dataclass(frozen=True)
class LargePrediction:
    """The time and memory of two of many equal copies. ``peak_bytes``, ``available_bytes``: of the device that is filled most, at
    most what it holds at its peak, and its memory. ``tiles``: of the two copies."""

    makespan_ns: int
    peak_bytes: int
    available_bytes: int
    copies: int
    tiles: int


def large_prediction(simulator: Simulator, strategy: Strategy) -> LargePrediction | None:
    """The time and the memory of a plan by compiled code; None if it has few tiles, or is not made of equal
    copies."""
    folding = "" if is_planned(strategy) else simulator.folding(strategy, nearly=True)
    if isinstance(folding, str) or is_planned(folding.copies.strategy):
        return None
    from soap.simulator.folded_bound import folded_engine, most_bytes  # numba
    from soap.simulator.memory.bound import MemoryBound

    engine = folded_engine(folding, simulator.costs)
    engine.load(folding.copies.strategy)
    makespan_ns, most = engine.play(), most_bytes(folding, MemoryBound(engine, engine.topology.memory_limits, simulator.optimizer_states))
    limits = np.array(simulator.topology.memory_limits)[folding.copies.images]
    limits[1] = limits[1:].min(axis=0)  # copy 1 stands for all the others
    fullest = int(np.argmax(most / limits[:2]))
    filled, available = int(most.ravel()[fullest]), int(limits[:2].ravel()[fullest])
    return LargePrediction(makespan_ns, filled, available, folding.count, tile_count(folding.copies.strategy))
