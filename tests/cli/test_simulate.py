"""``soap-simulate`` as people call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import soap
from soap.cli.simulate import main
from tests.cli.refusals import assert_refused

COMMAND = ["zoo:gpt:tiny", "--cluster", "p100-4x4"]


@pytest.mark.parametrize("name", ["data_parallel", "megatron"])
def test_prices_a_classical_strategy(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    assert main([*COMMAND, "--builtin", name, "--json", "--timeline", str(trace)]) == 0
    report = json.loads(capsys.readouterr().out)
    simulation = soap.simulate("zoo:gpt:tiny", "p100-4x4", name)
    assert report["predicted_ns"] == simulation.makespan_ns == report["baselines"][name]["predicted_ns"]
    assert report["bytes_moved"] == simulation.bytes_moved
    assert [use["total"] for use in report["memory_bytes"]] == [use.total for use in simulation.memory]
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["name"] for event in events} == {task.name for task in simulation.tasks.tasks if task.resources}
    assert (name == "data_parallel") == (report["unlike_data_parallel"] == [])


def test_data_parallelism_is_reported_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--builtin", "data_parallel"]) == 0
    out = capsys.readouterr().out
    assert "zoo:gpt:tiny@8" in out
    assert "operators are configured as in data parallelism" in out


def test_prices_a_strategy_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    model, cluster = soap.load("zoo:gpt:tiny", plan_only=True), soap.load_cluster("p100-4x4")
    soap.save_strategy(path, soap.api.classical("megatron", model.graph, cluster), model, cluster)
    assert main([*COMMAND, "--strategy", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["predicted_ns"] == soap.simulate(model, cluster, "megatron").makespan_ns
    assert main([*COMMAND, "--strategy", str(path)]) == 0
    assert "  s.json " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        ([], 2, "--strategy --builtin"),
        (["--builtin", "magic"], 2, "magic"),
        (["--builtin", "megatron", "--strategy", "s.json"], 2, "not allowed with"),
        (["--strategy", "no.json"], 5, "no.json"),
        (["--builtin", "megatron", "--timeline", "no/t.json"], 1, "cannot write"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], code: int, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, main, [*COMMAND, *arguments], code, word)
