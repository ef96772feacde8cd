"""The iteration, task by task, on devices and links: predicted, and measured where that is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from soap.report.figures import INK, TASK_COLOURS, duration, height_of, legend_above, name_rows, new_figure, plain, zoomable
from soap.report.section import Block, Contents, Figure, Section, Text
from soap.simulator.analysis.timeline import resource_names
from soap.simulator.analysis.timeline_file import Timeline
from soap.simulator.folded import FoldedSimulation
from soap.simulator.simulate import Simulation

if TYPE_CHECKING:
    from bokeh.models import LayoutDOM, Range1d
    from bokeh.plotting import figure as BokehFigure

MOST_BARS = 6_000
"""Of more, tasks of one kind that follow each other on a row are drawn as one bar, so that the page stays small and fluid."""
MOST_ROWS, MOST_DEVICES = 48, 32
"""Of more rows the first devices are shown, more than so many only if there are few links, and the busiest links."""
LEAST_HEIGHT = 300
"""Pixels: below that there is no room for all tools beside the picture."""


class Bar(NamedTuple):
    """A task on one device or link. Times in ns. ``tasks``: how many tasks it stands for."""

    row: str
    kind: str
    start_ns: int
    end_ns: int
    name: str
    size_bytes: int
    tasks: int = 1


def _lacks(contents: Contents) -> str:
    known = contents.simulation or contents.predicted or contents.measured
    return "" if known is not None else "there is no timeline of this plan"


def _blocks(contents: Contents) -> Sequence[Block]:
    found: list[Block] = [
        Text("Drag over a span of time to see it larger, turn the wheel with the control key, or go back with ↺. The legend hides kinds.")
    ]
    predicted = simulated_bars(contents.simulation) if contents.simulation is not None else []
    if contents.simulation is None and contents.predicted is not None:
        predicted = timeline_bars(contents.predicted)
    if contents.measured is None:
        made, about = draw(predicted)
        found.append(Figure(f"Predicted iteration{_copies(contents)}: what each device and link does when", made, about))
    else:
        described = contents.measured.description
        measured = timeline_bars(contents.measured)
        one = "The traced iteration" if described.iterations == 1 else f"One of {described.iterations} traced iterations, of middle length"
        whole = f"{one}; an untraced step takes {duration(described.iteration_ns)}."
        made, about = _both(predicted, measured)
        found.append(Figure("Predicted iteration above, a measured one below, on one time axis", made, f"{whole} {about}"))
    return found


def _both(predicted: Sequence[Bar], measured: Sequence[Bar]) -> tuple[LayoutDOM, str]:
    """The pictures of both, which are zoomed together, and what is to be said of them."""
    from bokeh.layouts import column
    from bokeh.models import Range1d

    end_ms = max((bar.end_ns for bar in (*predicted, *measured)), default=1) / 1e6
    shared, pictures, told = Range1d(0, end_ms, bounds=(0, end_ms)), [], []
    for name, bars in (("predicted", predicted), ("measured", measured)):
        if bars:
            made, about = draw(bars, shared)
            made.title.text, made.title.text_color = name, INK
            pictures.append(made)
            told.append(f"{name.capitalize()}: {about}")
    return column(*pictures, sizing_mode="stretch_width"), " ".join(told)


def _copies(contents: Contents) -> str:
    folded = isinstance(contents.simulation, FoldedSimulation)
    return " (two of the equal copies)" if folded else ""


def simulated_bars(simulation: Simulation | FoldedSimulation) -> list[Bar]:
    """The bars of a simulation: a task is on each device and link that it holds."""
    tasks, names = simulation.tasks, resource_names(simulation.tasks)
    found = []
    for task, start in zip(tasks.tasks, simulation.schedule.start_ns.tolist(), strict=True):
        for resource in task.resources:
            found.append(Bar(names[resource], task.kind.value, start, start + task.held_ns, task.name, task.bytes))
    return found


def timeline_bars(timeline: Timeline) -> list[Bar]:
    """The bars of a timeline from a file."""
    tasks = timeline.tasks.values()
    first = min((task.start_ns for task in tasks), default=0)
    return [
        Bar(row, task.kind.value, task.start_ns - first, task.end_ns - first, task.name, task.bytes)
        for task in tasks
        for row in task.threads
    ]


def shown_rows(bars: Sequence[Bar]) -> tuple[list[str], int]:
    """Names of the rows that are shown: what computes, by name, then what communicates, the busiest first; and how many are left out."""
    busy: dict[str, int] = {}
    computes: dict[str, None] = {}
    for bar in bars:
        busy[bar.row] = busy.get(bar.row, 0) + bar.end_ns - bar.start_ns
        if bar.kind in ("forward", "backward", "update", "recompute", "weights"):
            computes[bar.row] = None
    devices = [row for row in busy if row in computes]
    others = sorted((row for row in busy if row not in computes), key=lambda row: (-busy[row], row))
    room = max(MOST_DEVICES, MOST_ROWS - len(others))
    shown = [*sorted(devices, key=natural)[:room], *others][:MOST_ROWS]
    return shown, len(busy) - len(shown)


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key: numbers in names count as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _parts(name)]


def _parts(name: str) -> list[str]:
    return ["".join(own) for _, own in groupby(name, key=str.isdigit)]


def merged(bars: Sequence[Bar], most: int = MOST_BARS) -> tuple[list[Bar], int]:
    """At most so many bars, and the ns within which tasks of one kind on one row were joined; 0 if none was."""
    if len(bars) <= most:
        return list(bars), 0
    span = max(bar.end_ns for bar in bars)
    width_ns = max(1, span // most)
    while True:
        found = _joined(bars, width_ns)
        if len(found) <= most or width_ns > span:
            return found, width_ns
        width_ns *= 2


def _joined(bars: Sequence[Bar], width_ns: int) -> list[Bar]:
    found: list[Bar] = []
    for _, group in groupby(sorted(bars, key=lambda bar: (bar.row, bar.kind, bar.start_ns)), key=lambda bar: (bar.row, bar.kind)):
        open_bar: Bar | None = None
        for bar in group:
            near = open_bar is not None and bar.start_ns - open_bar.end_ns < width_ns and bar.end_ns - open_bar.start_ns < 2 * width_ns
            if open_bar is None or not near:
                found += [] if open_bar is None else [open_bar]
                open_bar = bar
            else:
                end_ns = max(open_bar.end_ns, bar.end_ns)
                sizes = open_bar.size_bytes + bar.size_bytes
                open_bar = open_bar._replace(end_ns=end_ns, size_bytes=sizes, tasks=open_bar.tasks + bar.tasks)
        found += [] if open_bar is None else [open_bar]
    return found


def draw(bars: Sequence[Bar], x_range: Range1d | None = None) -> tuple[BokehFigure, str]:
    """The picture, and what is to be said of it."""
    from bokeh.models import ColumnDataSource, Range1d

    rows, left_out = shown_rows(bars)
    kept = [bar for bar in bars if bar.row in set(rows)]
    shown, width_ns = merged(kept)
    place = {row: number for number, row in enumerate(rows)}
    end_ms = max((bar.end_ns for bar in kept), default=1) / 1e6
    span = x_range or Range1d(0, end_ms, bounds=(0, end_ms))
    across = (0.5 - len(rows), 0.5)
    height = max(LEAST_HEIGHT, height_of(len(rows)) + 40)
    made = new_figure(height, x_range=span, y_range=across, x_axis_label="time since the iteration began (ms)")
    by_kind: dict[str, list[Bar]] = {}
    for bar in shown:
        by_kind.setdefault(bar.kind, []).append(bar)
    items = []
    for kind, colour in TASK_COLOURS.items():
        if kind in by_kind:
            source = ColumnDataSource(_columns(by_kind[kind], place))
            drawn = made.hbar(y="y", left="left", right="right", height=0.8, color=colour, line_color=None, source=source)
            items.append((kind, [drawn]))
    legend_above(made, items)
    name_rows(made, rows)
    told = [("task", "@name"), ("start", "@left{0,0.000} ms"), ("lasts", "@lasts"), ("moves", "@moves")]
    zoomable(made, told)
    return made, _about(len(kept), len(shown), width_ns, left_out)


def _columns(bars: Sequence[Bar], place: Mapping[str, int]) -> dict[str, object]:
    import numpy as np

    more = [f" and {bar.tasks - 1} more" if bar.tasks > 1 else "" for bar in bars]
    return {
        "y": np.array([-place[bar.row] for bar in bars], np.float32),
        "left": np.array([bar.start_ns / 1e6 for bar in bars], np.float64),
        "right": np.array([bar.end_ns / 1e6 for bar in bars], np.float64),
        "name": [plain(bar.name) + own for bar, own in zip(bars, more, strict=True)],
        "lasts": [duration(bar.end_ns - bar.start_ns) for bar in bars],
        "moves": [f"{bar.size_bytes:,} bytes" if bar.size_bytes else "nothing" for bar in bars],
    }


def _about(tasks: int, bars: int, width_ns: int, left_out: int) -> str:
    """How many tasks there are, and what is not drawn by itself."""
    found = f"{tasks:,} tasks on devices and links"
    if width_ns:
        found += f", drawn as {bars:,} bars: tasks of one kind less than {duration(width_ns)} apart are joined (--timeline writes all)"
    if left_out:
        found += f"; {left_out} devices and links are left out"
    return f"{found}."


SECTION = Section("timeline", "Timeline", _lacks, _blocks)
