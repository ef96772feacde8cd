"""What reports say of a strategy that recomputes: which operators, what that saves, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isinf
from typing import Any

from soap.cli.plain_text import milliseconds
from soap.search.recomputing import Budgeted
from soap.simulator.folded import FoldedSimulation
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.config import Strategy
from soap.strategy.recomputation import KEPT, LIGHT, with_marks
from soap.units import format_bytes

MOST_NAMED = 4
"""So many operators are named; the document has all."""


def document(simulator: Simulator, strategy: Strategy, simulation: Simulation | FoldedSimulation) -> dict[str, Any] | None:
    """Plain JSON values; None if nothing is recomputed. ``light``: those that are but for their products. ``kept_``: of the same strategy
    if it kept all. ``peak_bytes``: of the device that holds most."""
    names = [name for name, config in strategy.operators.items() if config.recompute]
    if not names:
        return None
    kept = simulator.predict(with_marks(strategy, names, KEPT))
    return {
        "operators": names,
        "light": [name for name in names if strategy.operators[name].recompute == LIGHT],
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
    products = f" ({len(found['light'])} but for their products)" if found["light"] else ""
    saved = f"{format_bytes(found['kept_peak_bytes'])} to {format_bytes(found['peak_bytes'])}"
    fits = f" (all kept, {format_bytes(lacks)} would be missing)" if lacks else ""
    added = predicted_ns - found["kept_predicted_ns"]
    return (
        f"{len(names)} of {found['of_operators']} operators are recomputed{products}: {shown}\n"
        f"  that takes {milliseconds(added)} more, and lowers the peak from {saved}{fits}"
    )


def budgeted(name: str, start: Budgeted) -> dict[str, Any]:
    """Plain JSON values of a start that recomputes as little as fits. ``gap``: by what share ``added_ns`` may exceed the least time of any
    choice of runs, if each saves and costs the same whatever others do (``Budgeted``); None if nothing is known of that."""
    return {
        "start": name,
        "runs": start.runs,
        "selective": start.selective,
        "of_runs": start.of_runs,
        "added_ns": start.added_ns,
        "least_ns": start.least_ns,
        "gap": None if isinf(start.gap) else start.gap,
    }


def budgeted_text(found: Mapping[str, Any]) -> str:
    """That in one line."""
    if found["gap"] is None:
        near = "one step is enough, so nothing less is"
    elif found["gap"] == 0:
        near = "no choice of runs takes less"
    else:
        near = f"at most {found['gap']:.1%} more than any choice of runs"
    products = f" ({found['selective']} but for their products)" if found["selective"] else ""
    return f"start {found['start']!r}: {found['runs']} of {found['of_runs']} runs{products}, {milliseconds(found['added_ns'])}; {near}"
