"""How the plan was found: the best cost against proposals and time, and what became of each kind of proposal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from soap.report.figures import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PINK,
    RED,
    SKY,
    WINE,
    duration,
    height_of,
    legend_above,
    name_rows,
    new_figure,
    plain,
)  # fmt: skip
from soap.report.section import Block, Contents, Figure, Section, Table, Text, without
from soap.search.plot import WIDE_RANGE
from soap.search.record import SearchResult
from soap.search.starts import BASELINE

if TYPE_CHECKING:
    from bokeh.plotting import figure as BokehFigure

START_COLOURS = (SKY, GREEN, PINK, RED, WINE)
MOST_ACCEPTED = 3000
"""Accepted proposals that are drawn, evenly spread over all."""
MOST_LINES = 7
"""Starts whose cost is a line: data parallelism, and the best others."""
FARTHEST = 1.2
"""A start that costs this many times what data parallelism and all accepted proposals do has no line: it would leave these no room."""


def _blocks(contents: Contents) -> Sequence[Block]:
    result = contents.result
    assert result is not None
    ended = ", ended by the user" if result.interrupted else ""
    text = (
        f"{result.evaluations:,} simulations{ended}, seed {result.seed}: data parallelism costs {result.speedup:.2f} times the best. A "
        "cost is what the search compares by: it weighs the times under all draws of the costs, by default the slow ones more. So it is "
        "above the predicted time, that under the most likely costs, which all other tabs show."
    )
    found: list[Block] = [Text(text, leading=True)]
    found.append(Figure("Best cost so far against proposals, beside the starts", _against_proposals(result), "Dots: accepted proposals."))
    found.append(_starts(result, contents.start_times))
    if result.improvements:
        about = "Each step is a new best plan. What chains in compiled code find is known at the end of their rounds."
        found.append(Figure("Best cost so far against time", _against_time(result), about))
    if result.acceptance:
        about = "Acceptance near 0 means that a kind of proposal no longer helps; near 1, that the search wanders."
        found.append(Figure("Share of proposals that were accepted, by kind", _acceptance(result), about))
        moves = result.acceptance.items()
        counts = [(name, f"{own.proposed:,}", f"{own.accepted:,}", f"{own.accepted / own.proposed:.1%}") for name, own in moves]
        found.append(Table("Proposals", ("kind", "proposed", "accepted", "share"), counts))
    return found


def _against_proposals(result: SearchResult) -> BokehFigure:
    accepted = [(row.proposal, row.cost_ns / 1e6) for row in result.rows if row.accepted and row.cost_ns is not None]
    accepted = accepted[:: 1 + len(accepted) // MOST_ACCEPTED]
    best = thinned(result.best_costs)
    most = FARTHEST * max([result.data_parallel_ns, *(1e6 * cost_ms for _, cost_ms in accepted)])
    near = [start for start in result.starts if start.fits and start.name != BASELINE and start.cost_ns <= most]
    near.sort(key=lambda start: start.cost_ns)
    lines = {BASELINE: result.data_parallel_ns, **{start.name: start.cost_ns for start in near[: MOST_LINES - 1]}}
    shown = [result.cost_ns, *lines.values()]
    scale = "log" if max(shown) > WIDE_RANGE * min(shown) else "linear"
    made = new_figure(400, tools="pan,box_zoom,reset,save", x_axis_label="proposal", y_axis_label="cost (ms)", y_axis_type=scale)
    items = []
    if accepted:
        dots = made.scatter([x for x, _ in accepted], [y for _, y in accepted], size=3, color=GREY, line_color=None)
        items.append(("accepted", [dots]))
    last = max([1, *(number for number, _ in best)])
    for number, (name, cost_ns) in enumerate(lines.items()):
        colour = ORANGE if name == BASELINE else START_COLOURS[(number - 1) % len(START_COLOURS)]
        dash = "solid" if name == BASELINE else ("dashed", "dotted")[(number - 1) // len(START_COLOURS)]
        line = made.line([0, last], [cost_ns / 1e6] * 2, line_color=colour, line_dash=dash, line_width=1.5)
        items.append((plain(f"{name} {cost_ns / 1e6:.4g} ms", 40), [line]))
    step = made.step([x for x, _ in best], [y / 1e6 for _, y in best], mode="after", line_color=BLUE, line_width=2.5)
    items.append((f"best {result.cost_ns / 1e6:.4g} ms", [step]))
    legend_above(made, items)
    return made


def _starts(result: SearchResult, known: Mapping[str, int]) -> Table:
    """``known``: predicted times by name."""
    rows = []
    for start in sorted(result.starts, key=lambda start: start.cost_ns):
        predicted = duration(known[start.name]) if start.name in known else ""
        times = f"{start.cost_ns / max(1, result.cost_ns):.2f}"
        rows.append((start.name, predicted, duration(start.cost_ns), times, "fits" if start.fits else "does not fit"))
    return Table("What the search began with", ("start", "predicted", "cost", "cost, times the best", "memory"), rows)


def thinned(best: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Points of the best cost where it changes, and the last one."""
    changes = [own for before, own in zip([None, *best], best, strict=False) if before is None or before[1] != own[1]]
    return changes + ([best[-1]] if best and best[-1] != changes[-1] else [])


def _against_time(result: SearchResult) -> BokehFigure:
    from bokeh.models import ColumnDataSource, HoverTool

    rows = result.improvements
    made = new_figure(300, tools="pan,box_zoom,reset,save", x_axis_label="time since the search began (s)", y_axis_label="cost (ms)")
    data = {"x": [own.seconds for own in rows], "y": [own.cost_ns / 1e6 for own in rows], "proposal": [own.proposal for own in rows]}
    source = ColumnDataSource(data)
    made.step("x", "y", mode="after", line_color=BLUE, line_width=2, source=source)
    dots = made.scatter("x", "y", size=6, color=BLUE, source=source)
    tips = [("after", "@x{0.00} s"), ("cost", "@y{0,0.000} ms"), ("proposals", "@proposal")]
    made.add_tools(HoverTool(renderers=[dots], tooltips=tips))
    return made


def _acceptance(result: SearchResult) -> BokehFigure:
    names = list(result.acceptance)
    counts = [result.acceptance[name] for name in names]
    shares = [100 * own.accepted / own.proposed for own in counts]
    most = max(1.0, *shares)
    made = new_figure(height_of(len(names)), x_axis_label="accepted (% of proposed)", x_range=(0, 1.2 * most))
    made.hbar(y=[-i for i in range(len(names))], right=shares, left=0, height=0.7, color=BLUE, line_color=None)
    told = [f" {own.accepted:,} of {own.proposed:,}" for own in counts]
    ys = [-i for i in range(len(names))]
    made.text(x=shares, y=ys, text=told, text_baseline="middle", text_font_size="12px", text_color=INK, x_offset=2)
    name_rows(made, names)
    return made


SECTION = Section("search", "Search", without("result", "the plan was not searched for here (soap-search --report)"), _blocks)
