"""What reports say of a strategy whose operators have marks, as those that are recomputed: which ones, what that saves, and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isinf
from typing import Any

from soap.cli.plain_text import milliseconds
from soap.search.to_fit import Budgeted
from soap.simulator.folded import FoldedSimulation
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.config import Strategy
from soap.strategy.marks import FEATURES, Feature, are_marked, with_each_mark
from soap.units import format_bytes

MOST_NAMED = 4
"""So many operators are named; the document has all."""


def documents(simulator: Simulator, strategy: Strategy, simulation: Simulation | FoldedSimulation) -> dict[str, Any]:
    """Plain JSON values by the names of marks (``recomputed``), of what there is of each."""
    found = {feature.said[0]: _document(simulator, strategy, simulation, feature) for feature in FEATURES}
    return {key: own for key, own in found.items() if own is not None}


def _document(
    simulator: Simulator, strategy: Strategy, simulation: Simulation | FoldedSimulation, feature: Feature
) -> dict[str, Any] | None:
    """None if no operator has it. ``light``: of recomputed ones, those that are but for their products. ``kept_``: of the same strategy
    if they had no mark. ``peak_bytes``: of the device that holds most."""
    names = are_marked(strategy, feature.field)
    if not names:
        return None
    kept = simulator.predict(with_each_mark(strategy, dict.fromkeys(names, 0)))
    light = [name for name in names if getattr(strategy.operators[name], feature.field) != feature.values[1]]
    return {
        "operators": names,
        **({"light": light} if len(feature.values) > 2 else {}),
        "of_operators": len(strategy.operators),
        "peak_bytes": max(simulation.peak_bytes),
        "kept_peak_bytes": max(kept.peak_bytes),
        "kept_predicted_ns": kept.makespan_ns,
        "kept_overflow_bytes": kept.overflow_bytes,
    }


def texts(report: Mapping[str, Any]) -> list[str]:
    """What ``documents`` has put into a report, in two lines each."""
    own = ((report[feature.said[0]], feature.do) for feature in FEATURES if feature.said[0] in report)
    return [_text(found, report["predicted_ns"], do) for found, do in own]


def _text(found: Mapping[str, Any], predicted_ns: int, do: str) -> str:
    names: Sequence[str] = found["operators"]
    shown = ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")
    lacks = found["kept_overflow_bytes"]
    light = f" ({len(found['light'])} but for their products)" if found.get("light") else ""
    lowers = "lowers" if found["peak_bytes"] <= found["kept_peak_bytes"] else "raises"
    saved = f"{lowers} the peak from {format_bytes(found['kept_peak_bytes'])} to {format_bytes(found['peak_bytes'])}"
    fits = f" (all kept, {format_bytes(lacks)} would be missing)" if lacks else ""
    added = predicted_ns - found["kept_predicted_ns"]
    return (
        f"{len(names)} of {found['of_operators']} operators {do}{light}: {shown}\n"
        f"  that takes {milliseconds(added)} more, and {saved}{fits}"
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
