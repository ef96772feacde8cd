"""``soap-run`` with servers and workers without state, from the strategy's name to the figures; and what it refuses, in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import soap
from soap.cli.batches import DrawnBatches
from soap.cli.run import main
from soap.cli.search import main as search_main
from soap.cli.simulate import main as simulate_main
from soap.elastic.planned import plan_of
from soap.strategy.classical import data_parallel
from tests.elastic.models import in_float64, trained_alone
from tests.elastic.test_cut import Normed

ROOT = Path(__file__).parent.parent.parent
MODEL = "zoo:full_sparse:tiny"
CLUSTER = """
name: three
device_types: {core: {kind: cpu, flops: {float32: 50 GFLOP/s}, memory_bandwidth: 10 GB/s, memory: 4 GiB, kernel_overhead: 5 us}}
hosts:
  - {name: box, devices: {type: core, count: 3}, cpu_cores: 3, memory: 8 GiB, links: {intra: {bandwidth: 1 GB/s, latency: 50 us}}}
"""
COMMON = ["--model", MODEL, "--cluster", "cluster.yaml"]
ADAGRAD = "torch.optim.Adagrad:lr=0.05"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with strategies of one server and two workers: ``async.json``, ``sync.json``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    assert simulate_main([MODEL, *COMMON[2:], "--builtin", "bipartite:1+async", "-o", "async.json", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["consistency"], len(planned["workers"]), len(planned["servers"]), planned["batch"]) == ("async", 2, 1, 4)
    assert planned["tables"] == {f"layers.{i}.weight": {"axis": 0, "servers": [0]} for i in range(2)}
    assert simulate_main([MODEL, *COMMON[2:], "--builtin", "bipartite:1", "-o", "sync.json"]) == 0
    capsys.readouterr()
    return tmp_path


def run(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "soap.cli.run", *words[:1], *COMMON, *words[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=180)
    assert process.returncode == code, err
    assert "Traceback" not in err
    return out, "".join(line for line in err.splitlines(keepends=True) if "Set ray log level" not in line)


def read(process: subprocess.Popen[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ended(process)[0])
    return found


def noted(notes: Path) -> list[list[int]]:
    """Which leases are done, as intervals."""
    found: list[list[int]] = json.loads(notes.read_text())["done"] if notes.exists() else []
    return found


def needs_ray() -> None:
    pytest.importorskip("ray", reason="workers without state are started by Ray (the extra 'elastic')")


@pytest.mark.slow
def test_stale_strategy_trains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs_ray()
    assert main(["async.json", *COMMON, "--optimizer", ADAGRAD, "--json", "--steps", "5", "--save", "kept"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(out)
    assert (found["consistency"], found["leases"], found["lost_workers"], found["dealt_again"]) == ("async", 10, 0, 0)
    assert found["loss_steps"] == [1, 2, 3, 4, 5] and all(0 < loss < 2 for loss in found["losses"]) and found["resumed_at"] == 0
    assert sum(found["staleness"]["missing"].values()) == 10 and found["checkpoint"] == "kept"
    assert found["bytes"]["sent"] == 10 * found["bytes"]["sent_per_lease"] > 0
    assert found["reduce"] == {"dense": "mean", "sparse": "mean"} and found["throughput"]["samples_per_second"] > 0
    assert (folder / "kept" / "leases.json").exists()


@pytest.mark.long  # `test_launcher` and `elastic/test_steps` hold the same; Ray starts for each command
def test_in_step_servers_train_as_one_process_does(folder: Path) -> None:
    """The batches are those of an exact run."""
    needs_ray()
    words = ("sync.json", "--ray", "own", "--dtype", "float64", "--optimizer", ADAGRAD, "--seed", "3", "--steps", "4")
    out, err = ended(run(*words, "--json"))
    found = json.loads(out)
    assert err == "" and found["staleness"]["missing"] == {"0": 8}
    drawn = DrawnBatches(soap.load(MODEL), 3)
    batches = [in_float64(drawn(step)) for step in range(4)]
    losses, _ = trained_alone(MODEL, "float64", 3, batches, lambda tensors: torch.optim.Adagrad(tensors, lr=0.05))
    assert found["losses"] == pytest.approx(losses, rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize(("name", "both"), [("bipartite:2", 0), ("fully_connected", 2)])
def test_in_step_ranks_run_it_exactly(name: str, both: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On four devices: two servers and two workers, or all as both; no rows of a table travel."""
    (folder / "four.yaml").write_text(CLUSTER.replace("count: 3", "count: 4").replace("cpu_cores: 3", "cpu_cores: 4"))
    assert simulate_main([MODEL, "--cluster", "four.yaml", "--builtin", name, "-o", "exact.json"]) == 0
    capsys.readouterr()
    command = ["exact.json", "--model", MODEL, "--cluster", "four.yaml", "--dtype", "float64", "--steps", "3", "--check", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "soap.cli.run", *command], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["check"]
    assert found["passed"] is True and found["worst"]["error"] <= found["tolerance"] == 1e-9
    plan = plan_of(soap.load_strategy("exact.json", MODEL, "four.yaml"), soap.load(MODEL, plan_only=True).graph)
    assert len({*plan.servers} & {*plan.workers}) == 2 * both


@pytest.mark.long
def test_found_plan_trains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs_ray()
    assert search_main([MODEL, *COMMON[2:], "--consistency", "bounded:1", "-o", "found.json", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    found = read(run("found.json", "--optimizer", ADAGRAD, "--steps", "3", "--json"))
    assert [found[what] for what in ("workers", "servers", "batch")] == [planned[what] for what in ("workers", "servers", "batch")]
    assert found["leases"] == 3 * len(planned["workers"]) and all(0 < loss < 2 for loss in found["losses"])


@pytest.mark.long
def test_interrupted_run_says_how_to_go_on(folder: Path) -> None:
    needs_ray()
    assert simulate_main([MODEL, *COMMON[2:], "--builtin", "bipartite:1+bounded:0", "-o", "bounded.json"]) == 0
    process = run("bounded.json", "--steps", "100000", "--save", "kept", "--fsync")
    deadline, notes = time.monotonic() + 120, Path("kept/leases.json")
    while time.monotonic() < deadline and not any(first == 0 and stop > 3 for first, stop in noted(notes)):
        time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = ended(process, 130)
    assert err.startswith("soap-run: interrupted after ") and "--resume kept --steps " in err and err.count("\n") == 1
    done = int(err.split("after ")[1].split()[0])
    assert noted(notes)[0][1] // 2 == done > 1
    out, _ = ended(run("bounded.json", "--steps", "2", "--resume", "kept"))
    assert out.startswith("stale (bounded:0): 2 workers with 4 samples each, 1 servers\n") and f"in step {done + 2}" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["async.json", "--check"], "--check is for plans that ranks run; servers and workers do not know it: leave it out"),
        (["async.json", "--weights", "init:normal(0.02)"], "--weights is for plans that ranks run"),
        (["async.json", "--report", "new.html"], "--report is for plans that ranks run"),
        (["async.json", "--accumulate", "2"], "--accumulate is for plans that ranks run"),
        (["async.json", "--schedule", "torch.optim.lr_scheduler.StepLR:step_size=2"], "--schedule is for plans that ranks run"),
        (["async.json", "--optimizer", "*.bias=sgd", "--optimizer", "adam"], "servers update all parameters alike; expected one optimizer"),
        (["async.json", "--save", "."], "--save .: something is there; expected an empty folder, or --resume ."),
        (["async.json", "--resume", "nowhere"], "'nowhere' has no run of servers and workers; expected the folder of soap-run --save"),
        (["async.json", "--data", "preprocessed:nowhere"], "'nowhere' is not what soap-preprocess wrote"),
        (["sync.json", "--fsync"], "--fsync is for servers and workers; expected a stale strategy, or --ray own beside it"),
        (["sync.json", "--reduce-dense", "sum"], "--reduce-dense is for servers and workers"),
        (["async.json", "--ray", "127.0.0.1:1"], "no Ray cluster at '127.0.0.1:1'"),
        (["split.json"], "is split by b:3; expected its owners to compute it"),
    ],
)
def test_what_is_refused_is_one_line(words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "--ray" in words:
        needs_ray()
    model, cluster = soap.load(MODEL, plan_only=True), soap.load_cluster("cluster.yaml")
    stale = replace(data_parallel(model.graph, cluster), consistency="async")
    soap.save_strategy("split.json", stale, model, cluster)
    assert main([words[0], *COMMON, *words[1:]]) != 0
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_model_that_keeps_statistics_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soap.export(Normed(), (torch.randint(9, (4, 4)),), path="normed.pt2", verify=False)
    model, cluster = soap.load("normed.pt2", plan_only=True), soap.load_cluster("cluster.yaml")
    soap.save_strategy("normed.json", soap.api.classical("bipartite:1+async", model, cluster), model, cluster)
    assert main(["normed.json", "--model", "normed.pt2", *COMMON[2:]]) != 0
    err = capsys.readouterr().err
    assert "workers hold no state" in err and err.count("\n") == 1


def test_without_ray_it_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["async.json", *COMMON]) != 0
    assert "Ray is missing; expected it here and on all nodes: pip install 'soap-search[elastic]'" in capsys.readouterr().err


def test_what_is_stale_is_not_simulated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate_main([MODEL, *COMMON[2:], "--strategy", "async.json"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("stale (async): 2 workers with 4 samples each, 1 servers") and "simulated" in out and " samples/s" in out
    assert simulate_main([MODEL, *COMMON[2:], "--strategy", "async.json", "--explain"]) == 2
    assert "--explain with a stale strategy (async), which has no iteration of the whole batch" in capsys.readouterr().err
