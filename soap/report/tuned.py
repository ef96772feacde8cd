"""How many partitions servers cut tables into: the runs of ``soap-tune`` with the curve through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from soap.report.figures import BLUE, GREY, ORANGE, duration, legend_above, new_figure
from soap.report.section import Block, Contents, Figure, Section, Table, without

if TYPE_CHECKING:
    from bokeh.plotting import figure as BokehFigure

CURVE_POINTS = 60


def _blocks(contents: Contents) -> Sequence[Block]:
    tuning = contents.tuning
    assert tuning is not None
    found: list[Block] = []
    for own in tuning.get("groups") or [{**tuning, "parameters": list(tuning["before"])}]:
        title = f"Time per iteration against partitions of {', '.join(own['parameters'][:3])}: {own['partitions']} were chosen"
        found.append(Figure(title, _runs(own), f"Each run has {tuning['iterations']} iterations, of which the first half is dropped."))
        rows = [
            (
                str(run["partitions"]),
                "failed" if run["measured_ns"] is None else duration(run["measured_ns"]),
                "" if run["fitted_ns"] is None else duration(run["fitted_ns"]),
                duration(run["predicted_ns"]),
            )
            for run in own["samples"]
        ]
        found.append(Table("Runs", ("partitions", "measured", "fitted", "predicted"), rows))
    return found


def _runs(own: Mapping[str, Any]) -> BokehFigure:
    made = new_figure(360, tools="pan,box_zoom,reset,save", x_axis_label="partitions P", y_axis_label="time per iteration (ms)")
    samples = sorted(own["samples"], key=lambda run: int(run["partitions"]))
    ran = [run for run in samples if run["measured_ns"] is not None]
    counts = [run["partitions"] for run in samples]
    predicted = made.line(counts, [run["predicted_ns"] / 1e6 for run in samples], line_color=ORANGE, line_dash="dashed", line_width=2)
    items: list[tuple[str, list[Any]]] = [("predicted", [predicted])]
    fit = own["fit"]
    if fit is not None:
        low, high = min(counts), max(counts)
        at = [low + (high - low) * i / CURVE_POINTS for i in range(CURVE_POINTS + 1)]
        fitted = [(fit["theta0_ns"] + fit["theta1_ns"] / p + fit["theta2_ns"] * p) / 1e6 for p in at]
        line = made.line(at, fitted, line_color=GREY, line_width=2)
        items.append(("curve through the runs", [line]))
    dots = made.scatter([run["partitions"] for run in ran], [run["measured_ns"] / 1e6 for run in ran], size=9, color=BLUE)
    legend_above(made, [*items, ("measured", [dots])], hide=False)
    return made


SECTION = Section("tuned", "Partitions", without("tuning", "nothing was tuned (soap-tune --report)"), _blocks)
