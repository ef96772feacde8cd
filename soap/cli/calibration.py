"""``soap-compare --calibrate``: keeps a run's errors of prediction as corrections of later predictions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from soap import api
from soap.cli.plain_text import aligned, milliseconds
from soap.cluster.presets import says_all
from soap.cluster.topology import Topology
from soap.errors import TimelineError
from soap.model.json_text import one_line, short
from soap.profiles.corrections import Correction, named
from soap.profiles.entries import update_family
from soap.profiles.keys import Environment, environments, torch_version
from soap.profiles.store import Store
from soap.simulator.analysis.comparison import Pair, matched
from soap.simulator.analysis.timeline_file import Description, Timeline
from soap.simulator.communication.prices import Communication
from soap.simulator.simulate import costs_hash
from soap.simulator.tasks import GRADIENTS, TaskKind

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


def document(steps: Sequence[Step]) -> list[dict[str, Any]]:
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


def text(steps: Sequence[Step]) -> str:
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
