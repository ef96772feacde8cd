"""What predictions were worth: tables of plans as predicted and measured, and their errors, order and best, by ``benchmarks.accuracy``.

    python -m benchmarks.accuracy_report docs/accuracy.md

says it again of all plans that stand in some files' tables, which may be of several runs (one of all clusters and models takes hours).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import NamedTuple

from soap.errors import SoapError
from soap.files import read_text

FOUND, USUAL = "found", "data_parallel"
PREFIX = "emulated-"
"""Of names in ``benchmarks.models``; documents leave it out."""
WITHIN = 0.15
HEAD = ("cluster", "model", "strategy", "predicted, ms", "measured, ms", "error", "rounds apart", "predictions apart")


class Plan(NamedTuple):
    """A strategy of a model on a cluster, and nanoseconds per iteration as predicted and measured. ``rounds_ns``: each round's median.
    ``predictions_ns``: each round's, where each had its own."""

    cluster: str
    model: str
    strategy: str
    predicted_ns: int
    measured_ns: int
    rounds_ns: tuple[float, ...] = ()
    predictions_ns: tuple[float, ...] = ()

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted_ns / self.measured_ns - 1

    @property
    def apart(self) -> float:
        """How far the rounds are from each other, relative to what was measured."""
        return _range(self.rounds_ns) / self.measured_ns

    @property
    def predictions_apart(self) -> float:
        """How far the rounds' predictions are from each other, relative to their median."""
        return _range(self.predictions_ns) / self.predicted_ns


def _range(values: Sequence[float]) -> float:
    return max(values) - min(values) if values else 0.0


def in_rounds(rounds: Sequence[Sequence[Plan]]) -> list[Plan]:
    """The same plans as predicted and run in each round: medians of both."""
    found = []
    for own in zip(*rounds, strict=True):
        predictions = tuple(float(plan.predicted_ns) for plan in own)
        times = tuple(time for plan in own for time in plan.rounds_ns)
        cluster, model, strategy = own[0][:3]
        found.append(Plan(cluster, model, strategy, int(median(predictions)), int(median(times)), times, predictions))
    return found


def tau(*groups: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-a: agreeing less disagreeing pairs of pairs, divided by all; ties count as neither. Of several groups, pairs within
    one."""
    pairs = [pair for own in groups for pair in combinations(own, 2)]
    signs = [((a[0] > b[0]) - (a[0] < b[0])) * ((a[1] > b[1]) - (a[1] < b[1])) for a, b in pairs]
    return sum(signs) / max(1, len(signs))


def line_of(plan: Plan) -> str:
    """A plan's line of the table under ``HEAD``."""
    return (
        f"| {plan.cluster} | {plan.model} | {plan.strategy} | {plan.predicted_ns / 1e6:.1f} | {plan.measured_ns / 1e6:.1f} | "
        f"{plan.error:+.1%} | {plan.apart:.1%} | {plan.predictions_apart:.1%} |"
    )


def read(text: str) -> list[Plan]:
    """The plans of all such tables in a text, to a tenth of a millisecond, without their rounds. Raises ValueError for a line that has
    no times in their places."""
    found: list[Plan] = []
    inside = False
    for line in text.splitlines():
        cells = tuple(cell.strip() for cell in line.strip().strip("|").split("|"))
        inside = cells == HEAD or (inside and len(cells) == len(HEAD))
        if inside and cells != HEAD and not set("".join(cells)) <= set("-:"):
            found.append(Plan(cells[0], cells[1].removeprefix(PREFIX), cells[2], *(_nanoseconds(cell, line) for cell in cells[3:5])))
    return found


def _nanoseconds(cell: str, line: str) -> int:
    try:
        time_ns = round(float(cell) * 1e6)
    except (ValueError, OverflowError):
        time_ns = 0
    if time_ns <= 0:
        raise ValueError(f"{cell!r} in the line {line.strip()!r}: expected milliseconds above 0")
    return time_ns


def report(plans: Sequence[Plan]) -> list[str]:
    """One line per cluster and model: errors, order, and how far the found plan is from the measured best, if it is there. Then one per
    model, of its plans on all clusters, if there are several: of all pairs' order, and of that of plans for the same cluster, which is
    what a search asks for. And one of all plans."""
    lines = [
        "| cluster | model | plans | median error | 95% within | Kendall's tau | found / best measured | data parallel / found, measured |",
        f"|{'---|' * 8}",
    ]
    for own in _grouped(plans, lambda plan: (plan.cluster, plan.model)):
        of = {plan.strategy: plan.measured_ns for plan in own}
        ratios = "- | -"
        if FOUND in of:
            usual = of.get(USUAL, of[FOUND])  # left out if it is what was found
            ratios = f"{of[FOUND] / min(of.values()):.3f} | {usual / of[FOUND]:.2f}"
        lines.append(f"| {own[0].cluster} | {own[0].model} | {_figures(own)} | {ratios} |")
    if len({plan.cluster for plan in plans}) > 1:
        head = "| model, all clusters | plans | median error | 95% within | tau across clusters | tau on one cluster |"
        lines += ["", head, f"|{'---|' * 6}"]
        for own in _grouped(plans, lambda plan: plan.model):
            on_one = tau(*map(_times, _grouped(own, lambda plan: plan.cluster)))
            lines.append(f"| {own[0].model} | {_figures(own)} | {on_one:.2f} |")
    errors = [abs(plan.error) for plan in plans]
    within, mean = sum(error <= WITHIN for error in errors) / len(errors), sum(errors) / len(errors)
    lines += ["", f"{len(plans)} plans: median error {median(errors):.1%}, {within:.0%} of them within {WITHIN:.0%}, mean {mean:.1%}"]
    return lines


def _grouped(plans: Sequence[Plan], key: Callable[[Plan], object]) -> list[list[Plan]]:
    groups: dict[object, list[Plan]] = {}
    for plan in plans:
        groups.setdefault(key(plan), []).append(plan)
    return list(groups.values())


def _figures(plans: Sequence[Plan]) -> str:
    errors = sorted(abs(plan.error) for plan in plans)
    return f"{len(plans)} | {median(errors):.1%} | {errors[min(len(errors) - 1, int(0.95 * len(errors)))]:.1%} | {tau(_times(plans)):.2f}"


def _times(plans: Sequence[Plan]) -> list[tuple[float, float]]:
    return [(plan.predicted_ns, plan.measured_ns) for plan in plans]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="accuracy_report", description="What the predictions in some tables are worth.")
    parser.add_argument("files", nargs="+", type=Path, help="with tables that benchmarks.accuracy printed")
    args = parser.parse_args(argv)
    plans: list[Plan] = []
    for path in args.files:
        try:
            plans += read(read_text(path))
        except SoapError as error:
            parser.error(str(error))
        except ValueError as error:
            parser.error(f"{path}: {error}")
    if not plans:
        parser.error(f"no plans in {', '.join(map(str, args.files))}; expected tables with the columns {', '.join(HEAD)}")
    print("\n".join(report(plans)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
