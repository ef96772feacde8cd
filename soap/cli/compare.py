"""``soap-compare``: how far a predicted timeline is from a measured one, task by task.

``soap-compare --calibrate``: keeps a run's errors of prediction as corrections of later predictions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from soap import api, outputs
from soap.cli import plan_summary, reporting, timelines
from soap.cli.command import Parser, UsageError, entry_point
from soap.cli.options import add_cluster, add_json
from soap.cli.plain_text import aligned, and_more, milliseconds
from soap.cluster.presets import says_all
from soap.cluster.topology import Topology
from soap.errors import TimelineError
from soap.files import write_text_atomically
from soap.profiles.corrections import Correction, named
from soap.profiles.entries import update_family
from soap.profiles.keys import Environment, environments, torch_version
from soap.profiles.store import Store
from soap.simulator.analysis import timeline_file
from soap.simulator.analysis.comparison import Comparison, Group, Pair, compare, matched
from soap.simulator.analysis.timeline_file import Description, Timeline
from soap.simulator.communication.prices import Communication
from soap.simulator.simulate import costs_hash
from soap.simulator.tasks import GRADIENTS, TaskKind
from soap.strategy.mismatch import one_line, short
from soap.units import format_bytes

LEAST_TASKS = 8
"""Fewer measured tasks of one kind and direction than this are not corrected. Tasks of every traced iteration count."""
MOST_FACTOR = 1e4
"""A factor above this, or below its inverse, is no error of costs: another computation was measured."""


@dataclass(frozen=True, slots=True)
class Step:
    """The correction of one kind and direction in one environment. ``tasks``: number of measured tasks. ``predicted_ns``,
    ``measured_ns``: sums over one iteration, each task with its median. ``before``: the correction with which the prediction was made.
    ``factor``: the one that is kept now; None if there are too few tasks."""

    environment: Environment
    kind: str
    backward: bool
    tasks: int
    predicted_ns: int
    measured_ns: int
    before: float
    factor: float | None


def calibrate(predicted: Timeline, measured: Timeline, cluster: str | None) -> list[Step]:
    """Keep corrections in the user's store, by device type, kind of operator and direction, and for updates: measured / predicted time
    of all tasks, times the correction with which the prediction was made. The slowest come first. ``cluster``: as for
    ``api.load_cluster``; None: the one that the timeline names.

    TimelineError in one line, with nothing kept, if the two sides are not of one run, or if the prediction was made with other costs
    than today's: their ratio would say nothing.
    """
    one, other, store = predicted.description, measured.description, Store()
    pairs = matched(predicted, measured)
    topology = _cluster(one, cluster)
    _require_same_run(one, other)
    places = environments(topology)
    known = {place: {found.of: found.factor for found in store.corrections(place)} for place in places.values()}
    _require_todays_costs(one, topology)
    steps = [
        _step(place, kind, backward, own, other.iterations, known[place].get((kind, backward), 1.0))
        for (place, kind, backward), own in _by_kind(pairs, topology, places, one.optimizer).items()
    ]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    for place in dict.fromkeys(step.environment for step in steps):
        corrections = [
            Correction(step.kind, step.backward, step.factor, step.tasks, one.model, one.strategy_hash, now)
            for step in steps
            if step.environment == place and step.factor is not None
        ]
        if corrections:
            store.put_corrections(place, corrections)
    return sorted(steps, key=lambda step: (-step.measured_ns, step.kind, step.backward))


def _cluster(predicted: Description, spec: str | None) -> Topology:
    """The cluster that the timeline is of."""
    if spec is None and not says_all(predicted.cluster):
        raise TimelineError(f"--calibrate: the timeline's cluster {short(predicted.cluster)} is no preset; expected --cluster FILE")
    topology = api.load_cluster(predicted.cluster if spec is None else spec)
    if topology.hash != predicted.cluster_hash:
        raise TimelineError(
            f"--calibrate: cluster {short(topology.name)} has hash {topology.hash}, but the prediction is for one with "
            f"{short(predicted.cluster_hash)}; expected --cluster with the one of the timeline"
        )
    return topology


def _require_same_run(predicted: Description, measured: Description) -> None:
    again = "give what soap-run --timeline wrote alone, which has both sides"
    for what, own, found in (
        ("cluster", predicted.cluster_hash, measured.cluster_hash),
        ("optimizer with so many states", predicted.optimizer, measured.optimizer),
    ):
        if own != found:
            raise TimelineError(f"--calibrate: predicted for {what} {short(own)}, measured with {short(found)}; expected the same: {again}")
    if measured.not_as_priced:
        raise TimelineError(f"--calibrate: measured with {one_line(measured.not_as_priced)}, which costs are not of; run soap-run without")
    torch = measured.versions.get("torch", "no known version")
    if torch != torch_version():
        raise TimelineError(
            f"--calibrate: measured with torch {one_line(torch)}, and this is {torch_version()}, whose costs are others; "
            "run soap-run --timeline again"
        )


def _require_todays_costs(predicted: Description, topology: Topology) -> None:
    today = costs_hash(api.costs_for(topology, predicted.optimizer), Communication(api.with_links(topology)))
    if predicted.costs_hash != today:
        raise TimelineError(
            f"--calibrate: predicted with other costs ({one_line(predicted.costs_hash) or 'none named'}) than today's ({today}), "
            "calibrated or measured since, or of an optimizer that soap-profile does not measure; run soap-run --timeline again"
        )


def _by_kind(
    pairs: Iterable[Pair], topology: Topology, places: Mapping[str, Environment], optimizer_states: int
) -> dict[tuple[Environment, str, bool], list[Pair]]:
    """The pairs of tasks that compute on devices, by environment and kind. Servers' tasks are left out: they hold a host's cores."""
    types = {device.name: device.type.name for device in topology.devices}
    found: dict[tuple[Environment, str, bool], list[Pair]] = {}
    for pair in pairs:
        task = pair.predicted
        updates = task.kind is TaskKind.UPDATE
        kind = update_family(optimizer_states) if updates else task.operator
        computes = updates or task.kind is TaskKind.FORWARD or task.kind in GRADIENTS
        if computes and kind and len(task.threads) == 1 and task.threads[0] in types:
            place = places[types[task.threads[0]]]
            found.setdefault((place, kind, task.kind in GRADIENTS), []).append(pair)
    return found


def _step(place: Environment, kind: str, backward: bool, pairs: Sequence[Pair], iterations: int, before: float) -> Step:
    predicted_ns = sum(pair.predicted.duration_ns for pair in pairs)
    measured_ns = sum(pair.measured.duration_ns for pair in pairs)
    tasks = len(pairs) * iterations
    enough = tasks >= LEAST_TASKS and predicted_ns > 0 and measured_ns > 0
    factor = before * measured_ns / predicted_ns if enough else None
    if factor is not None and not 1 / MOST_FACTOR <= factor <= MOST_FACTOR:
        raise TimelineError(
            f"--calibrate: {one_line(named(kind, backward), 60)} would be corrected by {factor:.3g}; expected at most {MOST_FACTOR:g} "
            "or its inverse: that is another computation than the one predicted"
        )
    return Step(place, kind, backward, tasks, predicted_ns, measured_ns, before, factor)


def calibrated_document(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Plain JSON values. The keys are part of the command's interface."""
    return [
        {
            "environment": step.environment.text,
            "of": named(step.kind, step.backward),
            "tasks": step.tasks,
            "predicted_ns": step.predicted_ns,
            "measured_ns": step.measured_ns,
            "factor_before": step.before,
            "factor": step.factor,
        }
        for step in steps
    ]


def calibrated_text(steps: Sequence[Step]) -> str:
    """The document as text."""
    lines = []
    for place in dict.fromkeys(step.environment for step in steps if step.factor is not None):
        rows = [("corrected from now on", "tasks", "predicted", "measured", "factor before", "factor now")]
        rows += [
            (*_words(step), milliseconds(step.predicted_ns), milliseconds(step.measured_ns), f"{step.before:.3f}", f"{step.factor:.3f}")
            for step in steps
            if step.environment == place and step.factor is not None
        ]
        lines.append(f"kept for {one_line(place.text)}:\n{aligned(rows)}")
    few = [" ".join(_words(step)) for step in steps if step.factor is None]
    if few:
        lines.append(f"not corrected, as fewer than {LEAST_TASKS} tasks were measured: {', '.join(few)}")
    return "\n\n".join(lines) or "nothing is corrected: no computation was measured"


def _words(step: Step) -> tuple[str, str]:
    return one_line(named(step.kind, step.backward), 60), str(step.tasks)


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
    steps = calibrate(predicted, measured, args.cluster) if args.calibrate else None
    if args.output:
        write_text_atomically(args.output, timeline_file.dumps([timeline_file.aligned(side) for side in (predicted, measured)]))
    if args.report:
        reporting.write_comparison(args.report, comparison, predicted, measured)
    if args.json:
        print(plan_summary.dump({**document(comparison), "calibration": None if steps is None else calibrated_document(steps)}))
        return 0
    print(text(comparison) if steps is None else f"{text(comparison)}\n\n{calibrated_text(steps)}")
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
