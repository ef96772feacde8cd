"""How far the predicted iteration is from the measured one: kinds of operators and tasks, and the predictions that are furthest off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from soap.report.figures import BLUE, ORANGE, duration, height_of, legend_above, name_rows, new_figure
from soap.report.section import Block, Contents, Figure, Section, Table, Text, without
from soap.simulator.analysis.comparison import Comparison, Group

if TYPE_CHECKING:
    from bokeh.plotting import figure as BokehFigure

MOST_GROUPS = 20


def _blocks(contents: Contents) -> Sequence[Block]:
    found = contents.comparison
    assert found is not None
    text = (
        f"An iteration was predicted to take {duration(found.predicted_ns)} and took {duration(found.measured_ns)}: the prediction is off "
        f"by {found.error:+z.1%}. {found.tasks:,} tasks are on both sides."
    )
    shown: list[Block] = [Text(text, leading=True)]
    for what, groups in (("operators", found.operators), ("tasks", found.kinds)):
        if groups:
            about = "Sums over the tasks that both sides have, each timed by itself."
            shown.append(Figure(f"Time by kind of {what}: predicted beside measured", _bars(groups[:MOST_GROUPS]), about))
    return [*shown, _worst(found)]


def _bars(groups: Sequence[Group]) -> BokehFigure:
    made = new_figure(height_of(2 * len(groups)), x_axis_label="sum over all tasks (ms)")
    ys = [-float(i) for i in range(len(groups))]
    predicted = made.hbar(
        y=[y + 0.2 for y in ys], right=[own.predicted_ns / 1e6 for own in groups], left=0, height=0.36, color=BLUE, line_color=None
    )
    measured = made.hbar(
        y=[y - 0.2 for y in ys], right=[own.measured_ns / 1e6 for own in groups], left=0, height=0.36, color=ORANGE, line_color=None
    )
    legend_above(made, [("predicted", [predicted]), ("measured", [measured])], hide=False)
    name_rows(made, [f"{own.name} ({own.tasks})" for own in groups])
    made.x_range.start = 0
    return made


def _worst(found: Comparison) -> Table:
    rows = [
        (
            pair.predicted.name,
            duration(pair.predicted.duration_ns),
            duration(pair.measured.duration_ns),
            f"{pair.measured.duration_ns / max(1, pair.predicted.duration_ns):.2f}",
        )
        for pair in found.worst
    ]
    return Table("The tasks that are furthest off", ("task", "predicted", "measured", "measured / predicted"), rows)


_LACKING = "nothing was measured (soap-run --report, soap-compare --report)"
SECTION = Section("compared", "Predicted and measured", without("comparison", _LACKING), _blocks)
