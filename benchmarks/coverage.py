"""Are predicted ranges as wide as they should be? A range that is said to hold a share of the plans should hold that share of them.

    python -m benchmarks.coverage results.json --write docs/results/coverage.md

takes what ``benchmarks.default_command`` has kept and the plans of ``docs/accuracy.md``, and writes the page and, beside it, the picture
(``coverage.svg``): the share that a range in the middle of what is predicted is said to hold, and the share of the plans that it holds.

- Plans of the results have their draws: a range is one of their quantiles.
- Of the plans of ``docs/accuracy.md`` neither the strategies that were found or drawn at random are kept, nor the costs at hand when they
  were predicted, so that they cannot be played under draws. Their range is another one than reports show: a *normal interval* of
  ln(measured / predicted), around 0, as wide as the errors of the plans of all other models (leave one model out).
"""

from __future__ import annotations

import argparse
import io
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

from benchmarks import accuracy_report, default_cells
from benchmarks.accuracy_report import Plan
from benchmarks.default_cells import Cell, Foreseen
from benchmarks.default_page import RANGE, TITLES, by_mode
from benchmarks.step_errors import judged
from soap.errors import SoapError
from soap.files import check_writable, read_text, write_bytes_atomically, write_text_atomically
from soap.search.plot import check_plot

SHARES = tuple(number / 100 for number in range(10, 100, 5))
AIM = (0.7, 0.9)
"""The share of plans that the range of 80% is meant to hold."""
ACCURACY = Path(__file__).parents[1] / "docs/accuracy.md"
ACCURACY_NAME = "docs/accuracy.md, normal interval, each model by the others"


HEAD = f"""# How many plans predicted ranges hold

![Share of the plans inside a range, against the share that it is said to hold]({{picture}})

    python -m benchmarks.coverage FILE --write docs/results/coverage.md

The range of {RANGE:.0%} is meant to hold {AIM[0]:.0%} to {AIM[1]:.0%} of the plans. *Below* and *above* count those beside it: of times the
faster and the slower ones, of gains the smaller and the greater. Plans without draws have another range than the one in reports (below).

| plans | number | inside the range of {RANGE:.0%} | as meant | below | above |
|---|---:|---:|---|---:|---:|"""
DRAWN = """## Plans with draws

Plans that `benchmarks.default_command` timed on this machine ([default_command.md](default_command.md)) have draws of their times, by the
costs that are known after the command, and by what a step takes beside its tasks in the plans of all other models. A range lies between two
quantiles of the draws. Modes of the command:"""
LEFT_OUT = f"""## Plans on emulated clusters

These are not the ranges that reports show. Those are quantiles of draws of the errors in `soap/profiles/data/spreads.json`, whose figures
for measured costs follow from all of these plans. To play the plans of [docs/accuracy.md](../accuracy.md) under draws without their own
model takes their strategies, of which the found and the random ones are not kept, and the costs measured before each round, which are
not kept either. So their range is a *normal interval*: of ln(measured / predicted), around 0, as wide as the errors (root mean square) of
the plans of all other models. It says whether errors of one model's plans are as large as those of the others', on which the figures rest;
not whether those figures add up to them.

| model | plans | spread of the others | inside the range of {RANGE:.0%} |
|---|---:|---:|---:|"""


class Series(NamedTuple):
    """Plans of one kind: how many, and for each of ``SHARES`` the share of them inside. ``below``, ``above``: how many lie beside the range
    of ``RANGE``, because they are faster, or slower."""

    name: str
    plans: int
    inside: tuple[float, ...]
    below: int
    above: int

    @property
    def at_range(self) -> float:
        """The share inside the range that is reported."""
        return self.inside[SHARES.index(RANGE)]


def drawn(name: str, foreseen: Sequence[Foreseen]) -> Series:
    """Of what has draws; at least one."""
    inside = tuple(sum(own.inside(share) for own in foreseen) / len(foreseen) for share in SHARES)
    ranges = [(own.measured, *own.between(RANGE)) for own in foreseen]
    below, above = sum(value < low for value, low, _ in ranges), sum(value > high for value, _, high in ranges)
    return Series(name, len(foreseen), inside, below, above)


def others_spread(plans: Sequence[Plan], model: str) -> float:
    """Root mean square of ln(measured / predicted) of all plans of other models. SoapError if there are none."""
    errors = [_error(plan) for plan in plans if plan.model != model]
    if not errors:
        raise SoapError(f"all plans are of {model}; expected those of two models, to judge each by the other")
    return math.sqrt(sum(error * error for error in errors) / len(errors))


def left_out(name: str, plans: Sequence[Plan]) -> Series:
    """Of plans that have a prediction and no draws: each model's by the spread of the others'."""
    spreads = {model: others_spread(plans, model) for model in {plan.model for plan in plans}}
    places = [NormalDist(0.0, spreads[plan.model]).cdf(_error(plan)) for plan in plans]
    inside = tuple(sum(abs(2 * place - 1) <= share for place in places) / len(places) for share in SHARES)
    edge = (1 - RANGE) / 2
    return Series(name, len(plans), inside, sum(own < edge for own in places), sum(own > 1 - edge for own in places))


def _error(plan: Plan) -> float:
    return math.log(plan.measured_ns / plan.predicted_ns)


def series_of(cells: Sequence[Cell], plans: Sequence[Plan]) -> list[Series]:
    """The accuracy tables' plans, then of each mode the times of all plans and the gains of those that differ."""
    found = [left_out(ACCURACY_NAME, plans)] if plans else []
    for mode, own in by_mode(judged(cells)).items():
        found.append(drawn(f"{mode}: times", [time for cell in own for time in cell.times]))
        if gains := [gain for cell in own if (gain := cell.gain) is not None]:
            found.append(drawn(f"{mode}: gains", gains))
    return found


def page(series: Sequence[Series], plans: Sequence[Plan], picture: str) -> str:
    """Markdown. ``picture``: its name."""
    used = {own.name.split(":")[0] for own in series}
    modes = "; ".join(f"*{mode}*: {title[0].lower()}{title[1:]}" for mode, title in TITLES.items() if mode in used)
    parts = [HEAD.format(picture=picture), *map(_line, series), ""]
    if modes:
        parts += [DRAWN, f"{modes}.", ""]
    if plans:
        parts += [LEFT_OUT, *_by_model(plans), ""]
    return "\n".join(parts)


def _line(own: Series) -> str:
    meant = "yes" if AIM[0] <= own.at_range <= AIM[1] else "no"
    return f"| {own.name} | {own.plans} | {own.at_range:.0%} | {meant} | {own.below} | {own.above} |"


def _by_model(plans: Sequence[Plan]) -> list[str]:
    lines = []
    reach = NormalDist().inv_cdf((1 + RANGE) / 2)
    for model in dict.fromkeys(plan.model for plan in plans):
        spread, own = others_spread(plans, model), [abs(_error(plan)) for plan in plans if plan.model == model]
        lines.append(f"| {model} | {len(own)} | {spread:.3f} | {sum(error <= reach * spread for error in own) / len(own):.0%} |")
    return lines


def picture(series: Sequence[Series], path: Path) -> bytes:
    """The curves; equal series give equal bytes (with the same matplotlib)."""
    check_plot(path)
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1, label="as said")
    axes.plot([RANGE, RANGE], AIM, color="black", linewidth=4, alpha=0.4, label=f"meant at {RANGE:.0%}")
    kinds = list(dict.fromkeys(own.name.split(":")[0] for own in series))
    for own in series:
        gains = own.name.endswith("gains")
        color = f"C{kinds.index(own.name.split(':')[0])}"  # a mode's times and gains share one
        axes.plot(SHARES, own.inside, "--" if gains else "-", color=color, marker=".", label=f"{own.name} ({own.plans})")
    axes.set(xlabel="share that the range is said to hold", ylabel="share of plans inside", xlim=(0, 1), ylim=(0, 1.02), aspect="equal")
    figure.legend(fontsize="small", loc="outside lower center", ncols=2)
    suffix = path.suffix.lower().removeprefix(".")
    dates = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[suffix]
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "soap"}):
        figure.savefig(buffer, format=suffix, dpi=120, metadata=dates)
    return buffer.getvalue()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="coverage", description="Whether predicted ranges hold as many plans as they say.")
    parser.add_argument("results", nargs="*", type=Path, metavar="FILE", help="that benchmarks.default_command --results keeps")
    tables = "with tables of benchmarks.accuracy (default docs/accuracy.md)"
    parser.add_argument("--accuracy", type=Path, default=ACCURACY, metavar="DOC", help=tables)
    parser.add_argument("--write", type=Path, required=True, metavar="PAGE", help="Markdown; the picture goes beside it, as .svg")
    args = parser.parse_args(argv)
    drawing = args.write.with_suffix(".svg")
    try:
        for path in (args.write, drawing):
            check_writable(path)
        check_plot(drawing)
        cells = []
        for path in args.results:
            if not (own := default_cells.read(path)):
                parser.error(f"no cells in {path}; expected what benchmarks.default_command --results keeps")
            cells += own
        plans = _plans(args.accuracy)
        if not (series := series_of(cells, plans)):
            parser.error(f"no plans in {args.accuracy}, and no results; expected either")
        write_bytes_atomically(drawing, picture(series, drawing))
        write_text_atomically(args.write, page(series, plans, drawing.name))
    except SoapError as error:
        parser.error(str(error))
    return 0


def _plans(path: Path) -> list[Plan]:
    try:
        return accuracy_report.read(read_text(path))
    except ValueError as error:
        raise SoapError(f"{path}: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
