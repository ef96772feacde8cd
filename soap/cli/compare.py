"""``soap-compare``: how far a predicted timeline is from a measured one, task by task."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from soap import outputs
from soap.cli import calibration, plan_summary, reporting, timelines
from soap.cli.calibration import LEAST_TASKS
from soap.cli.command import Parser, UsageError, entry_point
from soap.cli.options import add_cluster, add_json
from soap.cli.plain_text import aligned, and_more, milliseconds
from soap.files import write_text_atomically
from soap.simulator.analysis import timeline_file
from soap.simulator.analysis.comparison import Comparison, Group, Pair, compare
from soap.strategy.mismatch import one_line, short
from soap.units import format_bytes

PROG = "soap-compare"
MOST_ROWS = 20
"""Lines of each table in the text; the JSON document has all."""


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        PROG,
        "Compare a predicted iteration with a measured one of the same model and strategy.",
        f"{PROG} predicted.json measured.json -o both.json",
    )
    parser.add_argument("predicted", metavar="PREDICTED", help="what --timeline wrote; soap-run's holds both sides and is enough")
    parser.add_argument("measured", metavar="MEASURED", nargs="?", help="what soap-run --timeline wrote (default: PREDICTED)")
    parser.add_output("-o", "--output", kind=outputs.TIMELINE, help="write both as one trace for Perfetto, from the start of the iteration")
    calibrate = (
        "keep by how much longer than predicted each kind of operator and the updates took, forward and backward, where at least "
        f"{LEAST_TASKS} tasks were measured, and correct all predictions for such devices by it from now on (--costs estimate takes none). "
        "The next soap-profile that measures something there drops that. Communication is not corrected: soap-profile links measures it"
    )
    parser.add_argument("--calibrate", action="store_true", help=calibrate)
    add_cluster(parser, note="for --calibrate; default: the timeline's, if it is a preset")
    reporting.add_report(parser, "both timelines, and how far predictions are off")
    add_json(parser)
    return parser


def execute(args: argparse.Namespace) -> int:
    """Read, compare, report."""
    if args.cluster and not args.calibrate:
        raise UsageError("--cluster without --calibrate; expected both: comparing needs no cluster")
    reporting.check(args.report)
    predicted, measured = timelines.read(args.predicted, "predicted"), timelines.read(args.measured or args.predicted, "measured")
    comparison = compare(predicted, measured)
    steps = calibration.calibrate(predicted, measured, args.cluster) if args.calibrate else None
    if args.output:
        write_text_atomically(args.output, timeline_file.dumps([timeline_file.aligned(side) for side in (predicted, measured)]))
    if args.report:
        reporting.write_comparison(args.report, comparison, predicted, measured)
    if args.json:
        print(plan_summary.dump({**document(comparison), "calibration": None if steps is None else calibration.document(steps)}))
        return 0
    print(text(comparison) if steps is None else f"{text(comparison)}\n\n{calibration.text(steps)}")
    if written := [path for path in (args.output, args.report) if path]:
        print(f"\nwrote {' and '.join(written)}")
    return 0


def document(comparison: Comparison) -> dict[str, Any]:
    """All of the comparison, as plain JSON values. The keys are part of the command's interface."""
    return {
        "model": comparison.predicted.model,
        "strategy_hash": comparison.predicted.strategy_hash,
        "predicted": _side(comparison, 0),
        "measured": _side(comparison, 1),
        "error": comparison.error,
        "tasks": comparison.tasks,
        "operator_kinds": [asdict(group) for group in comparison.operators],
        "task_kinds": [asdict(group) for group in comparison.kinds],
        "links": [asdict(link) for link in comparison.links],
        "worst": [_worst(pair) for pair in comparison.worst],
        "not_measured": dict(comparison.not_measured),
        "not_predicted": dict(comparison.not_predicted),
    }


def _side(comparison: Comparison, side: int) -> dict[str, Any]:
    description = (comparison.predicted, comparison.measured)[side]
    return {
        "iteration_ns": description.iteration_ns,
        "shown_ns": comparison.shown_ns[side],
        "iterations": description.iterations,
        "cluster": description.cluster,
        "optimizer_states": description.optimizer,
        "versions": dict(description.versions),
    }


def _worst(pair: Pair) -> dict[str, Any]:
    return {
        "task": pair.predicted.name,
        "kind": pair.predicted.kind.value,
        "predicted_ns": pair.predicted.duration_ns,
        "measured_ns": pair.measured.duration_ns,
        "error": pair.error,
    }


def text(comparison: Comparison) -> str:
    """The document as text."""
    predicted, measured = comparison.predicted, comparison.measured
    head = [f"{one_line(measured.model)} on {one_line(measured.cluster)}, strategy {one_line(measured.strategy_hash)}"]
    if predicted.cluster_hash != measured.cluster_hash:
        head.append(f"predicted for another cluster, {short(predicted.cluster)}")
    if predicted.optimizer != measured.optimizer:
        head.append(f"predicted for an optimizer with {predicted.optimizer} states per parameter, measured with {measured.optimizer}")
    groups = [_groups(what, found) for what, found in (("operators", comparison.operators), ("tasks", comparison.kinds))]
    links = [(one_line(link.name, 60), *_times(link.predicted_ns, link.measured_ns), format_bytes(link.bytes)) for link in comparison.links]
    worst = [
        (one_line(pair.predicted.name, 80), *_times(pair.predicted.duration_ns, pair.measured.duration_ns)) for pair in comparison.worst
    ]
    sections = [
        "\n".join(head),
        _iteration(comparison),
        *groups,
        _table(("link", "predicted busy", "measured busy", "measured / predicted", "carries"), links),
        _table(("task furthest off", "predicted", "measured", "measured / predicted"), worst),
        _unmatched(comparison),
    ]
    return "\n\n".join(section for section in sections if section)


def _iteration(comparison: Comparison) -> str:
    rows = [("time", "predicted", "measured", "measured / predicted", "error")]
    rows.append(("iteration", *_times(comparison.predicted_ns, comparison.measured_ns), f"{comparison.error:+z.0%}"))
    rows.append(("each task by itself", *_times(*comparison.shown_ns), ""))
    return aligned(rows)


def _groups(what: str, found: Sequence[Group]) -> str:
    rows = [(one_line(g.name, 40), str(g.tasks), *_times(g.predicted_ns, g.measured_ns), f"{g.median_error:z.0%}") for g in found]
    return _table((f"kind of {what}", "count", "predicted", "measured", "measured / predicted", "median error"), rows)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    return "\n".join([aligned([head, *rows[:MOST_ROWS]]), *and_more(len(rows), MOST_ROWS)])


def _times(predicted_ns: int, measured_ns: int) -> tuple[str, str, str]:
    return milliseconds(predicted_ns), milliseconds(measured_ns), f"{measured_ns / max(1, predicted_ns):.2f}"


def _unmatched(comparison: Comparison) -> str:
    lines = []
    for what, found in (("predicted but not measured", comparison.not_measured), ("measured but not predicted", comparison.not_predicted)):
        if found:
            lines.append(f"{what}: {_counted(found)}")
    return "\n".join(lines)


def _counted(found: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in found.items())


main = entry_point(make_parser, execute)

if __name__ == "__main__":
    sys.exit(main())
