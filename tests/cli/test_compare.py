"""``soap-compare`` as people call it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import soap
from soap import api
from soap.cli.compare import main
from soap.cli.simulate import main as simulate
from soap.cli.timelines import measured_text
from soap.simulator.analysis.timeline import MeasuredEvent
from soap.simulator.simulate import Simulation
from tests.cli.refusals import assert_refused

MODEL, CLUSTER = "zoo:gpt:tiny", "p100-4x4"


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    graph, cluster = soap.load(MODEL, plan_only=True).graph, soap.load_cluster(CLUSTER)
    return api.simulator_for(graph, cluster, optimizer_states=0).run(api.classical("data_parallel", graph, cluster))


def half_as_fast(simulation: Simulation, iteration: int = 0) -> list[MeasuredEvent]:
    """Every task as predicted, but beginning and taking twice as late and long; transfers on the first rank."""
    events, schedule = [], simulation.schedule
    for task, start, end in zip(simulation.tasks.tasks, schedule.start_ns.tolist(), schedule.end_ns.tolist(), strict=True):
        devices = [resource for resource in task.resources if resource < simulation.topology.device_count]
        events.append((devices[0] if devices else 0, task.name, task.kind.value, 2 * start + iteration, 2 * end + iteration))
    return events


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, simulation: Simulation) -> tuple[str, str]:
    """What soap-simulate predicts, and what soap-run would write of a run that takes twice as long in every task."""
    folder = tmp_path_factory.mktemp("timelines")
    predicted, ran = str(folder / "predicted.json"), folder / "run.json"
    assert simulate([MODEL, "--cluster", CLUSTER, "--builtin", "data_parallel", "--timeline", predicted]) == 0
    chosen = api.classical("data_parallel", simulation.plan.graph, simulation.topology)
    iterations = [half_as_fast(simulation, number) for number in range(3)]
    ran.write_text(measured_text(chosen, simulation, iterations, 2 * simulation.makespan_ns, costs_hash="aa"))
    return predicted, str(ran)


@pytest.mark.slow
def test_a_scaled_emulation_is_written_in_the_cluster_s_time(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], simulation: Simulation
) -> None:
    chosen, path = api.classical("data_parallel", simulation.plan.graph, simulation.topology), tmp_path / "half.json"
    step_ns = 2 * simulation.makespan_ns
    path.write_text(measured_text(chosen, simulation, [half_as_fast(simulation)], step_ns, costs_hash="aa", scale=0.5))
    assert main([str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["error"] == 0.0 and found["measured"]["iteration_ns"] == simulation.makespan_ns
    assert found["measured"]["shown_ns"] == pytest.approx(simulation.makespan_ns, abs=2)
    assert max(group["median_error"] for group in found["task_kinds"]) < 1e-3


def test_json_of_one_file_with_both_sides(files: tuple[str, str], capsys: pytest.CaptureFixture[str], simulation: Simulation) -> None:
    assert main([files[1], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["predicted"]["iteration_ns"], found["measured"]["iteration_ns"]) == (simulation.makespan_ns, 2 * simulation.makespan_ns)
    assert found["predicted"]["shown_ns"] * 2 == found["measured"]["shown_ns"] == 2 * simulation.makespan_ns
    assert (found["error"], found["measured"]["iterations"], found["predicted"]["optimizer_states"]) == (-0.5, 3, 0)
    assert all(group["median_error"] == 0.5 for group in found["task_kinds"] + found["operator_kinds"])
    assert {link["name"]: link["bytes"] for link in found["links"]} == {k: v for k, v in simulation.link_bytes.items() if v}
    assert all(2 * link["predicted_ns"] == link["measured_ns"] for link in found["links"])
    assert found["not_measured"] == {} and len(found["worst"]) == 10
    assert found["measured"]["versions"].keys() == {"soap", "torch"}


def test_text_of_two_files(files: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    both = tmp_path / "both.json"
    assert main([*files, "-o", str(both)]) == 0
    out = capsys.readouterr().out
    assert "predicted for an optimizer with 2 states per parameter, measured with 0" in out
    lines = [line.split() for line in out.splitlines()]
    assert any(line[:1] == ["forward"] and "50%" in line for line in lines)
    assert any(line[:1] == ["iteration"] for line in lines) and f"wrote {both}" in out
    assert "  and " in out and "--json has all" in out  # more links than the table shows
    capsys.readouterr()
    assert main([str(both), "--json"]) == 0  # what it wrote, it reads
    assert json.loads(capsys.readouterr().out)["error"] < 0


def test_both_sides_begin_together(files: tuple[str, str], tmp_path: Path) -> None:
    both = tmp_path / "both.json"
    assert main([*files, "-o", str(both)]) == 0
    events = [event for event in json.loads(both.read_text())["traceEvents"] if event["ph"] == "X"]
    assert [min(event["ts"] for event in events if event["pid"] == process) for process in (0, 1)] == [0, 0]


def test_missing_tasks_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path, simulation: Simulation) -> None:
    events = [event for event in half_as_fast(simulation) if event[2] != "update"] + [(0, "nap", "forward", 1, 2)]
    path = tmp_path / "t.json"
    chosen = api.classical("data_parallel", simulation.plan.graph, simulation.topology)
    path.write_text(measured_text(chosen, simulation, [events], 5, costs_hash="aa"))
    assert main([str(path)]) == 0
    assert capsys.readouterr().out.endswith("predicted but not measured: 16 update\nmeasured but not predicted: 1 forward\n")


@pytest.mark.slow
def test_another_strategy_is_refused(files: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    other = str(tmp_path / "other.json")
    assert simulate([MODEL, "--cluster", CLUSTER, "--builtin", "megatron", "--timeline", other]) == 0
    capsys.readouterr()
    assert_refused(capsys, main, [other, files[1]], 1, "timelines of different strategies", "expected two of the same")


@pytest.mark.slow
def test_another_model_is_refused(files: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    other = str(tmp_path / "other.json")
    assert simulate([MODEL + "@16", "--cluster", CLUSTER, "--builtin", "data_parallel", "--timeline", other]) == 0
    capsys.readouterr()
    assert_refused(capsys, main, [other, files[1]], 1, "timelines of different models", "gpt:tiny@16")


def test_other_accumulation_is_refused(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path, simulation: Simulation
) -> None:
    path = tmp_path / "t.json"
    chosen = api.classical("data_parallel", simulation.plan.graph, simulation.topology)
    path.write_text(measured_text(chosen, simulation, [half_as_fast(simulation)], 5, micro_batches=4, costs_hash="aa"))
    assert_refused(capsys, main, [files[0], str(path)], 1, "different batches per update: 1 and 4")
    assert main([str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predicted"]["iteration_ns"] == simulation.step_ns(4)


def test_bad_files(files: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    assert_refused(capsys, main, [str(path)], 1, "t.json", "cannot be read", "check the path")
    path.write_text("{")
    assert_refused(capsys, main, [files[0], str(path)], 1, "t.json", "not valid JSON", "--timeline")
    path.write_text('{"traceEvents": []}')
    assert_refused(capsys, main, [str(path)], 1, "t.json", "otherData.format is None")
    assert_refused(capsys, main, [files[0]], 1, "no measured iterations", "soap-run --timeline")
    assert_refused(capsys, main, [*files, "-o", files[0]], 2, "--output", "same file as PREDICTED")
    assert_refused(capsys, main, [*files, "-o", str(tmp_path / "no" / "t.json")], 1, "cannot write")


def test_names_from_outside_are_printed_safely(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path, simulation: Simulation
) -> None:
    graph = replace(simulation.plan.graph, name="\x1b[31mred\n" + "x" * 500)
    chosen = api.classical("data_parallel", graph, simulation.topology)
    run = replace(simulation, plan=replace(simulation.plan, graph=graph))
    path = tmp_path / "t.json"
    path.write_text(measured_text(chosen, run, [half_as_fast(simulation)], 5, costs_hash="aa"))
    assert main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and out.startswith("?[31mred ")
