"""``soap-run --emulate`` as people call it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import soap
from soap.cli.emulation import crossed, planned_bytes
from soap.cli.run import document, main, make_parser, prepare, text
from soap.cli.training import Outcome
from soap.emulation import emulate
from soap.emulation.hosts import host_limits
from soap.emulation.quota import CpuGroups
from soap.measure.iteration import StepTimes
from soap.model.graph import TensorKind
from soap.simulator.analysis.timeline import link_bytes
from soap.simulator.throughput import model_flops
from tests.cli.refusals import assert_refused
from tests.emulation.conftest import abandoned, groups
from tests.launcher_variables import as_rank

__all__ = ["groups"]
ROOT = Path(__file__).parents[2]
CLUSTER = "emulated:2x1@400Mbit/s"
FEATURES = 384


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(FEATURES, FEATURES), torch.nn.ReLU(), torch.nn.Linear(FEATURES, 8))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layers(inputs), labels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, and data parallelism for two emulated hosts and for a cluster of GPUs."""
    made = tmp_path_factory.mktemp("emulated")
    torch.manual_seed(0)
    soap.export(Layers(), (torch.randn(8, FEATURES), torch.randint(8, (8,))), path=made / "m.pt2")
    model = soap.load(made / "m.pt2", plan_only=True)
    for name, cluster in (("s", soap.load_cluster(CLUSTER)), ("gpus", soap.load_cluster("h200-8"))):
        soap.save_strategy(made / f"{name}.json", soap.api.classical("data_parallel", model.graph, cluster), model, cluster)
    return made


@pytest.fixture
def nothing_left(groups: CpuGroups) -> Iterator[None]:
    emulate.remove_leftovers(groups)
    yield
    assert abandoned(groups) == []


def launchers(groups: CpuGroups) -> set[int]:
    """Parents of all processes on emulated hosts, and theirs: ranks are copies of a process that the launcher has started."""
    ranks = [line for path in groups.root.glob("soap-emulation-*/*/cgroup.procs") for line in path.read_text().split()]
    parents = {parent for rank in ranks for parent in parent_of(int(rank))}
    return parents | {launcher for parent in parents for launcher in parent_of(parent)}


def parent_of(pid: int) -> list[int]:
    """Empty if the process has ended."""
    with suppress(OSError):
        return [int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])]
    return []


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "soap.cli.run", "s.json", "--model", "m.pt2", "--emulate", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_trains_like_one_process_and_counts_the_plan_s_bytes(nothing_left: None, folder: Path) -> None:
    arguments = command("--check", "--dtype", "float64", "--steps", "5", "--json")
    done = subprocess.run(arguments, cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["check"]["passed"] is True and report["check"]["tolerance"] == 1e-9
    hosts = report["emulation"]["hosts"]
    assert report["emulation"]["scale"] == 1
    assert [(host["name"], host["ranks"], host["sending_bytes_per_second"]) for host in hosts] == [
        ("host0", [0], 50e6),
        ("host1", [1], 50e6),
    ]
    parameters = FEATURES * FEATURES + FEATURES + 8 * FEATURES + 8
    for row in report["strategies"]["strategy"]["links"]:
        for way in ("sent", "received"):
            planned = row[f"planned_{way}_bytes"]
            assert planned == pytest.approx(3 * parameters * 8, rel=1e-3)  # three timed steps; the rest is the loss
            assert planned < row[f"{way}_bytes"] - row[f"{way}_header_bytes"] < 1.02 * planned
            assert 0 < row[f"{way}_header_bytes"] < 0.03 * planned
    assert report["strategies"]["data_parallel"]["links"] is None


@pytest.mark.long
def test_ctrl_c_leaves_nothing(nothing_left: None, groups: CpuGroups, folder: Path) -> None:
    process = subprocess.Popen(command("--steps", "100000"), cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True)
    end_s = time.monotonic() + 100
    while process.pid not in launchers(groups):
        assert process.poll() is None and time.monotonic() < end_s
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert process.stderr.read() == "soap-run: interrupted\n"
    assert process.wait() == 130


def test_options_that_do_not_go_together(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.chdir(folder)
    common = ["s.json", "--model", "m.pt2"]
    assert_refused(capsys, main, [*common, "--emulate-scale", "0.5"], 2, "add --emulate")
    for scale in ("0", "1.5", "nan", "half"):
        assert_refused(capsys, main, [*common, "--emulate", "--emulate-scale", scale], 2, "expected a number above 0 and at most 1")
    as_rank(monkeypatch, 0, 2)
    assert_refused(capsys, main, [*common, "--emulate"], 2, "--emulate starts the processes itself; expected no torchrun")


def test_what_is_missing_is_said_before_anything_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    (tmp_path / "no.pt2").write_text("no model")  # which is not even looked at
    command = [str(folder / "s.json"), "--model", str(tmp_path / "no.pt2"), "--emulate"]
    (tmp_path / "ip").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "ip").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_refused(capsys, main, command, 8, "needs the command 'tc'", "install the package iproute2")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert_refused(capsys, main, command, 8, "has to be root: run it with sudo")


def test_gpus_are_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, groups: CpuGroups) -> None:
    monkeypatch.chdir(folder)
    refused = ["gpus.json", "--model", "m.pt2", "--emulate"]
    assert_refused(capsys, main, refused, 8, "--emulate slows down CPUs, but cluster 'h200-8' is to run on GPUs; use --device cpu")
    assert_refused(capsys, main, [*refused, "--device", "cpu"], 8, "CPU cores in all", "use --emulate-scale")


def test_what_people_see_at_half_the_scale(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    job, predicted, costs = prepare(make_parser().parse_args(["s.json", "--model", "m.pt2", "--steps", "3"]))
    outcome = Outcome("gloo", {"strategy": StepTimes((5, 5), (0.5,) * 3, ((2_500_000, 600, 1000, 3), (600, 700, 4, 5)))}, None, ())
    whole, half = (document(job, predicted, outcome, costs, host_limits(job.topology, scale, 2), scale) for scale in (1.0, 0.5))
    for name, entry in whole["strategies"].items():
        assert half["strategies"][name]["predicted_ns"] == 2 * entry["predicted_ns"]
    assert half["emulation"]["hosts"][0]["sending_bytes_per_second"] == 25e6
    planned = whole["strategies"]["strategy"]["links"][0]["planned_sent_bytes"]
    (row,) = (line.split() for line in text(whole).splitlines() if line.startswith("  host0 "))
    assert row[1:5] == ["1,217,000", f"{planned / 2:,.0f}", f"{2_434_000 / planned:.3f}", "33,000"]
    assert "headers (66 bytes of each frame" in text(whole) and "predicted times" not in text(whole)
    assert "link rates and CPU shares times 0.5; predicted times are divided by it" in text(half)
    plain = document(job, predicted, outcome, costs)
    assert plain["emulation"] is None and "bytes per step" not in text(plain)


def test_throughput_is_of_the_whole_step_and_of_the_cluster_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    job, predicted, costs = prepare(make_parser().parse_args(["s.json", "--model", "m.pt2", "--steps", "3"]))
    outcome = Outcome("gloo", {"strategy": StepTimes((4000, 4000), (0.5,) * 3, ((1, 1, 1, 1), (1, 1, 1, 1)))}, None, ())
    graph = predicted["strategy"].plan.graph
    (samples,) = {tensor.shape[0] for tensor in graph.tensors.values() if tensor.kind is TensorKind.INPUT}
    flops, peak = model_flops(graph), sum(device.type.flops("float32") for device in job.topology.devices)
    plain, half = (document(job, predicted, outcome, costs, host_limits(job.topology, scale, 2), scale) for scale in (1.0, 0.5))
    for report, measured_s in ((plain, 4e-6), (half, 2e-6)):  # at half the scale a step takes twice as long as on the cluster
        own, usual = (report["strategies"][name]["throughput"] for name in ("strategy", "data_parallel"))
        assert own["measured"]["samples_per_second"] == pytest.approx(samples / measured_s)
        assert own["measured"]["mfu"] == pytest.approx(flops / measured_s / peak)
        assert own["predicted"]["samples_per_second"] == pytest.approx(samples * 1e9 / predicted["strategy"].makespan_ns)
        assert own["measured"]["tokens_per_second"] is own["measured"]["cost_per_million_samples"] is usual["measured"] is None
    assert "(of the cluster at its full scale)" in text(half) and "full scale" not in text(plain)
    three = document(replace(job, accumulate=3), predicted, outcome, costs)["strategies"]["strategy"]["throughput"]
    assert three["measured"]["samples_per_second"] == pytest.approx(3 * samples / 4e-6)
    assert three["predicted"]["samples_per_second"] == pytest.approx(3 * samples * 1e9 / predicted["strategy"].step_ns(3))
    untimed = document(job, predicted, Outcome("gloo", {"strategy": StepTimes((), (0.5,))}, None, ()), costs)
    assert untimed["strategies"]["strategy"]["throughput"]["measured"] is None and "(predicted)" in text(untimed)


def test_planned_bytes_of_micro_batches_and_hosts(folder: Path) -> None:
    model, cluster = soap.load(folder / "m.pt2", plan_only=True), soap.load_cluster(CLUSTER)
    simulation = soap.simulate(model, cluster, "data_parallel")
    once, twice = planned_bytes(simulation, 1), planned_bytes(simulation, 3)
    assert once == link_bytes(simulation.tasks)
    synced = 4 * (FEATURES * FEATURES + FEATURES + 8 * FEATURES + 8)  # a ring of two sends all gradients once
    for name, size in once.items():
        assert twice[name] == 3 * size - 2 * synced
    hosts = host_limits(cluster, 1.0, 2)
    rows = crossed(hosts, simulation, 1, StepTimes((1, 1), (0.0,) * 4, ((100, 200, 1, 2), (300, 400, 3, 4))))
    expected = 2 * once["host0/cpu0->network"]
    assert rows == [
        {
            "host": host,
            "sent_bytes": 100 * sent,
            "sent_header_bytes": 66 * sent,
            "planned_sent_bytes": expected,
            "received_bytes": 100 * received,
            "received_header_bytes": 66 * received,
            "planned_received_bytes": expected,
        }
        for host, sent, received in (("host0", 1, 2), ("host1", 3, 4))
    ]
