"""A picture of a search: the best cost against proposals beside the starts, and how often each move was accepted."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from soap.errors import SoapError
from soap.search.record import SearchResult
from soap.search.sensitivity import Sensitivity
from soap.search.starts import BASELINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


FORMATS = ("png", "svg", "pdf")
COLORS = ("C0", "C1", "C2", "C4", "C5", "C6", "C8", "C9")
"""Colours of the starts except data parallelism."""
WIDE_RANGE = 5
"""Costs whose extremes differ by more than this factor are shown on a logarithmic axis."""


def check_plot(path: str | Path) -> None:
    """SoapError now if a picture could not be drawn for this path later; call it before long work."""
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise SoapError(f"picture {str(path)!r}: expected a name that ends in one of .{', .'.join(FORMATS)}")
    if find_spec("matplotlib") is None:
        raise SoapError("pictures need matplotlib, which is not installed; install it, or soap-search[plots]")


def plot(result: SearchResult, path: str | Path) -> bytes:
    """The picture as bytes in the format of the path's suffix. Equal searches give equal bytes (with the same matplotlib)."""
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    costs, moves = figure.subplots(1, 2, width_ratios=(2, 1))
    _draw_costs(costs, result)
    _draw_moves(moves, result)
    figure.suptitle(f"data parallelism costs {result.speedup:.2f}x the best after {len(result.rows)} proposals (seed {result.seed})")
    return picture(figure, path)


def picture(figure: Figure, path: str | Path) -> bytes:
    """A figure as bytes in the format of the path's suffix. Equal figures give equal bytes (with the same matplotlib)."""
    import matplotlib

    suffix = Path(path).suffix.lower().removeprefix(".")
    made_by = {"png": {"Software": "SOAP"}, "svg": {"Creator": "SOAP", "Date": None}, "pdf": {"Creator": "SOAP", "CreationDate": None}}
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "soap"}):
        figure.savefig(buffer, format=suffix, dpi=120, metadata=made_by[suffix])
    return buffer.getvalue()


def _draw_costs(axes: Axes, result: SearchResult) -> None:
    """Best cost, accepted proposals, and a line for each start; milliseconds."""
    accepted = [(row.proposal, row.cost_ns / 1e6) for row in result.rows if row.accepted and row.cost_ns is not None]
    if accepted:
        axes.plot(*zip(*accepted, strict=True), ".", color="0.6", markersize=4, label="accepted")
    fitting = [start for start in result.starts if start.fits]
    proposals, times_ms = [number for number, _ in result.best_costs], [cost_ns / 1e6 for _, cost_ns in result.best_costs]
    axes.step(proposals, times_ms, where="post", color="black", linewidth=2, label=f"best: {result.cost_ns / 1e6:.3f} ms")
    lines = {BASELINE: result.data_parallel_ns, **{start.name: start.cost_ns for start in fitting if start.name != BASELINE}}
    for number, (name, cost_ns) in enumerate(sorted(lines.items(), key=lambda line: -line[1])):
        color, kind, width = ("C3", "-", 1.5) if name == BASELINE else (COLORS[number % len(COLORS)], "--", 1.0)
        axes.axhline(cost_ns / 1e6, color=color, linestyle=kind, linewidth=width, label=f"{name}: {cost_ns / 1e6:.3f} ms")
    shown = [result.cost_ns, *lines.values()]
    if max(shown) > WIDE_RANGE * min(shown):
        axes.set_yscale("log")
    axes.set(xlabel="proposal", ylabel="cost: predicted time per iteration over the draws (ms)", title="best so far")
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4)


def _draw_moves(axes: Axes, result: SearchResult) -> None:
    """Acceptance per move, with the numbers of accepted and proposed moves."""
    names = list(result.acceptance)[::-1]
    counts = [result.acceptance[name] for name in names]
    shares = [count.accepted / count.proposed for count in counts]
    bars = axes.barh(names, shares, color="C0")
    axes.bar_label(bars, [f" {count.accepted} of {count.proposed}" for count in counts], fontsize="small")
    axes.set(xlabel="accepted share", title="moves", xlim=(0, 1.3 * max([0.01, *shares])))


HALF_COLOR, DOUBLE_COLOR = "C0", "C1"


def tornado(found: Sequence[Sensitivity], path: str | Path) -> bytes:
    """The picture as bytes in the format of the path's suffix. ``found``: of every figure, the widest first."""
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.6 + 0.5 * len(found)), layout="constrained")
    draw(figure.subplots(), found)
    return picture(figure, path)


def draw(axes: Axes, found: Sequence[Sensitivity]) -> None:
    """Two bars for each figure, from the gain as it is to that at half and at twice the figure; where the choice turns over, in words."""
    shown, gain = [one for one in found if one.is_known], found[0].usual
    names = [one.figure.value for one in shown]
    places = range(len(shown))
    halves, doubles = [one.at_half - gain for one in shown], [one.at_double - gain for one in shown]
    both_ways = [min(half, double) * max(half, double) > 0 for half, double in zip(halves, doubles, strict=True)]
    heights = [0.35 if same else 0.7 for same in both_ways]  # bars on one side stand beside each other, not on each other
    shift = [0.175 if same else 0.0 for same in both_ways]
    above = [place - own for place, own in zip(places, shift, strict=True)]
    below = [place + own for place, own in zip(places, shift, strict=True)]
    axes.barh(above, halves, height=heights, left=gain, color=HALF_COLOR, label="at half the figure")
    axes.barh(below, doubles, height=heights, left=gain, color=DOUBLE_COLOR, label="at twice the figure")
    axes.axvline(gain, color="black", linewidth=1.5, label=f"as it is: {gain:.2f}x")
    axes.axvline(1.0, color="C3", linewidth=1.5, linestyle="--", label="data parallelism: 1.00x")
    axes.set_yticks(list(places), [f"{name}\n{turning(one)}" for name, one in zip(names, shown, strict=True)])
    axes.invert_yaxis()
    axes.set(xlabel="predicted gain over data parallelism (x)", title="what turns the choice over")
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4)


def turning(one: Sensitivity) -> str:
    """Where the choice turns over, in words."""
    places = [f"{factor:.2g}x" for factor in (one.below, one.above) if factor is not None]
    return f"turns at {' and '.join(places)}" if places else "turns nowhere within 10x"
