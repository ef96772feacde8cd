"""A predicted and a measured timeline whose comparison is worked out by hand, and a timeline compared with itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from soap.cluster.topology import Topology
from soap.errors import TimelineError
from soap.model.graph import OperatorGraph
from soap.simulator.analysis.comparison import Group, LinkUse, compare, relative_error
from soap.simulator.analysis.timeline import chrome_trace, resource_names
from soap.simulator.analysis.timeline_file import Description, TimedTask, Timeline, dumps, loads
from soap.simulator.lowering import build_plan, lower
from soap.simulator.reference import simulate
from soap.simulator.simulate import Simulation
from soap.simulator.tasks import TaskKind
from soap.strategy.config import Strategy
from tests.extent import FEW
from tests.simulator.examples import PointCosts
from tests.strategies import cases

PREDICTED = Description("predicted", "m", "aa", "c", "bb", "cc", 0, 1000, link_bytes={"d0->d1": 48, "d1->d0": 0, "other": 7})
MEASURED = replace(PREDICTED, origin="measured", iteration_ns=800, iterations=5, link_bytes={})


def task(name: str, kind: str, start: int, end: int, *threads: str, operator: str = "", median: int | None = None) -> TimedTask:
    return TimedTask(name, TaskKind(kind), start, end, end - start if median is None else median, 0, operator, threads)


def timeline(description: Description, *tasks: TimedTask) -> Timeline:
    return Timeline(description, {one.name: one for one in tasks}, {"traceEvents": []})


SIMULATED = timeline(
    PREDICTED,
    task("forward a[0]", "forward", 0, 100, "d0", operator="linear"),
    task("forward b[0]", "forward", 100, 140, "d0", operator="add"),
    task("backward a[0]", "backward", 300, 500, "d0", operator="linear"),
    task("transfer a 0->1", "transfer", 100, 160, "d0->d1"),
    task("transfer b 0->1", "transfer", 160, 200, "d0->d1"),
    task("update @1", "update", 900, 1000, "d1"),
)
RAN = timeline(
    MEASURED,
    task("forward a[0]", "forward", 10, 60, "d0", median=80),  # 100 predicted: 25% too long
    task("forward b[0]", "forward", 60, 160, "d0"),  # 40: 60% too short
    task("backward a[0]", "backward", 400, 500, "d0"),  # 200: 100% too long
    task("transfer a 0->1", "transfer", 100, 180, "x"),  # 60: 25% too short
    task("transfer b 0->1", "transfer", 150, 190, "x"),  # 40: right
    task("reduce z", "reduce", 600, 610, "x"),
)


def test_by_hand() -> None:
    found = compare(SIMULATED, RAN)
    assert (found.predicted_ns, found.measured_ns, found.error, found.shown_ns) == (1000, 800, 0.25, (1000, 600))
    assert found.tasks == 5
    assert found.operators == (Group("linear", 2, 300, 180, (0.25 + 1.0) / 2), Group("add", 1, 40, 100, 0.6))
    assert found.kinds == (
        Group("forward", 2, 140, 180, pytest.approx((0.25 + 0.6) / 2)),
        Group("transfer", 2, 100, 120, 0.125),
        Group("backward", 1, 200, 100, 1.0),
    )
    # 100 to 180 and 150 to 190 lie over each other; a link that no matched task holds was never busy; what carries nothing is left out
    assert found.links == (LinkUse("d0->d1", 100, 90, 48), LinkUse("other", 0, 0, 7))
    assert [(pair.predicted.name, pair.off_ns) for pair in found.worst] == [
        ("backward a[0]", 100), ("forward b[0]", -60), ("forward a[0]", 20), ("transfer a 0->1", -20), ("transfer b 0->1", 0),
    ]  # fmt: skip
    assert (found.not_measured, found.not_predicted) == ({"update": 1}, {"reduce": 1})


def test_only_the_worst_ten_are_listed() -> None:
    one = timeline(PREDICTED, *(task(f"forward a[{i}]", "forward", 0, 100 + i) for i in range(14)))
    other = timeline(MEASURED, *(task(f"forward a[{i}]", "forward", 0, 100) for i in range(14)))
    assert [pair.off_ns for pair in compare(one, other).worst] == list(range(13, 3, -1))


def test_a_task_of_another_kind_is_another_task() -> None:
    found = compare(timeline(PREDICTED, task("a", "sync", 0, 1)), timeline(MEASURED, task("a", "update", 0, 1)))
    assert (found.tasks, found.not_measured, found.not_predicted) == (0, {"sync": 1}, {"update": 1})


def test_nothing_measured_is_no_division_by_zero() -> None:
    assert relative_error(0, 0) == 0 and relative_error(3, 0) == 3
    found = compare(timeline(PREDICTED), timeline(replace(MEASURED, iteration_ns=0)))
    assert (found.tasks, found.worst, found.kinds) == (0, (), ())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_hash": "dd"}, "different models 'm' and 'm': hashes 'aa' and 'dd'"),
        ({"strategy_hash": "dd"}, "different strategies: hashes 'cc' and 'dd'"),
        ({"micro_batches": 4}, "different batches per update: 1 and 4"),
        ({"origin": "predicted"}, "to take as measured is predicted"),
    ],
)
def test_what_cannot_be_compared(change: dict[str, object], words: str) -> None:
    with pytest.raises(TimelineError, match=words):
        compare(SIMULATED, timeline(replace(MEASURED, **change)))  # type: ignore[arg-type]


def test_another_cluster_or_optimizer_is_no_reason() -> None:
    assert compare(SIMULATED, timeline(replace(MEASURED, cluster_hash="dd", optimizer=2))).error == 0.25


def test_folded_predictions_name_other_devices() -> None:
    with pytest.raises(TimelineError, match="two of 8 equal copies"):
        compare(timeline(replace(PREDICTED, copies=8)), RAN)


@given(cases(max_moves=4))
@FEW
def test_a_timeline_is_like_itself(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    """Written, read, and compared with itself as if it had been measured: no error anywhere, and the simulation's own sums."""
    graph, topology, chosen = case
    tasks = lower(build_plan(graph, chosen, topology), topology, PointCosts())
    run = Simulation(tasks.plan, tasks, simulate(tasks), 2)
    described = replace(PREDICTED, iteration_ns=run.makespan_ns, link_bytes=run.link_bytes)
    trace = chrome_trace(tasks, run.schedule)
    predicted, measured = loads(dumps([(trace, described), (trace, replace(described, origin="measured"))]))
    found = compare(predicted, measured)
    assert found.tasks == sum(1 for one in tasks.tasks if one.resources)
    assert found.error == 0 and not found.not_measured and not found.not_predicted
    assert all(group.median_error == 0 and group.predicted_ns == group.measured_ns for group in (*found.kinds, *found.operators))
    assert all(pair.off_ns == 0 for pair in found.worst)
    by_kind = {kind: sum(one.duration_ns for one in tasks.tasks if one.kind == kind and one.resources) for kind in TaskKind}
    assert {group.name: group.predicted_ns for group in found.kinds} == {
        kind.value: total for kind, total in by_kind.items() if any(one.kind == kind and one.resources for one in tasks.tasks)
    }
    passes = sum(by_kind[kind] for kind in (TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD))
    assert sum(group.predicted_ns for group in found.operators) == passes
    names = resource_names(tasks)
    under_way_ns = dict.fromkeys(names, 0)  # messages are for longer than they hold links, and may overlap by that
    until = dict.fromkeys(names, 0)
    spans = zip(run.schedule.start_ns.tolist(), run.schedule.end_ns.tolist(), (task.resources for task in tasks.tasks), strict=True)
    for start, end, resources in sorted(spans):
        for name in (names[resource] for resource in resources):
            under_way_ns[name] += max(0, end - max(start, until[name]))
            until[name] = max(until[name], end)
    assert {link.name: (link.predicted_ns, link.bytes) for link in found.links} == {
        name: (under_way_ns[name], size) for name, size in run.link_bytes.items() if size
    }
