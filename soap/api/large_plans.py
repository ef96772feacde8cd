"""The time and memory of plans of very many tiles, in brief."""

from __future__ import annotations

from dataclasses import dataclass

from soap import collector
from soap.simulator.simulate import MOST_PLANNED_TILES, Simulator, tile_count
from soap.simulator.steady import folded, played, steadily_played
from soap.strategy.config import Strategy


@dataclass(frozen=True)
class LargePrediction:
    """The time and memory of a large plan: of two of ``copies`` equal copies of the model, or of all of it if there is one.
    ``peak_bytes``, ``available_bytes``: of the device that is filled most, its expected peak, and its memory. ``lacking_bytes``: those that
    hosts lack. ``tiles``: those that were played. ``microbatches``: so many were played at most, of more (``simulator.steady``); 0: all."""

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
class Estimate:
    """A plan's time. ``peak_bytes``: of the device that is filled most. ``overflow_bytes``: those that devices and hosts lack; of a large
    plan this device and the hosts."""

    makespan_ns: int
    peak_bytes: int
    overflow_bytes: int

    @property
    def fits(self) -> bool:
        """Whether neither devices nor hosts lack memory."""
        return self.overflow_bytes == 0


def estimate(simulator: Simulator, strategy: Strategy) -> Estimate:
    """The time and the memory of a plan of any size."""
    large = large_prediction(simulator, strategy)
    if large is None:
        own = simulator.predict(strategy)
        return Estimate(own.makespan_ns, max(own.peak_bytes), own.overflow_bytes)
    return Estimate(large.makespan_ns, large.peak_bytes, max(0, large.peak_bytes - large.available_bytes) + large.lacking_bytes)


@collector.seldom()
def large_prediction(
    simulator: Simulator, strategy: Strategy, *, whole: bool = True, tiles: int | None = None
) -> LargePrediction | None:  # fmt: skip
    """The time and the memory of a plan by compiled code; None if it has at most ``tiles`` tiles (``MOST_PLANNED_TILES``), folded if it is
    made of equal copies. ``whole``: also of a plan that is not."""
    least = MOST_PLANNED_TILES if tiles is None else tiles
    if tile_count(strategy) <= least:
        return None
    copies = folded(simulator, strategy)
    if tile_count(copies) <= least or (copies is strategy and not whole):
        return None
    own, limits = steadily_played(simulator, strategy, tiles=least) or played(simulator, strategy), simulator.topology.memory_limits
    fullest = max(range(len(limits)), key=lambda device: own.peaks[device] / limits[device])
    rest = own.lacking_bytes, own.copies, own.tiles, own.microbatches
    return LargePrediction(own.makespan_ns, own.peaks[fullest], limits[fullest], *rest)
