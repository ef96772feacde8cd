"""``soap-diff`` as people call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import soap
from soap import api
from soap.cli.diff import main
from soap.strategy.config import OpConfig
from tests.cli.refusals import assert_refused

MODEL, CLUSTER = "zoo:gpt:tiny", "p100-4x4"
SIMULATED = ["--model", MODEL, "--cluster", CLUSTER]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("strategies")
    graph, cluster = soap.load(MODEL, plan_only=True).graph, soap.load_cluster(CLUSTER)
    usual = api.classical("data_parallel", graph, cluster)
    up = OpConfig((1, 1, 1, 4), (0, 1, 2, 3))
    changed = usual.with_changes({"blocks.0.up": up, "blocks.1.up": up, "norm": OpConfig((2, 1), (4, 5))})
    paths = str(folder / "a.json"), str(folder / "b.json")
    for path, strategy in zip(paths, (usual, changed), strict=True):
        soap.save_strategy(path, strategy, graph, cluster, {"predicted_ns": soap.simulate(graph, cluster, strategy).makespan_ns})
    return paths


def test_names_what_differs(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"A: {files[0]}: '{MODEL}@8' on '{CLUSTER}', predicted ")
    assert "3 of 27 operators are configured differently:" in lines
    (row,) = [line for line in lines if "blocks.*.up (2 layers)" in line]
    assert " b:8 on " in row and row.endswith("n:4 on 0-3")
    assert any(line.split()[0] == "norm" and line.endswith("b0:2 on 4,5") for line in lines if line.split())


def test_equal_files(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([files[0], files[0]]) == 0
    assert capsys.readouterr().out.endswith("the strategies are equal\n")


@pytest.mark.slow
def test_json_with_simulation(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files, *SIMULATED, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [d["operator"] for d in found["operators"]] == ["blocks.0.up", "blocks.1.up", "norm"]
    assert found["operators"][0]["second"] == {"kind": "linear", "degrees": {"n": 4}, "replicas": 1, "devices": [0, 1, 2, 3]}
    assert not found["equal"] and found["same_model"] and found["same_cluster"]
    for path, told, recorded in zip(files, found["simulated"], found["strategies"], strict=True):
        simulation = soap.simulate(MODEL, CLUSTER, soap.load_strategy(path, MODEL, CLUSTER))
        assert told["time_ns"] == simulation.makespan_ns == recorded["predicted_ns"]
        assert told["bytes_moved"] == simulation.bytes_moved
        assert told["peak_bytes"] == max(simulation.peak_bytes)
        held = {name: simulation.busy_ns[name] for name in simulation.link_bytes}
        assert told["busiest_link"]["held_ns"] == max(held.values()) == held[told["busiest_link"]["name"]]


def test_text_with_simulation(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files, *SIMULATED]) == 1
    out = capsys.readouterr().out
    for word in ("time per iteration", "moved per iteration", "memory of the fullest device", "busiest link of A: node", "B / A"):
        assert word in out


@pytest.mark.slow
def test_other_models(files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = str(tmp_path / "c.json")
    graph, cluster = soap.load("zoo:rnnlm:tiny", plan_only=True).graph, soap.load_cluster("local:2")
    soap.save_strategy(other, api.classical("data_parallel", graph, cluster), graph, cluster)
    assert main([files[0], other]) == 1
    out = capsys.readouterr().out
    for word in ("different models", "different clusters", "no time recorded", "only in A: ", "only in B: "):
        assert word in out


@pytest.mark.parametrize("text", ["{", '{"format": "other"}', ""])
def test_errors_are_no_answer(text: str, files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(text)
    assert_refused(capsys, main, [files[0], str(bad)], 2, "bad.json", "soap-search")
    assert_refused(capsys, main, [files[0], str(tmp_path / "none.json")], 2, "none.json")


def test_usage(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, main, [files[0]], 2, "B")
    assert_refused(capsys, main, [*files, "--model", MODEL], 2, "--model without --cluster")
    assert_refused(capsys, main, [*files, "--model", MODEL, "--cluster", "p100-4x5"], 2, "p100-4x5")
    assert_refused(capsys, main, [*files, "--model", "zoo:rnnlm:tiny", "--cluster", CLUSTER], 2, "another model")
