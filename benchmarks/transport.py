"""``python -m benchmarks.transport [--hosts 1Gbit/s]``: how long a question and its answer take between a worker and a server, by the ways
that tensors could travel: our frames over TCP, calls of a Ray actor, Ray's object store, a gloo pair. Results: docs/elastic.md.

A question has as many bytes as its answer. Both ends are what they are in training: the server an actor of Ray, the worker a process that
has joined. ``--hosts RATE``: each on an emulated host of its own, joined by links of this rate (root). A round asks by each way in another
order; figures are medians over all.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from benchmarks.quiet import Watch
from soap.cluster.presets import preset
from soap.elastic.session import LOOPBACK, module, session
from soap.elastic.transport import Listener, connect
from soap.emulation.emulate import emulated
from soap.emulation.hosts import host_limits
from soap.emulation.names import INTERFACE, host_address, host_name
from soap.units import format_bytes

SIZES = (4 * 2**10, 256 * 2**10, 4 * 2**20, 64 * 2**20)
ROUNDS = 5
LEAST_S = 0.4
"""In each round a way is asked for so long, and at least once."""
OBJECT_STORE_BYTES = 600 * 2**20

Ask = Callable[[np.ndarray], Any]


class Echo:
    """A server that gives back what it gets, by all ways. Runs as an actor."""

    def __init__(self, secret: bytes, host: str) -> None:
        self._listener = Listener(lambda frame: [frame], secret, host)

    def port(self) -> int:
        return self._listener.port

    def call(self, data: np.ndarray) -> np.ndarray:
        return data

    def stored(self, references: list[Any]) -> list[Any]:
        ray = module()
        return [ray.put(ray.get(references[0]))]

    def pair(self, host: str, port: int, interface: str) -> None:
        threading.Thread(target=_answer_pair, args=(host, port, interface), daemon=True).start()


def _open_pair(host: str, port: int, interface: str, rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    torch.distributed.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=2)


def _answer_pair(host: str, port: int, interface: str) -> None:
    _open_pair(host, port, interface, 1)
    while (size := _received_size()) >= 0:
        data = torch.empty(size, dtype=torch.uint8)
        torch.distributed.recv(data, 0)
        torch.distributed.send(torch.tensor([size]), 0)
        torch.distributed.send(data, 0)


def _received_size(peer: int = 0) -> int:
    size = torch.empty(1, dtype=torch.int64)
    torch.distributed.recv(size, peer)
    return int(size)


def _ask_pair(data: np.ndarray) -> torch.Tensor:
    torch.distributed.send(torch.tensor([data.nbytes]), 1)
    torch.distributed.send(torch.from_numpy(data), 1)
    answer = torch.empty(_received_size(1), dtype=torch.uint8)
    torch.distributed.recv(answer, 1)
    return answer


@contextmanager
def ways(node: str, own_host: str, host: str, interface: str) -> Iterator[dict[str, Ask]]:
    """All ways to the server on this node. ``own_host``, ``host``: addresses of both ends; ``interface``: what gloo takes."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray, secret = module(), secrets.token_bytes(32)
    actor = ray.remote(num_cpus=0)(Echo)
    server = actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(secret, host)
    connection = connect(host, ray.get(server.port.remote()), secret)
    with socket.create_server((own_host, 0)) as free:
        port = free.getsockname()[1]
    ray.get(server.pair.remote(own_host, port, interface))
    _open_pair(own_host, port, interface, 0)
    yield {
        "TCP": lambda data: connection.ask([data]),
        "Ray call": lambda data: ray.get(server.call.remote(data)),
        "Ray objects": lambda data: ray.get(ray.get(server.stored.remote([ray.put(data)]))[0]),
        "gloo": _ask_pair,
    }
    torch.distributed.send(torch.tensor([-1]), 1)
    torch.distributed.destroy_process_group()
    connection.close()


def measure(asks: dict[str, Ask]) -> dict[str, dict[int, float]]:
    """Median seconds by way and size. Answers are checked once."""
    found: dict[str, dict[int, list[float]]] = {name: {size: [] for size in SIZES} for name in asks}
    draw = random.Random(0)
    for size in SIZES:
        data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        for name, ask in asks.items():
            assert np.array_equal(np.asarray(ask(data)).view(np.uint8), data), name
        for _ in range(ROUNDS):
            for name in draw.sample([*asks], len(asks)):
                until = time.perf_counter() + LEAST_S
                while not found[name][size] or time.perf_counter() < until:
                    begin = time.perf_counter()
                    asks[name](data)
                    found[name][size].append(time.perf_counter() - begin)
    return {name: {size: statistics.median(times) for size, times in own.items()} for name, own in found.items()}


def on_this_machine() -> dict[str, dict[int, float]]:
    """Two processes of one machine."""
    with session(cpus=1, object_store_bytes=OBJECT_STORE_BYTES), ways(module().nodes()[0]["NodeID"], LOOPBACK, LOOPBACK, "lo") as asks:
        return measure(asks)


def on_hosts(own_host: str, host: str, namespace: str) -> dict[str, dict[int, float]]:
    """This process is on the first host; a second node joins on the other."""
    with ExitStack() as stack:
        own = stack.enter_context(session(interface=own_host, everywhere=True, cpus=1, object_store_bytes=OBJECT_STORE_BYTES))
        options = ["--num-cpus=1", f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats", "--block"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={own.address}", f"--node-ip-address={host}", *options]
        node = subprocess.Popen(["ip", "netns", "exec", namespace, *command], stdout=subprocess.DEVNULL)
        stack.callback(lambda: (node.terminate(), node.wait()))
        there: list[str] = []
        while not there:
            assert node.poll() is None, "the second node has ended"
            time.sleep(0.5)
            there = [one["NodeID"] for one in module().nodes() if one["Alive"] and one["NodeManagerAddress"] == host]
        return measure(stack.enter_context(ways(there[0], own_host, host, INTERFACE)))


def between_hosts(rate: str) -> dict[str, dict[int, float]]:
    """Two emulated hosts; what measures is on the first."""
    limits = host_limits(preset(f"emulated:2x1@{rate}"), 1.0, os.cpu_count() or 1)
    with emulated(limits) as emulation:
        first, second = (host_name(emulation.number, i) for i in range(2))
        addresses = [str(host_address(emulation.number, i)) for i in range(2)]
        command = [sys.executable, "-m", "benchmarks.transport", "--inside", *addresses, second]
        done = subprocess.run(["ip", "netns", "exec", first, *command], stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: {int(size): seconds for size, seconds in own.items()} for name, own in found.items()}


def table(found: dict[str, dict[int, float]]) -> str:
    """Milliseconds of a question with its answer, and bytes per second of both together."""
    lines = ["| way | " + " | ".join(format_bytes(size) for size in SIZES) + " |", "|---|" + "---|" * len(SIZES)]
    for name, own in found.items():
        cells = [f"{1e3 * own[size]:.2f} ms, {2e-6 * size / own[size]:.0f} MB/s" for size in SIZES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", metavar="RATE", help="on two emulated hosts whose links have this rate, such as 1Gbit/s")
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        print(json.dumps(on_hosts(*args.inside)))
        return
    watch = Watch()
    found = between_hosts(args.hosts) if args.hosts else on_this_machine()
    print(table(found))
    share = watch.others_share()
    print(f"others used {'an unknown share' if share is None else f'{share:.0%}'} of the processors (Ray's own processes among them)")


if __name__ == "__main__":
    main()
