"""``--log``: where each step's metrics go."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import soap
from soap.cli import checkpoints
from soap.cli.run import main
from soap.errors import SoapError
from soap.runtime.training_options import StepMetrics
from tests.cli.refusals import assert_refused
from tests.graph_builder import mlp
from tests.runtime.handmade import HandModel
from tests.runtime.plans import plan_of, split

SEEN: list[StepMetrics] = []
NOT_CALLABLE = 3


def collector() -> Any:
    return SEEN.append


def makes_nothing() -> None:
    return None


def test_a_trainer_tells_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = mlp()
    model = HandModel(graph)
    seen: list[StepMetrics] = []
    schedule = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731 - as people write it
    keywords: dict[str, Any] = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.5), "schedule": schedule, "clip_norm": 1.0}
    plan = plan_of(graph, split((0,)), device_count=1)
    with soap.Trainer(model, plan, on_step=seen.append, dtype=torch.float64, **keywords) as trainer:
        losses = [trainer.step(*model.inputs(step)) for step in range(3)]
        assert [own.loss for own in seen] == losses and [own.step for own in seen] == [1, 2, 3]
        assert [own.learning_rates for own in seen] == [(0.5,), (0.25,), (0.125,)]
        assert seen[-1].gradient_norm == trainer.gradient_norm is not None and all(own.seconds > 0 for own in seen)


def test_scalars_have_names() -> None:
    assert StepMetrics(3, 1.5, 0.25).scalars() == {"train/loss": 1.5, "train/seconds": 0.25}
    assert StepMetrics(3, 1.5, 0.25, (0.1, 0.2), 7.0).scalars() == {
        "train/loss": 1.5, "train/seconds": 0.25, "train/learning_rate": 0.1, "train/learning_rate_1": 0.2, "train/gradient_norm": 7.0,
    }  # fmt: skip


def test_lines_are_begun_anew_but_for_a_training_that_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    first = checkpoints.logger(str(file), after=0)
    for step in (6, 7, 8, 9, 10):
        first(StepMetrics(step, 3.0, 0.25))
    with file.open("a") as stream:
        stream.write('{"step": 11, "lo')  # the rank was killed while it wrote
    checkpoints.logger(str(file), after=7)(StepMetrics(8, 0.5, 0.25, (0.1,), None))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [6, 7, 8]
    assert lines[-1] == {"step": 8, "loss": 0.5, "seconds": 0.25, "learning_rates": [0.1], "gradient_norm": None}
    checkpoints.logger(str(file), after=8)(StepMetrics(9, 0.5, 0.25))
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [6, 7, 8, 9]
    checkpoints.logger(str(file), after=0)
    assert file.read_text() == ""


def test_a_full_disk_is_told_with_the_file_s_name(tmp_path: Path) -> None:
    log = checkpoints.Lines(str(tmp_path / "log"), after=0)
    log._path = "/dev/full"
    said = r"^cannot write log '/dev/full' of step 1: no space left on device; make room, and go on from the last checkpoint by --resume"
    with pytest.raises(SoapError, match=said):
        log(StepMetrics(1, 2.0, 0.5))


@pytest.mark.slow
def test_no_half_a_line_is_left_where_the_disk_is_full(tmp_path: Path) -> None:
    program = (
        "import resource, sys; from soap.cli import checkpoints; from soap.runtime.training_options import StepMetrics\n"
        "log = checkpoints.Lines(sys.argv[1], after=0); log(StepMetrics(1, 2.0, 0.5))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)); log(StepMetrics(2, 2.0, 0.5))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "log")], capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[-1].startswith(f"soap.errors.SoapError: cannot write log {str(tmp_path / 'log')!r} of step 2: ")
    assert [json.loads(line)["step"] for line in (tmp_path / "log").read_text().splitlines()] == [1]


def test_a_logger_of_the_user_s() -> None:
    SEEN.clear()
    checkpoints.logger("tests.cli.test_step_log:collector", after=0)(StepMetrics(1, 2.0, 0.5))
    import tests.cli.test_step_log as imported  # a second one, if pytest imports files by their paths

    assert [own.step for own in imported.SEEN] == [1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "has no 'nothing'; expected package.module:callable"),
        ("NOT_CALLABLE", "int cannot be called; expected package.module:callable, which returns a function of metrics"),
        ("makes_nothing", "it returned NoneType; expected a function that takes soap.StepMetrics"),
    ],
)
def test_what_is_no_logger_is_refused(name: str, message: str) -> None:
    with pytest.raises(SoapError, match=message):
        checkpoints.logger(f"tests.cli.test_step_log:{name}", after=0)


def test_a_file_that_cannot_be_written_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["strategy.json", "--model", "zoo:gpt:tiny", "--cluster", "p100-4x4", "--log", str(tmp_path / "no" / "log.jsonl")]
    assert_refused(capsys, main, command, 1, "log.jsonl")


@pytest.mark.slow
@pytest.mark.usefixtures("kept_ranks")
def test_a_run_writes_a_line_for_each_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, cluster = "zoo:rnnlm:tiny", "v100-2"
    loaded, topology = soap.load(model, plan_only=True), soap.load_cluster(cluster)
    soap.save_strategy(tmp_path / "s.json", soap.classical("data_parallel", loaded, topology), loaded, topology)
    log = tmp_path / "log.jsonl"
    options = ["--device", "cpu", "--steps", "4", "--clip-norm", "1", "--json", "--log", str(log)]
    assert main([str(tmp_path / "s.json"), "--model", model, "--cluster", cluster, *options]) == 0
    told = json.loads(capsys.readouterr().out)["strategies"]["strategy"]["losses"]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and [line["loss"] for line in lines] == told
    assert all(line["gradient_norm"] > 0 and line["learning_rates"] == [0.01] for line in lines)
