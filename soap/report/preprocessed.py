"""What ``soap-preprocess`` did: the time of each step, how many tasks ran at once, and the dictionaries that it made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from soap.report.figures import BLUE, SKY, height_of, legend_above, name_rows, new_figure
from soap.report.section import Block, Contents, Figure, Section, Table, Text, without
from soap.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from bokeh.plotting import figure as BokehFigure

MOST_COLUMNS = 40


def _blocks(contents: Contents) -> Sequence[Block]:
    found = contents.preprocessing
    assert found is not None
    before = f"{found['kept']} of {found['tasks']} tasks were done before"
    text = f"{found['rows']:,} rows in {found['output']}, {found['skipped']:,} left out; {before}."
    shown: list[Block] = [Text(text, leading=True)]
    if found["steps"]:
        shown.append(Figure("Tasks done over time, by step", _progress(found["steps"]), "A step that is steep is fast; a flat line waits."))
        rows = [
            (
                step["name"],
                f"{step['tasks']:,}",
                format_bytes(step["bytes"]),
                format_seconds(step["seconds"]),
                format_bytes(step["bytes"] / max(1e-9, step["seconds"])) + "/s",
            )
            for step in found["steps"]
        ]
        shown.append(Table("Steps", ("step", "tasks", "input", "time", "rate"), rows))
    columns = sorted(found["dictionaries"].items(), key=lambda own: (-own[1], own[0]))
    if columns:
        title = f"Distinct values of each column, the {min(len(columns), MOST_COLUMNS)} largest dictionaries of {len(columns)}"
        shown.append(Figure(title, _dictionaries(columns[:MOST_COLUMNS])))
    return shown


def _progress(steps: Sequence[Any]) -> BokehFigure:
    made = new_figure(320, tools="pan,box_zoom,reset,save", x_axis_label="time since the beginning (s)", y_axis_label="tasks done (%)")
    items = []
    for step, (colour, dash) in zip(steps, ((BLUE, "solid"), (SKY, "dashed"), (BLUE, "dotted")), strict=False):
        ends = step["ends_s"]
        xs, ys = [step["begin_s"], *ends], [100 * i / max(1, step["tasks"]) for i in range(len(ends) + 1)]
        items.append((step["name"], [made.step(xs, ys, mode="after", line_color=colour, line_dash=dash, line_width=2)]))
    legend_above(made, items)
    return made


def _dictionaries(columns: Sequence[tuple[str, int]]) -> BokehFigure:
    from bokeh.models import NumeralTickFormatter

    made = new_figure(height_of(len(columns)), x_axis_label="distinct values")
    made.hbar(y=[-i for i in range(len(columns))], right=[count for _, count in columns], left=0, height=0.7, color=BLUE, line_color=None)
    name_rows(made, [f"{name}: {count:,}" for name, count in columns])
    made.xaxis.formatter = NumeralTickFormatter(format="0,0")
    made.x_range.start = 0
    return made


SECTION = Section("preprocessed", "Preprocessing", without("preprocessing", "nothing was preprocessed (soap-preprocess --report)"), _blocks)
