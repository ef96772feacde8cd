"""What reports say of a strategy that recomputes: which operators, what that saves, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soap.cli.plain_text import milliseconds
from soap.simulator.folded import FoldedSimulation
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.config import Strategy
from soap.strategy.recomputation import with_marks
from soap.units import format_bytes

MOST_NAMED = 4
"""So many operators are named; the document has all."""


def document(simulator: Simulator, strategy: Strategy, simulation: Simulation | FoldedSimulation) -> dict[str, Any] | None:
    """Plain JSON values; None if nothing is recomputed. ``kept_``: of the same strategy if it kept all. ``peak_bytes``: of the device that
    holds most."""
    names = [name for name, config in strategy.operators.items() if config.recompute]
    if not names:
        return None
    kept = simulator.predict(with_marks(strategy, names, False))
    return {
        "operators": names,
        "of_operators": len(strategy.operators),
        "peak_bytes": max(simulation.peak_bytes),
        "kept_peak_bytes": max(kept.peak_bytes),
        "kept_predicted_ns": kept.makespan_ns,
        "kept_overflow_bytes": kept.overflow_bytes,
    }


def text(found: Mapping[str, Any], predicted_ns: int) -> str:
    """The document in two lines."""
    names: Sequence[str] = found["operators"]
    shown = ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")
    lacks = found["kept_overflow_bytes"]
    saved = f"{format_bytes(found['kept_peak_bytes'])} to {format_bytes(found['peak_bytes'])}"
    fits = f" (all kept, {format_bytes(lacks)} would be missing)" if lacks else ""
    added = predicted_ns - found["kept_predicted_ns"]
    return (
        f"{len(names)} of {found['of_operators']} operators are recomputed: {shown}\n"
        f"  that takes {milliseconds(added)} more, and lowers the peak from {saved}{fits}"
    )
