"""A Ray cluster that somebody else has started on two emulated hosts: joined, trained on, and closed to whoever lacks its token."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
import torch

import soap
from benchmarks.kill_drills import miscounted
from benchmarks.kill_run import Settings, export_model
from benchmarks.ray_hosts import HOSTS, RayHosts, ray_hosts
from benchmarks.trainee import PATIENCE_S, ROOT, Trainee
from soap.cli.batches import DrawnBatches
from soap.cli.simulate import main as simulate_main
from soap.elastic.processes import descendants, listeners, lives, name_of
from tests.elastic.models import in_float64, trained_alone

pytestmark = pytest.mark.long

MODEL = "zoo:full_sparse:tiny"
TWO = """
name: two
device_types: {core: {kind: cpu, flops: {float32: 50 GFLOP/s}, memory_bandwidth: 10 GB/s, memory: 4 GiB, kernel_overhead: 5 us}}
hosts:
  - {name: first, devices: {type: core, count: 2}, cpu_cores: 2, memory: 8 GiB, links: {intra: {bandwidth: 1 GB/s, latency: 50 us}}}
  - {name: second, devices: {type: core, count: 2}, cpu_cores: 2, memory: 8 GiB, links: {intra: {bandwidth: 1 GB/s, latency: 50 us}}}
network: {bandwidth: 1 Gbit/s, latency: 50 us}
"""
STEPS = 40


@contextmanager
def cluster() -> Iterator[RayHosts]:
    pytest.importorskip("ray", reason="the extra 'elastic'")
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2, to make hosts")
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, ray_hosts(Path(folder)) as made:
        yield made


@pytest.fixture(scope="module")
def hosts() -> Iterator[RayHosts]:
    with cluster() as made:
        yield made


def network_of(process: int) -> str:
    return os.readlink(f"/proc/{process}/ns/net")


def networks_of(processes: Iterable[int]) -> set[str]:
    """Of those that have not ended meanwhile, as Ray's helpers do now and then."""
    found = set()
    for process in processes:
        with suppress(FileNotFoundError):
            found.add(network_of(process))
    return found


def test_both_hosts_own_and_work_and_each_sample_counts_once(hosts: RayHosts, tmp_path: Path) -> None:
    export_model(tmp_path)
    settings = Settings(str(tmp_path), str(tmp_path / "kept"), hosts.address, HOSTS, epochs=2)
    with tempfile.TemporaryDirectory(prefix="kill-", dir="/tmp") as temporary:
        trainee = Trainee(settings, Path(temporary), hosts.words(0), hosts.environment, hosts.nodes)
        try:
            trainee.wait_for_leases(10)
            servers, processes = trainee.started["servers"], trainee.started["processes"]
            assert [host for host, _ in servers] == [*hosts.addresses]
            networks = [network_of(node) for node in hosts.nodes]
            assert [network_of(process) for process in processes] == networks and network_of(os.getpid()) not in networks
            assert [network_of(process) for process in trainee.started["workers"]] == networks
            for (host, port), process in zip(servers, processes, strict=True):
                assert [str(at.address) for at in listeners([process]) if at.port == port] == [host], "a server, on one interface alone"
            trainee.hurry()
            assert trainee.ended() == 0 and not trainee.errors
            assert not miscounted(trainee) and not trainee.left()
        finally:
            trainee.close()


def test_the_command_trains_on_it_as_one_process_does(
    hosts: RayHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``soap-run --ray ADDRESS`` on one of the hosts: servers on the first and workers on the second, as the strategy has it; nothing of
    them is left there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.yaml").write_text(TWO)
    assert simulate_main([MODEL, "--cluster", "two.yaml", "--builtin", "bipartite:2", "-o", "sync.json"]) == 0
    capsys.readouterr()
    words = ["sync.json", "--model", MODEL, "--cluster", "two.yaml", "--ray", hosts.address, "--steps", str(STEPS), "--json"]
    command = [*hosts.words(0), sys.executable, "-m", "soap.cli.run", *words]
    options = ["--dtype", "float64", "--optimizer", "torch.optim.Adagrad:lr=0.05", "--seed", "3"]
    environment = {**hosts.environment, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, *options], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    places, end_s = dict[int, tuple[str, str]](), time.monotonic() + 2 * PATIENCE_S
    while process.poll() is None and time.monotonic() < end_s:
        for one in (one for node in hosts.nodes for one in descendants(node)):
            if (name := name_of(one).partition(".")[0]) in ("ray::Server", "ray::Worker"):
                with suppress(FileNotFoundError):
                    places[one] = name, network_of(one)
        time.sleep(0.1)
    process.kill()  # if it still runs
    out, err = process.communicate()
    assert process.returncode == 0 and "Traceback" not in err, err
    networks = [network_of(node) for node in hosts.nodes]
    assert sorted(places.values()) == [("ray::Server", networks[0])] * 2 + [("ray::Worker", networks[1])] * 2
    found = json.loads(out)
    assert (found["ray"], found["leases"], found["lost_workers"], found["dealt_again"]) == (hosts.address, 2 * STEPS, 0, 0)
    drawn = DrawnBatches(soap.load(MODEL), 3)
    batches = [in_float64(drawn(step)) for step in range(STEPS)]
    losses, _ = trained_alone(MODEL, "float64", 3, batches, lambda tensors: torch.optim.Adagrad(tensors, lr=0.05))
    assert found["losses"] == pytest.approx([losses[step - 1] for step in found["loss_steps"]], rel=1e-9)
    assert not any(lives(one) for one in places), "actors end with the command"


@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_worker_whose_machine_is_lost_goes_on_elsewhere(tmp_path: Path, how: str) -> None:
    """Its machine's Ray is killed, or nobody reaches it until Ray gives it up; servers are on the other one."""
    export_model(tmp_path)
    with cluster() as hosts, tempfile.TemporaryDirectory(prefix="kill-", dir="/tmp") as temporary:
        settings = Settings(str(tmp_path), str(tmp_path / "kept"), hosts.address, HOSTS, epochs=12, server_machines=(0, 0))
        trainee = Trainee(settings, Path(temporary), hosts.words(0), hosts.environment, hosts.nodes)
        try:
            trainee.wait_for_leases(10)
            first, second = networks = [network_of(node) for node in hosts.nodes]
            assert [network_of(process) for process in trainee.started["workers"]] == networks
            stayed, lost = trainee.started["workers"]

            def moved() -> bool:
                return [network_of(one) for one in trainee.actors("Worker") if one not in (stayed, lost)] == [first]

            with hosts.cut(1) if how == "cut off" else nullcontext():
                if how == "killed":
                    hosts.kill(1)
                trainee.wait(moved, "a worker in its place")
                trainee.wait_for_leases(len(trainee.leases) + 20)
            assert lives(stayed) and second not in networks_of(trainee.started["processes"])
            trainee.hurry()
            assert trainee.ended(3 * PATIENCE_S) == 0 and not trainee.errors
            here, there = hosts.addresses
            assert trainee.warnings == [f"worker 1: its machine {there} is gone, so it works on {here}"]
            assert trainee.end["lost_workers"] == 1 and trainee.end["dealt_again"] == 1
            assert not miscounted(trainee) and not trainee.left()
        finally:
            trainee.close()


def test_server_whose_machine_is_lost_is_one_line_until_it_is_back(tmp_path: Path) -> None:
    """Its folder is there, so it goes nowhere else."""
    export_model(tmp_path)
    with cluster() as hosts, tempfile.TemporaryDirectory(prefix="kill-", dir="/tmp") as temporary:
        settings = Settings(str(tmp_path), str(tmp_path / "kept"), hosts.address, HOSTS, epochs=4)
        trainee = Trainee(settings, Path(temporary), hosts.words(0), hosts.environment, hosts.nodes)
        try:
            trainee.wait_for_leases(30)
            hosts.kill(1)
            code = trainee.ended(2 * PATIENCE_S)
            there = hosts.addresses[1]
            assert code and len(trainee.errors) == 1 and not trainee.left()
            assert f"server 1 is lost: its machine {there} is gone" in trainee.errors[0], trainee.errors
        finally:
            trainee.close()
        with hosts.again(1) as back:
            trainee = Trainee(settings, Path(temporary), back.words(0), back.environment, back.nodes)
            try:
                trainee.wait_for_leases(10)
                assert [network_of(one) for one in trainee.started["processes"]] == [network_of(node) for node in back.nodes]
                trainee.hurry()
                assert trainee.ended(3 * PATIENCE_S) == 0 and not trainee.errors
                assert not miscounted(trainee) and not trainee.left()
            finally:
                trainee.close()


def test_nothing_of_it_can_be_reached_from_outside_its_hosts(hosts: RayHosts) -> None:
    """Ray listens on all interfaces of a host (docs/elastic.md), but all of it is in the hosts' namespaces."""
    assert networks_of(one for node in hosts.nodes for one in descendants(node)) == {network_of(node) for node in hosts.nodes}


@pytest.mark.parametrize("token", ["another", ""])
def test_wrong_or_no_token_is_one_line(hosts: RayHosts, tmp_path: Path, token: str) -> None:
    (tmp_path / "token").write_text(token, encoding="ascii")
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")} if token else {"RAY_AUTH_MODE": "disabled"}
    command = [*hosts.words(1), sys.executable, "-m", "tests.elastic.joiner", hosts.address]
    done = subprocess.run(command, cwd=ROOT, env={**hosts.environment, **own}, capture_output=True, text=True, timeout=120)
    said = "does not accept the token in" if token else "does not accept us without a token"
    assert len(lines := done.stdout.splitlines()) == 1 and said in lines[0] and not done.stderr, done.stdout + done.stderr
