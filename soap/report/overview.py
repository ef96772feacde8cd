"""The plan at a glance: how long a step takes, how sure that is, what it beats, whether it fits, and what binds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from soap.model.graph import SUM_DTYPES
from soap.report.figures import BLUE, GREY, INK, ORANGE, TASK_COLOURS, duration, height_of, legend_above, name_rows, new_figure, plain
from soap.report.section import Block, Contents, Figure, Section, Table, Text, without
from soap.search.deciding import FASTEST, SAFE
from soap.units import format_bytes

if TYPE_CHECKING:
    from bokeh.plotting import figure as BokehFigure

THIS = "this plan"


def _blocks(contents: Contents) -> Sequence[Block]:
    summary = contents.summary
    assert summary is not None
    verdict = Text(_verdict(summary) + _measured(contents), leading=True)
    found: list[Block] = [verdict, Table("The plan", ("", ""), _facts(contents, summary), words=True)]
    title = f"Predicted time per iteration: this plan beside {len(summary['baselines'])} strategies that have a name"
    about = "The thin line at this plan's bar is where 80% of the draws of the costs are. Orange: does not fit into memory."
    head = ("strategy", "predicted", "speed-up over it", "memory")
    found += [*_two_plans(summary), Figure(title, _times(summary), about), Table("Speed-up", head, _baselines(summary))]
    if contents.simulation is not None and contents.simulation.critical_path_ns:
        path = {kind.value: ns for kind, ns in contents.simulation.critical_path_ns.items()}
        about = "Of the tasks of which each waits for the one before it: they add up to the iteration. What is long here is worth changing."
        found.append(Figure("What binds: the critical path by kind of task", _binding(path), about))
    return found


def _verdict(summary: Mapping[str, Any]) -> str:
    low, _, high = summary["range"]["time_ns"]
    least, _, most = summary["range"]["speedup"]
    verdict = "fits into memory" if summary["fits"] else "does NOT fit into memory"
    sure = f" ({duration(low)} to {duration(high)} in 80% of draws of the costs)"
    gain = "" if least == most else f", between {least:.2f} and {most:.2f}"
    speed = f"{summary['speedup']:.2f} times as fast as data parallelism{gain}"
    return f"{duration(summary['predicted_ns'])} per iteration{sure}: {speed}. It {verdict}."


def _measured(contents: Contents) -> str:
    """The measured time of the run itself; "" if none was measured."""
    if (found := contents.comparison) is None:
        return ""
    ratio = found.measured_ns / max(1, found.predicted_ns)
    return f" Measured: {duration(found.measured_ns)} in the iteration that was traced, {ratio:.2f} times its prediction."


def _facts(contents: Contents, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    model, cluster = summary["model"], summary["cluster"]
    peaks, available = summary["expected_memory_bytes"], summary["available_memory_bytes"]
    usual_moved = summary["data_parallel_bytes_moved"]
    fullest = max(range(len(peaks)), key=lambda device: peaks[device] / available[device])
    name = cluster["devices"][fullest]
    rows = [
        ("model", f"{model['name']}, {model['operators']} operators"),
        ("cluster", f"{cluster['name']}, {len(cluster['devices'])} devices"),
        ("costs", summary["costs"]["description"]),
        ("fullest device", f"{name}: {format_bytes(peaks[fullest])} of {format_bytes(available[fullest])} at its peak"),
        ("moved per iteration", f"{format_bytes(summary['bytes_moved'])} (data parallelism: {format_bytes(usual_moved)})"),
    ]
    if sums := summary.get("sum_dtype"):
        rows.append(("partial results", f"made, sent and added up in {SUM_DTYPES[sums]}"))
    if (per_second := summary["throughput"]["samples_per_second"]) is not None:
        rate = f"{per_second:,.0f}" if per_second >= 1000 else f"{per_second:.4g}"
        rows.append(("throughput", f"{rate} samples per second, MFU {_share(summary['throughput']['mfu'])}"))
    if summary["same_as"]:
        rows.append(("the same as", summary["same_as"]))
    if summary["folded"] and "copies" in summary["folded"]:
        folded = summary["folded"]
        rows.append(("equal copies", f"{folded['copies']}, on {folded['devices_per_copy']} devices each: two of them were simulated"))
    if contents.simulation is not None and (busy := busiest_link(contents.simulation)):
        rows.append(("busiest link", busy))
    return rows


def _two_plans(summary: Mapping[str, Any]) -> list[Block]:
    """The fastest and the safe plan of a search, if nothing was run."""
    found, files = summary.get("decision"), summary.get("files", {})
    if found is None or found["reference"] is None:
        return []
    rows = []
    for answer in (FASTEST, SAFE):
        own = found["plans"][found[answer]]
        low, high = map(duration, own["time_ns"])
        won = f"{own['wins'] * found['draws']:.0f} of {found['draws']} draws, {own['gain'][0]:.2f} to {own['gain'][1]:.2f} times as fast"
        sure = "" if found[answer] == found["reference"] else won
        shown = f"{found[answer]}{' (this plan)' if answer == found['answer'] else ''}"
        rows.append((answer, shown, duration(own["predicted_ns"]), f"{low} to {high}", sure, files.get(answer, "")))
    head = ("plan", "name", "predicted", "80% of draws", f"beats {found['reference']} in", "file")
    return [Table("The fastest plan on average, and the safe one", head, rows, words=True)]


def _share(mfu: float) -> str:
    return f"{mfu:.1%}" if mfu >= 0.0005 else "under 0.1%"


def busiest_link(simulation: Any) -> str:
    """The link that is held longest, with what it carries; "" if none carries anything."""
    held = {name: simulation.busy_ns[name] for name, size in simulation.link_bytes.items() if size}
    if not held:
        return ""
    name = max(held, key=lambda own: held[own])
    share = held[name] / max(1, simulation.makespan_ns)
    return f"{name}: held for {duration(held[name])} ({share:.0%} of the iteration), {format_bytes(simulation.link_bytes[name])}"


def _bars(summary: Mapping[str, Any]) -> list[tuple[str, int, bool]]:
    """(name, time in ns, whether it fits), this plan first and then the fastest."""
    known = [(name, own["predicted_ns"], not own["overflow_bytes"]) for name, own in summary["baselines"].items() if own["predicted_ns"]]
    return [(THIS, summary["predicted_ns"], summary["fits"]), *sorted(known, key=lambda own: own[1])]


def _times(summary: Mapping[str, Any]) -> BokehFigure:
    from bokeh.models import ColumnDataSource, HoverTool, Range1d

    bars = _bars(summary)
    low, _, high = (own / 1e6 for own in summary["range"]["time_ns"])
    most = max(high, *(time_ns / 1e6 for _, time_ns, _ in bars))
    made = new_figure(height_of(len(bars)), x_range=Range1d(0, 1.18 * most), x_axis_label="predicted time per iteration (ms)")
    colours = [ORANGE if not fits else BLUE if name == THIS else GREY for name, _, fits in bars]
    data = {
        "y": [-i for i in range(len(bars))],
        "right": [time_ns / 1e6 for _, time_ns, _ in bars],
        "end": [max(high, bars[0][1] / 1e6), *(time_ns / 1e6 for _, time_ns, _ in bars[1:])],
        "name": [name for name, _, _ in bars],
        "colour": colours,
        "told": [f" {duration(time_ns)}" + ("" if fits else ", does not fit") for _, time_ns, fits in bars],
    }
    source = ColumnDataSource(data)
    drawn = made.hbar(y="y", right="right", left=0, height=0.7, color="colour", line_color=None, source=source)
    made.segment(x0=[low], x1=[high], y0=[0], y1=[0], line_width=2, line_color=INK)
    made.text(x="end", y="y", text="told", text_baseline="middle", text_font_size="12px", text_color=INK, source=source, x_offset=4)
    name_rows(made, [name for name, _, _ in bars])
    made.add_tools(HoverTool(renderers=[drawn], tooltips=[("strategy", "@name"), ("predicted", "@right{0.000} ms")]))
    return made


def _baselines(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, own in sorted(summary["baselines"].items(), key=lambda pair: pair[1]["predicted_ns"] or float("inf")):
        if own["predicted_ns"] is None:
            rows.append((name, "not simulated", "", "too many tiles"))
            continue
        lacking = own["overflow_bytes"]
        speed = own["predicted_ns"] / max(1, summary["predicted_ns"])
        memory = f"{format_bytes(lacking)} missing" if lacking else "fits"
        rows.append((name, duration(own["predicted_ns"]), f"{speed:.2f}x", memory))
    return rows


def _binding(path: Mapping[str, int]) -> BokehFigure:
    made = new_figure(150, x_axis_label="time (ms)", y_range=(-0.6, 0.6))
    at, items = 0.0, []
    for kind, ns in sorted(path.items(), key=lambda own: -own[1]):
        bar = made.hbar(y=[0], left=[at], right=[at + ns / 1e6], height=0.8, color=TASK_COLOURS[kind], line_color=None)
        items.append((plain(f"{kind} {duration(ns)}"), [bar]))
        at += ns / 1e6
    legend_above(made, items, hide=False)
    made.yaxis.visible = False
    made.ygrid.grid_line_color = None
    made.x_range.range_padding = 0
    return made


SECTION = Section("overview", "Overview", without("summary", "no plan was simulated"), _blocks)
