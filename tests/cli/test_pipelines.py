"""A pipelined strategy in a file: reported, explained, drawn; refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import soap
from soap.cli.diff import main as diff
from soap.cli.simulate import main
from soap.errors import StrategyError
from tests.cli.refusals import assert_refused

MODEL, CLUSTER = "zoo:gpt:tiny", "v100-4"


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As in docs/howto/pipelines.md."""
    model, cluster = soap.load(MODEL, plan_only=True), soap.load_cluster(CLUSTER)
    blocks = soap.classical("model_parallel", model, cluster)
    stages = {name: config.devices[0] for name, config in blocks.operators.items()}
    file = tmp_path_factory.mktemp("pipeline") / "pipeline.json"
    soap.save_strategy(file, replace(blocks, microbatches=4, stages=stages, schedule="1f1b"), model, cluster)
    return file


@pytest.mark.slow
def test_it_is_reported_explained_and_drawn(pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [MODEL, "--cluster", CLUSTER, "--strategy", str(pipeline)]
    assert main([*command, "--explain", "--json", "--timeline", str(tmp_path / "t.json")]) == 0
    report = json.loads(capsys.readouterr().out)
    whole = report["whole_strategy"]
    assert (whole["microbatches"], whole["schedule"], sorted(whole["stages"].values())) == (4, "1f1b", [1, 2, 3])
    assert all({*line["data_parallel"]["devices"]} <= {*line["devices"]} for line in report["explanation"])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    rows = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    first, *_ = [event for event in events if event["ph"] == "X" and event["tid"] == rows[report["cluster"]["devices"][3]]]
    assert first["name"].endswith(" of micro-batch 0") and first["ts"] > 0  # the bubble before it
    assert main(command) == 0
    assert "the whole strategy: microbatches 4; stages 1 from " in capsys.readouterr().out


@pytest.mark.slow
def test_backward_passes_in_two_are_drawn_explained_and_compared(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "zero-bubble.json"
    file.write_text(json.dumps(json.loads(pipeline.read_text()) | {"schedule": "zb-h1"}))
    command = [MODEL, "--cluster", CLUSTER, "--strategy", str(file)]
    assert main([*command, "--explain", "--json", "--timeline", str(tmp_path / "t.json")]) == 0
    assert json.loads(capsys.readouterr().out)["whole_strategy"]["schedule"] == "zb-h1"
    names = {event["name"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if event["ph"] == "X"}
    weights = {name.removeprefix("weights ") for name in names if name.startswith("weights ")}
    assert weights and weights < {name.removeprefix("backward ") for name in names if name.startswith("backward ")}
    assert diff([str(pipeline), str(file)]) == 1
    assert "zb-h1" in capsys.readouterr().out


@pytest.mark.slow
def test_what_cannot_be_is_refused_in_one_line(pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = json.loads(pipeline.read_text())
    (first, *_) = written["stages"]
    for change, words in (
        ({"schedule": "zb-h2"}, "no schedule is named 'zb-h2'"),
        ({"schedule": "interleaved:3"}, "schedule 'interleaved:3' with 4 chunks; expected a multiple of 3"),
        ({"stages": {"nowhere": 1}}, "has no operator 'nowhere'"),
        ({"stages": {first: -1}}, "malformed at stages/"),
    ):
        file = tmp_path / "wrong.json"
        file.write_text(json.dumps(written | change))
        assert_refused(capsys, main, [MODEL, "--cluster", CLUSTER, "--strategy", str(file)], StrategyError.exit_code, words)
