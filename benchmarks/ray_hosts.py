"""A Ray cluster of two emulated hosts: ``ray start`` in two network namespaces, with a token. For tests and benchmarks; needs root."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from soap.cluster.presets import preset
from soap.elastic.processes import descendants, signal_all
from soap.emulation.emulate import emulated
from soap.emulation.hosts import host_limits
from soap.emulation.names import bridge_name, host_address, host_name
from soap.emulation.network import run

ROOT = Path(__file__).parent.parent
HOSTS, PORT = 2, 6379
OBJECT_STORE_BYTES = 100 * 2**20
START_S, END_S = 60.0, 10.0


@dataclass(frozen=True)
class RayHosts:
    """``number``: of the emulation. ``nodes``: the processes of ``ray start``, one a host; all of Ray's are below them."""

    number: int
    token: Path
    nodes: tuple[int, ...]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the hosts; the head is on the first."""
        return tuple(str(host_address(self.number, host)) for host in range(HOSTS))

    @property
    def address(self) -> str:
        """Of the cluster."""
        return f"{self.addresses[0]}:{PORT}"

    def words(self, host: int) -> list[str]:
        """Put before a command, they run it on a host."""
        return on_host(self.number, host)

    @property
    def environment(self) -> dict[str, str]:
        """With which a process is let in."""
        return with_token(self.token)

    @contextmanager
    def cut(self, host: int) -> Iterator[None]:
        """Within the context the host's cable is out of the switch."""
        set_cable(self.number, host, "down")
        try:
            yield
        finally:
            set_cable(self.number, host, "up")

    def kill(self, host: int) -> None:
        """Kill all of Ray on a host."""
        signal_all([*descendants(self.nodes[host]), self.nodes[host]], signal.SIGKILL)

    @contextmanager
    def again(self, host: int) -> Iterator[RayHosts]:
        """Within the context Ray is on a host again, other than the head's. Gives the cluster as it is then."""
        folder, words = self.token.parent, [f"--address={self.address}"]
        node = start_node(self.words(host), self.addresses[host], words, self.token, folder / f"node-{host}-again.log")
        try:
            yield replace(self, nodes=(*self.nodes[:host], node.pid, *self.nodes[host + 1 :]))
        finally:
            end_node(node)


@contextmanager
def ray_hosts(folder: Path, rate: str = "1Gbit/s") -> Iterator[RayHosts]:
    """The cluster; Ray's files and the token are in ``folder``, whose path must be short (see ``LONGEST_FOLDER`` of a session)."""
    token = write_token(folder)
    with emulated(host_limits(preset(f"emulated:{HOSTS}x1@{rate}"), 1.0, os.cpu_count() or 1)) as emulation, ExitStack() as stack:
        number = emulation.number
        head = str(host_address(number, 0))
        first = [f"--port={PORT}", "--head", "--include-dashboard=false", f"--temp-dir={folder / 'ray'}"]
        nodes = []
        for host in range(HOSTS):
            words = first if host == 0 else [f"--address={head}:{PORT}"]
            node = start_node(on_host(number, host), str(host_address(number, host)), words, token, folder / f"node-{host}.log")
            stack.callback(end_node, node)
            nodes.append(node.pid)
            if host == 0:
                _await_port(head, PORT, node)
        yield RayHosts(number, token, tuple(nodes))


def start_node(prefix: Sequence[str], address: str, words: Sequence[str], token: Path, log: Path) -> subprocess.Popen[bytes]:
    """``ray start`` for a host, below a process of its own."""
    usual = [
        f"--node-ip-address={address}",
        "--num-cpus=1",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--disable-usage-stats",
        "--block",
    ]
    command = [*prefix, sys.executable, "-m", "ray.scripts.scripts", "start", *words, *usual]
    with log.open("wb") as stream:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=with_token(token), start_new_session=True
        )


def end_node(node: subprocess.Popen[bytes]) -> None:
    """End a node, and what is left below it."""
    below = descendants(node.pid)
    node.terminate()
    try:
        node.wait(END_S)
    except subprocess.TimeoutExpired:
        node.kill()
        node.wait()
    signal_all(below, signal.SIGKILL)


def write_token(folder: Path) -> Path:
    """A token that only this user can read."""
    path = folder / "token"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as stream:
        stream.write(secrets.token_hex(32))
    return path


def with_token(token: Path) -> dict[str, str]:
    """This environment, with what makes Ray take the token."""
    hidden = {"RAY_ADDRESS", "RAY_AUTH_TOKEN"}
    own = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**own, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "PYTHONPATH": str(ROOT)}


def on_host(number: int, host: int) -> list[str]:
    """Put before a command, they run it on a host of the emulation."""
    return ["ip", "netns", "exec", host_name(number, host)]


def set_cable(number: int, host: int, state: str) -> None:
    """``up`` or ``down``: the end at the switch of a host's cable."""
    run("ip", "-n", bridge_name(number), "link", "set", "dev", host_name(number, host), state)


def _await_port(host: str, port: int, node: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + START_S
    while True:
        assert node.poll() is None, "the head has ended"
        try:
            socket.create_connection((host, port), 1.0).close()
            return
        except OSError:
            assert time.monotonic() < end_s, f"no head after {START_S:g} s"
            time.sleep(0.2)
