"""``soap-compare --calibrate``: factors of hand-made timelines, what is refused, and what later predictions make of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import soap
from soap import api
from soap.cli import compare, profile, run, simulate
from soap.cli.compare import LEAST_TASKS, calibrate, main
from soap.cli.timelines import not_as_priced
from soap.cli.training import Job
from soap.cluster.emulated import emulated_topology, parse_emulated
from soap.cluster.presets import local_topology
from soap.cluster.topology import Topology
from soap.errors import TimelineError
from soap.profiles.keys import environments, torch_version
from soap.profiles.store import Store, default_path
from soap.simulator.analysis.timeline_file import Description, TimedTask, Timeline, dumps
from soap.simulator.communication.prices import Communication
from soap.simulator.costs import CostSource
from soap.simulator.simulate import Simulation, costs_hash
from soap.simulator.tasks import TaskKind
from tests.cli.own_store import use_own_store
from tests.cli.refusals import assert_refused

Capsys = pytest.CaptureFixture[str]
CLUSTER = "p100-4x4"
GPUS = soap.load_cluster(CLUSTER)
GPU = GPUS.devices[0].type.name
(HERE,) = environments(GPUS).values()


@pytest.fixture(autouse=True)
def own_store(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each test begins with an empty store; this machine's rates are measured once for all."""
    use_own_store(monkeypatch, tmp_path_factory)


def todays_hash(topology: Topology = GPUS, optimizer_states: int = 0) -> str:
    return costs_hash(api.costs_for(topology, optimizer_states), Communication(topology))


def task(name: str, kind: str, ns: int, thread: str, operator: str = "") -> TimedTask:
    return TimedTask(name, TaskKind(kind), 0, ns, ns, 0, operator, (thread,))


Times = dict[tuple[str, str], list[int]]
PREDICTED: Times = {
    ("linear", "forward"): [100, 300],
    ("linear", "backward"): [500],
    ("add", "forward"): [10, 20],
    ("", "update"): [40, 60],
    ("", "transfer"): [7, 7],
}
MEASURED: Times = {
    ("linear", "forward"): [150, 450],
    ("linear", "backward"): [1000],
    ("add", "forward"): [10, 5],
    ("", "update"): [100, 100],
    ("", "transfer"): [70, 70],
}


def timeline(description: Description, times: Times) -> Timeline:
    tasks = [
        task(f"{kind} {operator}[{i}]", kind, ns, GPUS.devices[i].name, operator if description.origin == "predicted" else "")
        for (operator, kind), found in times.items()
        for i, ns in enumerate(found)
    ]
    return Timeline(description, {one.name: one for one in tasks}, {"traceEvents": []})


def sides(predicted: Times = PREDICTED, measured: Times = MEASURED, iterations: int = 5, **changes: Any) -> tuple[Timeline, Timeline]:
    """A run of today; ``changes``: of the predicted side's description."""
    said = Description("predicted", "m", "aa", CLUSTER, GPUS.hash, "cc", 0, 1000, costs_hash=todays_hash())
    ran = replace(said, origin="measured", iterations=iterations, costs_hash="", versions={"torch": torch_version()})
    return timeline(replace(said, **changes), predicted), timeline(ran, measured)


def kept() -> dict[str, float]:
    return {one.name: one.factor for one in Store().corrections(HERE)}


FACTORS = {"linear forward": 1.5, "add forward": 0.5, "update of optimizers with 0 states": 2.0}


def test_factors_by_kind_and_direction_where_enough_tasks_were_measured() -> None:
    steps = calibrate(*sides(), None)
    assert kept() == FACTORS
    assert [(step.kind, step.backward, step.tasks, step.predicted_ns, step.measured_ns, step.factor) for step in steps] == [
        ("linear", True, 5, 500, 1000, None),
        ("linear", False, 10, 400, 600, 1.5),
        ("<update-0>", False, 10, 100, 200, 2.0),
        ("add", False, 10, 30, 15, 0.5),
    ]
    first = Store().corrections(HERE)[0]
    assert (first.tasks, first.model, first.strategy_hash, first.calibrated_at[-6:]) == (10, "m", "cc", "+00:00")


@pytest.mark.parametrize(("iterations", "tasks"), [(1, LEAST_TASKS - 1), (1, LEAST_TASKS), (LEAST_TASKS - 1, 1), (LEAST_TASKS, 1)])
def test_tasks_of_all_traced_iterations_count(iterations: int, tasks: int) -> None:
    times = {("linear", "forward"): [10] * tasks}, {("linear", "forward"): [30] * tasks}
    calibrate(*sides(*times, iterations=iterations), None)
    assert kept() == ({"linear forward": 3.0} if iterations * tasks >= LEAST_TASKS else {})


def test_what_was_not_measured_is_in_no_sum() -> None:
    longer = {**PREDICTED, ("linear", "forward"): [100, 300, 10**6]}
    calibrate(*sides(longer), None)
    assert kept() == FACTORS


def test_calibrating_twice_does_not_multiply_twice() -> None:
    run_of_today = sides()
    calibrate(*run_of_today, None)
    with pytest.raises(TimelineError, match=r"predicted with other costs .*; run soap-run --timeline again"):
        calibrate(*run_of_today, None)
    assert kept() == FACTORS


def test_a_corrected_prediction_is_corrected_further() -> None:
    calibrate(*sides(), None)
    again = sides({("linear", "forward"): [150, 450]}, {("linear", "forward"): [300, 900]})
    (step,) = calibrate(*again, None)
    assert (step.before, step.factor) == (1.5, 3.0)
    with pytest.raises(TimelineError, match="predicted with other costs"):
        calibrate(*again, None)
    assert kept() == {**FACTORS, "linear forward": 3.0}
    (step,) = calibrate(*sides({("linear", "forward"): [300, 900]}, {("linear", "forward"): [300, 900]}), None)
    assert (step.before, step.factor) == (3.0, 3.0)


def test_predictions_take_corrections_unless_only_estimates_are_wanted() -> None:
    graph = soap.load("zoo:gpt:tiny", plan_only=True).graph

    def predict(costs: CostSource = "auto") -> Simulation:
        return soap.simulate(graph, CLUSTER, "data_parallel", optimizer_states=0, costs=costs)

    before = predict()
    kinds = sorted({op.kind for op in graph.operators})
    whole = {(kind, way): [100] * 8 for kind in kinds for way in ("forward", "backward")} | {("", "update"): [100] * 8}
    calibrate(*sides(whole, {key: [300] * 8 for key in whole}), None)
    after = predict()
    assert [one.name for one in after.tasks.tasks] == [one.name for one in before.tasks.tasks]
    for old, new in zip(before.tasks.tasks, after.tasks.tasks, strict=True):
        # an update is a sum over tensors, each of which is rounded up; what computes nothing takes 1 ns in any case
        near = pytest.approx(3 * old.duration_ns, abs=200 if old.kind is TaskKind.UPDATE else 3)
        assert new.duration_ns == (near if old.kind in (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.UPDATE) else old.duration_ns)
    assert predict("estimate").makespan_ns == before.makespan_ns < after.makespan_ns


@pytest.mark.parametrize(
    ("changes", "measured", "words"),
    [
        ({"costs_hash": "0123456789abcdef"}, {}, "predicted with other costs \\(0123456789abcdef\\) than today's"),
        ({"costs_hash": ""}, {}, "none named"),
        ({"cluster": "mine"}, {}, "'mine' is no preset; expected --cluster FILE"),
        ({"cluster_hash": "dd"}, {}, "the prediction is for one with 'dd'"),
        ({}, {"cluster_hash": "dd"}, "predicted for cluster .*, measured with 'dd'"),
        ({"optimizer": 2}, {}, "predicted for optimizer with so many states 2, measured with 0"),
        ({}, {"not_as_priced": "--compile"}, "measured with --compile"),
        ({}, {"versions": {"torch": "1.0"}}, "measured with torch 1.0"),
        ({}, {"versions": {}}, "measured with torch no known version"),
        ({"strategy_hash": "dd"}, {}, "timelines of different strategies"),
        ({"copies": 4}, {}, "shows two of 4 equal copies"),
    ],
)
def test_what_costs_are_not_of_is_refused(changes: dict[str, Any], measured: dict[str, Any], words: str) -> None:
    predicted, ran = sides(**changes)
    with pytest.raises(TimelineError, match=words) as error:
        calibrate(predicted, replace(ran, description=replace(ran.description, **measured)), None)
    assert "\n" not in str(error.value)
    assert not default_path().exists()


@pytest.mark.parametrize("ns", [1, 10**12])
def test_what_is_no_error_of_costs_is_refused(ns: int) -> None:
    times = {**PREDICTED, ("linear", "forward"): [10**6, 10**6]}, {**MEASURED, ("linear", "forward"): [ns, ns]}
    with pytest.raises(TimelineError, match=r"linear forward would be corrected by .*expected at most 10000"):
        calibrate(*sides(*times), None)
    assert not default_path().exists()


def test_a_cluster_without_a_preset_is_given(tmp_path: Path) -> None:
    """The same devices under a name of the user's own."""
    path = tmp_path / "c.yaml"
    path.write_text(
        "name: pair\n"
        "device_types: {core: {kind: cpu, flops: {float32: 50 GFLOP/s}, memory_bandwidth: 10 GB/s, memory: 4 GiB, kernel_overhead: 5 us}}\n"
        "hosts: [{name: box, devices: {type: core, count: 2}, cpu_cores: 2, memory: 8 GiB, "
        "links: {intra: {bandwidth: 1 GB/s, latency: 50 us}}}]\n"
    )
    pair = soap.load_cluster(path)
    said = Description("predicted", "m", "aa", pair.name, pair.hash, "cc", 0, 9, costs_hash=todays_hash(pair))
    ran = replace(said, origin="measured", iterations=8, costs_hash="", versions={"torch": torch_version()})
    tasks = [{"a": task("a", "forward", ns, pair.devices[1].name, "linear")} for ns in (100, 200)]
    calibrate(Timeline(said, tasks[0], {"traceEvents": []}), Timeline(ran, tasks[1], {"traceEvents": []}), str(path))
    (place,) = environments(pair).values()
    assert [(one.name, one.factor) for one in Store().corrections(place)] == [("linear forward", 2.0)]
    assert kept() == {}


def job(topology: Topology, **changes: Any) -> Job:
    plain = Job("m", {}, topology, {}, 1, 0, "sgd", backend="gloo", traced=True)  # type: ignore[arg-type]
    return replace(plain, **changes)


def test_runs_that_costs_are_not_of_say_so() -> None:
    local = local_topology(2)
    emulated = emulated_topology(parse_emulated("emulated:2x1", 2), local)
    assert not_as_priced(job(local, device_kind="cpu"), 1.0) == "" == not_as_priced(job(emulated, emulated=True), 1.0)
    assert not_as_priced(job(local, compiled=True, emulated=True), 1.0) == "--compile, --emulate"
    assert not_as_priced(job(GPUS, device_kind="cpu"), 1.0) == "--device cpu"
    assert not_as_priced(job(emulated), 1.0) == "no --emulate"
    assert not_as_priced(job(emulated, emulated=True), 0.5) == "--emulate-scale 0.5"


def test_text_says_what_is_kept_and_what_is_not() -> None:
    said = compare.calibrated_text(calibrate(*sides(), None))
    assert said.startswith(f"kept for {HERE.text}:\n")
    assert "linear forward 10 0.000 ms 0.001 ms 1.000 1.500" in [" ".join(line.split()) for line in said.splitlines()]
    assert said.endswith(f"not corrected, as fewer than {LEAST_TASKS} tasks were measured: linear backward 5")
    assert compare.calibrated_text([]) == "nothing is corrected: no computation was measured"


def test_bad_usage_and_refusals_are_one_line_and_write_nothing(capsys: Capsys, tmp_path: Path) -> None:
    path, both = tmp_path / "t.json", tmp_path / "both.json"
    path.write_text(dumps([(one.trace, one.description) for one in sides(costs_hash="aa")]))
    assert_refused(capsys, main, [str(path), "--cluster", CLUSTER], 2, "--cluster without --calibrate")
    assert_refused(capsys, main, [str(path), "--calibrate", "-o", str(both)], 1, "other costs (aa)", "run soap-run --timeline again")
    assert_refused(capsys, main, [str(path), "--calibrate", "--cluster", "k80-16x4"], 1, "expected --cluster with the one of the timeline")
    assert not both.exists() and not default_path().exists()
    default_path().write_text("no database" * 1000)
    assert_refused(capsys, main, [str(path), "--calibrate"], 6, "cannot be used", "move it away")


@pytest.mark.long
def test_a_run_corrects_what_is_predicted_after_it(capsys: Capsys, tmp_path: Path, kept_ranks: None) -> None:
    model, cluster = "zoo:rnnlm:tiny", "local:2"
    graph, topology = soap.load(model, plan_only=True).graph, soap.load_cluster(cluster)
    saved, traced = str(tmp_path / "s.json"), str(tmp_path / "t.json")
    soap.save_strategy(saved, api.classical("data_parallel", graph, topology), graph, topology)
    assert run.main([saved, "--model", model, "--steps", "2", "--timeline", traced, "--json"]) == 0
    before = json.loads(capsys.readouterr().out)["costs"]
    assert before["corrected"] == 0
    assert main([traced, "--calibrate", "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["calibration"]
    factors = {step["of"]: step["factor"] for step in steps if step["factor"] is not None}
    assert factors.keys() >= {"linear forward", "linear backward", "update of optimizers with 0 states"}
    for step in steps:  # two devices, five iterations
        ratio = step["measured_ns"] / step["predicted_ns"] if step["tasks"] >= LEAST_TASKS else None
        assert step["factor"] == ratio and step["tasks"] % 5 == 0
    assert_refused(capsys, main, [traced, "--calibrate"], 1, "predicted with other costs", before["hash"])
    shown = [model, "--cluster", cluster]
    assert profile.main(["show", *shown, "--json"]) == 0
    (corrections,) = json.loads(capsys.readouterr().out)["corrections"].values()
    assert {one["of"]: one["factor"] for one in corrections} == factors
    assert profile.main(["show", *shown]) == 0
    out = capsys.readouterr().out
    assert "corrected by soap-compare --calibrate:\n" in out and f"{graph.name}, strategy" in out
    assert simulate.main([*shown, "--builtin", "data_parallel"]) == 0
    out = capsys.readouterr().out
    assert "compute time 100% estimated; " in out and out.count("corrected by soap-compare --calibrate") == 2  # costs, and their shares
    assert simulate.main([*shown, "--builtin", "data_parallel", "--costs", "estimate", "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)["costs"]
    assert costs["corrected"] == 0 and "corrected" not in costs["description"]
