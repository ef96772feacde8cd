"""A Ray cluster that somebody else has started on two emulated hosts: joined, trained on, and closed to whoever lacks its token."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.kill_drills import miscounted
from benchmarks.kill_run import Settings, export_model
from benchmarks.ray_hosts import HOSTS, RayHosts, ray_hosts
from benchmarks.trainee import ROOT, Trainee
from soap.elastic.processes import descendants, listeners

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def hosts() -> Iterator[RayHosts]:
    pytest.importorskip("ray", reason="the extra 'elastic'")
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2, to make hosts")
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, ray_hosts(Path(folder)) as made:
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
            trainee.wait(lambda: len(trainee.actors("Worker")) == settings.workers, "the last worker")
            servers, processes = trainee.started["servers"], trainee.started["processes"]
            assert [host for host, _ in servers] == [*hosts.addresses]
            networks = [network_of(node) for node in hosts.nodes]
            assert [network_of(process) for process in processes] == networks and network_of(os.getpid()) not in networks
            assert networks_of(trainee.actors("Worker")) == {*networks}
            for (host, port), process in zip(servers, processes, strict=True):
                assert [str(at.address) for at in listeners([process]) if at.port == port] == [host], "a server, on one interface alone"
            trainee.hurry()
            assert trainee.ended() == 0 and not trainee.errors
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
