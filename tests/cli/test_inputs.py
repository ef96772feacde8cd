"""What is wrong with input files is said before anything is imported, measured or started that takes long."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import soap
from soap.cli import checkpoints, profile, run, search, simulate, tune
from soap.cli.checkpoints import going_on
from soap.cli.updating import Updating
from soap.measure import this_machine
from soap.runtime.checkpoint.manifest import MANIFEST
from tests.cli.refusals import assert_refused

MODEL = "zoo:rnnlm:tiny"


@pytest.fixture
def strategy(tmp_path: Path) -> str:
    """A strategy for two devices of a cluster."""
    path = tmp_path / "s.json"
    soap.save_strategy(path, soap.classical("data_parallel", MODEL, "h100-2"), MODEL, "h100-2")
    return str(path)


def test_a_file_that_is_not_there_is_told_without_torch(strategy: str, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    commands = [
        ("search", ["gone.pt2", "--cluster", "h100-2"], 3),
        ("run", [strategy, "--model", "gone.pt2", "--cluster", "h100-2"], 3),
        ("run", [gone, "--model", MODEL], 5),
        ("simulate", [MODEL, "--cluster", f"{gone}.yaml", "--builtin", "data_parallel"], 4),
        ("tune", [gone, "--model", MODEL, "-o", str(tmp_path / "t.json")], 5),
        ("profile", [MODEL, "--cluster", "local:2", "--strategy", gone], 5),
        ("report", [MODEL, "--cluster", "h100-2", "--strategy", gone, "-o", str(tmp_path / "r.html")], 5),
        ("export_plan", ["gone.pt2", "--cluster", "h100-2", "--strategy", strategy, "--to", "fsdp2", "-o", str(tmp_path / "p.py")], 3),
    ]
    program = f"""
import importlib, sys
for name, arguments, code in {commands!r}:
    found = importlib.import_module(f"soap.cli.{{name}}").main(arguments)
    assert found == code, (name, found)
    assert "torch" not in sys.modules, name
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == len(commands) and done.stderr.count("gone") >= len(commands)


@pytest.mark.parametrize(
    ("main", "options"),
    [(run.main, ["--model", MODEL]), (tune.main, ["--model", MODEL, "-o", "t.json"]), (simulate.main, [MODEL, "--strategy"])],
)
def test_a_strategy_for_another_cluster_is_refused_before_this_machine_is_measured(
    main: Any, options: list[str], strategy: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "measured_topology", lambda *args: pytest.fail("measures"))
    command = [*options, strategy] if main is simulate.main else [strategy, *options]
    assert_refused(capsys, main, [*command, "--cluster", "local:3"], 5, "made for another cluster: 'h100-2'", "'local:3'", "search again")


def test_one_for_as_many_devices_is_left_to_those_who_take_it(
    strategy: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [MODEL, "--cluster", "a100-80gb-2", "--strategy", strategy]
    assert_refused(capsys, simulate.main, command, 5, "made for another cluster", "or price it here all the same with --what-if")
    assert_refused(capsys, run.main, [strategy, "--model", MODEL, "--cluster", "a100-80gb-2"], 5, "made for another cluster: 'h100-2'")


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ([], "SGD"),
        (["--optimizer", "adamw"], "AdamW"),
        (["--optimizer", "torch.optim.Adafactor:lr=0.1"], "Adafactor"),
        (["--optimizer", "adam", "--optimizer", "*.bias=sgd"], None),
    ],
)
def test_a_checkpoint_of_another_optimizer_is_refused_before_ranks_start(
    options: list[str], own: str | None, strategy: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = run.make_parser().parse_args([strategy, "--model", MODEL, *options])
    assert Updating.of(args).only_name == own
    if own is not None:
        assert Updating.of(args).recipe() is not None  # there is such an optimizer
    monkeypatch.setattr(checkpoints, "resolve", Path)
    monkeypatch.setattr(checkpoints, "read_manifest", lambda path: SimpleNamespace(optimizer="Adam"))
    monkeypatch.setattr(run.restarting, "train", lambda *more: (_ for _ in ()).throw(KeyboardInterrupt))
    command = [strategy, "--model", MODEL, "--cluster", "h100-2", "--resume", "saved", *options]
    if own is None:  # the ranks find out
        assert run.main(command) == 130
        return
    assert_refused(capsys, run.main, command, 8, "checkpoint 'saved' was saved with optimizer Adam", f"this run has {own}")


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    def told(**given: str | None) -> str:
        return going_on(argparse.Namespace(**{"save": None, "resume": None, **given}))

    saves = tmp_path / "saves"
    assert told() == "" and told(save=str(saves)) == ": no checkpoint was due yet; --save-every N writes more of them"
    assert told(resume="old") == ": nothing new was saved, and --resume old goes on from there again"
    for step in (4, 8):
        (saves / f"step-{step:08d}").mkdir(parents=True)
    (saves / "step-00000004" / MANIFEST).touch()  # the other one is not complete
    assert told(save=str(saves), resume="old") == f": --resume {saves} goes on after step 4"


def test_searches_and_profiles_look_at_all_clusters(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "s.json")
    assert_refused(capsys, search.main, [MODEL, "--cluster", "h100-2", "--cluster", "no.yaml", "-o", out], 4, "no.yaml", "check the path")
    assert_refused(capsys, profile.main, [MODEL, "--cluster", "local:2", "--for", "no.yaml"], 4, "no.yaml", "check the path")
