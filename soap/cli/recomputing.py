"""What reports say of a strategy that recomputes, or offloads what operators keep: which operators, what that saves, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isinf
from typing import Any

from soap.cli.plain_text import attributes, milliseconds
from soap.search.to_fit import Budgeted
from soap.simulator.folded import FoldedSimulation
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.config import Strategy
from soap.strategy.kept import with_offload
from soap.strategy.recomputation import LIGHT, with_marks
from soap.units import format_bytes

MOST_NAMED = 4
"""So many operators are named; the document has all."""


RECOMPUTED, OFFLOADED = "recomputed", "offloaded"
"""Keys of a report: operators that run again, and those whose hosts keep what they keep."""
_MARKS = {RECOMPUTED: ("recompute", with_marks), OFFLOADED: ("offload", with_offload)}
_DO = {RECOMPUTED: "are recomputed", OFFLOADED: "offload what they keep"}


def documents(simulator: Simulator, strategy: Strategy, simulation: Simulation | FoldedSimulation) -> dict[str, Any]:
    """Plain JSON values by key, of what there is of both."""
    found = {key: _document(simulator, strategy, simulation, key) for key in _MARKS}
    return {key: own for key, own in found.items() if own is not None}


def _document(simulator: Simulator, strategy: Strategy, simulation: Simulation | FoldedSimulation, key: str) -> dict[str, Any] | None:
    """None if no operator does. ``light``: of recomputed ones, those that are but for their products. ``kept_``: of the same strategy if it
    kept all. ``peak_bytes``: of the device that holds most."""
    field, marked = _MARKS[key]
    names = [name for name, config in strategy.operators.items() if getattr(config, field)]
    if not names:
        return None
    kept = simulator.predict(marked(strategy, names, False))
    return {
        "operators": names,
        **({"light": [name for name in names if strategy.operators[name].recompute == LIGHT]} if key == RECOMPUTED else {}),
        "of_operators": len(strategy.operators),
        "peak_bytes": max(simulation.peak_bytes),
        "kept_peak_bytes": max(kept.peak_bytes),
        "kept_predicted_ns": kept.makespan_ns,
        "kept_overflow_bytes": kept.overflow_bytes,
    }


def texts(report: Mapping[str, Any]) -> list[str]:
    """What ``documents`` has put into a report, in two lines each."""
    return [_text(report[key], report["predicted_ns"], _DO[key]) for key in _MARKS if key in report]


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
    own = attributes(start, "runs", "selective", "of_runs", "added_ns", "least_ns")
    return {"start": name, **own, "gap": None if isinf(start.gap) else start.gap}


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
