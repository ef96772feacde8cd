"""``soap-run`` as people call it: what it prints and writes, and what it says about bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import soap
from soap.cli.run import main, make_parser, prepare
from tests.cli.refusals import assert_refused
from tests.launcher_variables import as_rank
from tests.runtime.test_exactness import FILES

MODEL = "zoo:gpt:tiny"
CLUSTER = "p100-4x4"

LR = "torch.optim.lr_scheduler"

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def strategy_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("strategy") / "s.json"
    model, cluster = soap.load(MODEL, plan_only=True), soap.load_cluster(CLUSTER)
    soap.save_strategy(path, soap.api.classical("megatron", model.graph, cluster), model, cluster)
    return path


def edited(path: Path, folder: Path, edit: Edit) -> str:
    """A copy of a strategy file after a change."""
    document = json.loads(path.read_text())
    edit(document)
    copy = folder / "edited.json"
    copy.write_text(json.dumps(document))
    return str(copy)


@pytest.mark.parametrize("option", ["--save-every", "--keep"])
def test_save_options_without_save(option: str, capsys: pytest.CaptureFixture[str], strategy_file: Path) -> None:
    assert_refused(capsys, main, [str(strategy_file), "--model", MODEL, option, "3"], 2, f"{option} without --save; add --save DIR")


def test_resume_without_a_checkpoint(capsys: pytest.CaptureFixture[str], strategy_file: Path, tmp_path: Path) -> None:
    common = [str(strategy_file), "--model", MODEL, "--resume"]
    assert_refused(capsys, main, [*common, str(tmp_path)], 8, "has no complete checkpoint; expected a checkpoint or the folder")
    assert_refused(capsys, main, [*common, str(tmp_path / "no")], 8, "no' is no folder")


def test_save_into_a_file(capsys: pytest.CaptureFixture[str], strategy_file: Path) -> None:
    command = [str(strategy_file), "--model", MODEL, "--save", str(strategy_file)]
    assert_refused(capsys, main, command, 2, "s.json' is there and seems to be a strategy file; expected a folder")


def test_memory_of_several_batches_is_not_predicted(capsys: pytest.CaptureFixture[str], strategy_file: Path) -> None:
    command = [str(strategy_file), "--model", MODEL, "--memory", "--accumulate", "2"]
    assert_refused(capsys, main, command, 2, "--memory with --accumulate", "expected one batch per update")


def test_missing_strategy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert_refused(capsys, main, [str(tmp_path / "no.json"), "--model", MODEL], 5, "no.json", "cannot be read", "check the path")


def test_no_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text('{"format": ')
    assert_refused(capsys, main, [str(path), "--model", MODEL], 5, str(path), "not valid JSON", "soap-search")


def _version(document: dict[str, Any]) -> None:
    document["version"] = 3


def _device(document: dict[str, Any]) -> None:
    document["operators"]["token_embedding"]["devices"][0] = "node9/gpu0"


def _number(document: dict[str, Any]) -> None:
    document["operators"]["blocks.0.up"]["devices"] = ["1-16"]


def _degree(document: dict[str, Any]) -> None:
    document["operators"]["blocks.0.up"]["degrees"]["b"] = 1000


def _factor(document: dict[str, Any]) -> None:
    document["operators"]["blocks.0.up"]["degrees"]["z"] = 2


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_version, ["version 3", "versions 1 to 2"]),
        (_device, ["token_embedding", "'node9/gpu0'", "node0/gpu0"]),
        (_number, ["blocks.0.up", "device 16 does not exist", "0 to 15"]),
        (_degree, ["blocks.0.up", "degree 1000", "'b'", "lower the degree"]),
        (_factor, ["blocks.0.up", "'z'", "expected one of"]),
    ],
)
def test_broken_strategy(edit: Edit, words: list[str], strategy_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = edited(strategy_file, tmp_path, edit)
    assert_refused(capsys, main, [path, "--model", MODEL], 5, path, *words)


def test_strategy_of_another_model(strategy_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [str(strategy_file), "--model", "zoo:gpt:tiny@4"]
    assert_refused(capsys, main, command, 5, "another model", "blocks.0.attention.query has b of size 8 instead of 4", "search again")


def test_strategy_of_another_cluster(strategy_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [str(strategy_file), "--model", MODEL, "--cluster", "h200-8"]
    assert_refused(capsys, main, command, 5, "another cluster", "'p100-4x4'", "'h200-8'", "node0/gpu0", "search again")


def test_cluster_that_is_no_preset_must_be_given(strategy_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def rename(document: dict[str, Any]) -> None:
        document["cluster"]["name"] = "basement"

    path = edited(strategy_file, tmp_path, rename)
    assert_refused(capsys, main, [path, "--model", MODEL], 5, "'basement'", "--cluster FILE")


def test_missing_model(strategy_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert_refused(capsys, main, [str(strategy_file), "--model", str(tmp_path / "no.pt2")], 3, "no.pt2", "does not exist")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], ["--steps", "'0'", "at least 1"]),
        (["--lr", "0"], ["--lr", "'0'", "above 0"]),
        (["--backend", "mpi"], ["--backend", "mpi", "gloo"]),
        (["--dtype", "int8"], ["--dtype", "int8", "float64"]),
        (["--optimizer", "lamb"], ["--optimizer lamb: no 'lamb'; expected one of sgd, adam, adamw, torch.optim.NAME with ASGD, "]),
        (["--optimizer", "torch.nn.Linear"], ["no 'torch.nn.Linear'; expected one of sgd"]),
        (["--optimizer", "torch.optim.Optimizer"], ["no 'torch.optim.Optimizer'; expected one of sgd"]),
        (["--optimizer", "adam:beta=1"], ["adam has no option 'beta'; expected one of lr, betas, eps, "]),
        (["--optimizer", "adam:betas=3"], ["adam:betas=3: TypeError: ", "expected values like the defaults, lr=0.001, betas=(0.9, 0.9"]),
        (["--optimizer", "torch.optim.SGD:lr=-1"], ["ValueError: Invalid learning rate: -1; expected values like the defaults"]),
        (["--optimizer", "adam:lr=__import__('os')"], ["\"__import__('os')\"", "expected numbers, true, false, none, words, and tuples"]),
        (["--optimizer", "adam:betas=(0.9"], ["'adam:betas=(0.9' is not allowed; expected NAME or NAME:key=value,key=value"]),
        (["--optimizer", "adam:lr=1,lr=2"], ["'lr=2'", "is given twice; expected key=value once for each key"]),
        (["--optimizer", "adam:lr=1", "--lr", "2"], ["--lr 2 beside --optimizer adam:lr=1, which sets lr too; give it once"]),
        (["--optimizer", "adam", "--optimizer", "sgd"], ["--optimizer adam and sgd: expected one without GLOB= before it"]),
        (["--optimizer", "=adam"], ["'=adam' is not allowed; expected SPEC or GLOB=SPEC"]),
        (["--weight-decay", "-1"], ["'-1' is not allowed; expected a number of at least 0"]),
        (["--weight-decay", "1", "--optimizer", "torch.optim.Rprop"], ["torch.optim.Rprop has no weight decay; leave it out, or use"]),
        (["--weight-decay", "1", "--optimizer", "adam:weight_decay=2"], ["which sets weight_decay too; give it once"]),
        (["--weight-decay", "1", "--no-decay", "x*"], ["--no-decay x*: no parameter has such a name; expected a name or pattern of "]),
        (["--no-decay", "*"], ["--no-decay without --weight-decay; add --weight-decay X"]),
        (["--schedule", f"{LR}.StepLR"], ["StepLR needs step_size; expected torch.optim.lr_scheduler.StepLR:step_size=…"]),
        (["--schedule", f"{LR}.StepLR:step=1"], ["StepLR has no option 'step'; expected one of step_size, gamma, last_epoch"]),
        (["--schedule", f"{LR}.StepLR:step_size=x"], ["StepLR:step_size=x: TypeError: ", "expected options as torch has them: step_size"]),
        (["--schedule", f"{LR}.CosineAnnealingLR:T_max=0"], ["T_max=0: ZeroDivisionError: ", "expected options as torch has them: T_max"]),
        (["--schedule", f"{LR}.LambdaLR"], ["LambdaLR needs lr_lambda, which is no number; use soap.Trainer(schedule=…)"]),
        (["--schedule", "StepLR:step_size=1"], ["no 'StepLR'; expected one of torch.optim.lr_scheduler.NAME with "]),
        (["--schedule", f"{LR}.LinearLR@0"], ["expected a number of updates of at least 1 behind the @"]),
        (["--schedule", f"{LR}.LinearLR", "--schedule", f"{LR}.LinearLR"], ["expected @N behind each but the last, rising"]),
    ],
)
def test_usage_errors(arguments: list[str], words: list[str], strategy_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, main, [str(strategy_file), "--model", MODEL, *arguments], 2, *words)


def test_unwritable_timeline_is_found_before_the_work(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = [str(tmp_path / "no.json"), "--model", MODEL, "--timeline", str(tmp_path / "no" / "t.json")]
    assert_refused(capsys, main, command, 1, "cannot write", "create the folder")


def test_fewer_processes_than_devices(strategy_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, 0, 2)
    command = [str(strategy_file), "--model", MODEL, "--device", "cpu"]
    assert_refused(capsys, main, command, 8, "2 processes", "16 devices", "torchrun with 16 processes")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--data", "mydata"], 2, ["--data", "MODULE:CALLABLE"]),
        (["--device", "cuda"], 8, ["--device cuda", "--device cpu"]),
        (["--device", "cpu", "--backend", "nccl"], 8, ["'nccl'", "--backend gloo"]),
        ([], 8, ["'p100-4x4' has GPUs", "--device cpu"]),
    ],
)
def test_refused_before_ranks_start(
    arguments: list[str],
    code: int,
    words: list[str],
    strategy_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("soap.runtime.comm.launch.launch", lambda **_: pytest.fail("ranks were started"))
    assert_refused(capsys, main, [str(strategy_file), "--model", MODEL, *arguments], code, *words)


def test_timeline_may_not_overwrite_the_strategy(strategy_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [str(strategy_file), "--model", MODEL, "--timeline", str(strategy_file)]
    assert_refused(capsys, main, command, 2, "--timeline", "same file as STRATEGY")


def test_idle_processes_are_told_of(strategy_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, 0, 18)
    monkeypatch.setattr("soap.runtime.comm.launch.launch", lambda **_: {})
    assert main([str(strategy_file), "--model", MODEL, "--device", "cpu"]) == 0
    assert capsys.readouterr().err == "soap-run: 18 processes for 16 devices: 2 stay idle\n"


@pytest.mark.slow
def test_a_strategy_for_one_batch_norm_is_not_used_for_the_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = FILES["conv norm"]
    model, cluster = soap.load(given, plan_only=True), soap.load_cluster("local:2")
    path = tmp_path / "s.json"
    soap.save_strategy(path, soap.api.classical("data_parallel", model.graph, cluster), model, cluster)
    arguments = [str(path), "--model", given, "--batch-norm", "local"]
    assert_refused(capsys, main, arguments, 5, "strategy was made for another model", "search again")


def prediction(tmp_path: Path, *options: str) -> tuple[Any, Any, Any]:
    model, cluster = soap.load(MODEL, plan_only=True), soap.load_cluster(CLUSTER)
    path = tmp_path / "s.json"
    soap.save_strategy(path, soap.api.classical("megatron", model.graph, cluster), model, cluster)
    return prepare(make_parser().parse_args([str(path), "--model", MODEL, "--cluster", CLUSTER, *options]))


@pytest.mark.slow
def test_predicted_with_the_optimizer_that_runs(tmp_path: Path) -> None:
    sgd, adam = (prediction(tmp_path, "--optimizer", name)[1]["strategy"] for name in ("sgd", "adam"))
    assert (sgd.optimizer_states, adam.optimizer_states) == (0, 2)
    assert sum(sgd.peak_bytes) < sum(adam.peak_bytes)


@pytest.mark.slow
def test_counts_the_states_of_any_optimizer(tmp_path: Path) -> None:
    for spec, states in (("torch.optim.NAdam", 2), ("sgd:momentum=0.9", 2), ("adamw:amsgrad=true", 3), ("torch.optim.Adagrad:lr=0.1", 1)):
        assert prediction(tmp_path, "--optimizer", spec)[1]["strategy"].optimizer_states == states


@pytest.mark.slow
def test_parameters_get_the_groups_and_optimizers_that_were_asked_for(tmp_path: Path) -> None:
    asked = ["--optimizer", "*.bias=sgd:momentum=0.5", "--optimizer", "torch.optim.AdamW:betas=(0.8,0.9)", "--lr", "0.25"]
    job, *_ = prediction(tmp_path, *asked, "--weight-decay", "0.125", "--no-decay", "*embedding*")
    recipe, shapes = job.updating.recipe(), {"token_embedding.weight": (4, 2), "up.weight": (3, 2), "up.bias": (3,), "norm.weight": (2,)}
    layout = recipe.layout(shapes)
    made = layout.optimizer({name: [torch.zeros(shape, requires_grad=True)] for name, shape in shapes.items()})
    assert [group.names for member in layout.members for group in member.groups] == [
        ("up.bias",), ("token_embedding.weight", "norm.weight"), ("up.weight",)
    ]  # fmt: skip
    assert [(group["lr"], group["weight_decay"]) for group in made.param_groups] == [(0.25, 0.0), (0.25, 0.0), (0.25, 0.125)]
    assert made.param_groups[0]["momentum"] == 0.5 and made.param_groups[1]["betas"] == (0.8, 0.9)


@pytest.mark.slow
def test_a_plan_that_cuts_what_the_optimizer_needs_whole_is_refused(
    strategy_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("soap.runtime.comm.launch.launch", lambda **_: pytest.fail("ranks were started"))
    command = [str(strategy_file), "--model", MODEL, "--device", "cpu", "--optimizer"]
    words = ["optimizer Adafactor updates '", "' as a whole", "search with soap-search --optimizer"]
    assert_refused(capsys, main, [*command, "torch.optim.Adafactor"], 8, *words)
    assert_refused(capsys, main, [*command, "torch.optim.LBFGS"], 8, "optimizer LBFGS computes the loss several times in a step")
    assert_refused(capsys, main, [*command, "torch.optim.Muon"], 8, "no optimizer can be made for parameter '", "Muon only supports 2D")


def test_accumulation_says_what_it_averages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "the mean over the batches of each one's own, a mean of means where they count different numbers of tokens" in said


def test_says_where_its_prediction_comes_from(tmp_path: Path) -> None:
    *_, costs = prediction(tmp_path, "--costs", "estimate")
    assert costs["shares"] == {"measured": 0.0, "interpolated": 0.0, "calibrated": 0.0, "estimated": 1.0}


def test_options_of_training_reach_the_ranks(tmp_path: Path) -> None:
    job, *_ = prediction(tmp_path, "--accumulate", "4", "--clip-norm", "2.5")
    assert (job.accumulate, job.clip_norm) == (4, 2.5)
    assert job.reading == {
        "batch_dims": None, "batch_norm": "global", "autocast": None, "autocast_device": "cuda", "matmul_precision": None,
        "sum_dtype": "float32", "imports": []
    }  # fmt: skip
