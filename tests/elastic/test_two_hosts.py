"""A Ray cluster that somebody else has started on two emulated hosts: joined, trained on, and closed to whoever lacks its token."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest

from benchmarks.kill_drills import miscounted
from benchmarks.kill_run import Settings, export_model
from benchmarks.ray_hosts import HOSTS, RayHosts, ray_hosts
from benchmarks.trainee import PATIENCE_S, ROOT, Trainee
from soap.elastic.processes import descendants, listeners, lives

pytestmark = pytest.mark.long


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
