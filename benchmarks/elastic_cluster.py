"""Emulated hosts of ``benchmarks.bipartite``, and the launcher's part: leases are dealt as ``soap.elastic.launcher`` deals them, by pipes
in place of Ray's calls, so that a training's throughput is that of its hosts and links."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from statistics import median
from typing import Any

import numpy as np

from benchmarks.elastic_host import Job, run
from soap.cluster.presets import preset
from soap.cluster.topology import Topology
from soap.elastic.clocks import Clocks
from soap.elastic.leases import Steps
from soap.elastic.simulation.design import Design
from soap.elastic.worker import Batches, Report, Source
from soap.emulation.emulate import emulated
from soap.emulation.hosts import host_limits
from soap.emulation.names import host_address
from soap.emulation.network import HEADER_BYTES
from soap.errors import SoapError
from soap.measure.link_probes import fit
from soap.measure.this_machine import cpu_cores

WARM_UP = 2
"""Leases of each worker that do not count."""
PINGS = 200
ENDLESS = 2**40
"""Leases of an epoch that does not end."""
END_S = 10.0


@dataclass(frozen=True)
class Trained:
    """``samples_per_second``: of all workers, each by the leases behind its warm-up. ``leases``: all that were done. ``sent_bytes``,
    ``received_bytes``: by host, what its network card has counted, without headers. ``staleness``: ``Clocks.missing``. ``idle``: by
    host, the share of time in which its device computed nothing."""

    samples_per_second: float
    leases: int
    sent_bytes: Mapping[int, int]
    received_bytes: Mapping[int, int]
    staleness: Mapping[int, int]
    idle: Mapping[int, float]


class Hosts:
    """``pipes``: to each host's process. ``topology``: the hosts, with links as they are stated."""

    def __init__(self, pipes: Sequence[Connection], topology: Topology, batches: Batches, addresses: Sequence[str]) -> None:
        self._pipes, self.topology, self._batches, self.addresses = pipes, topology, batches, addresses
        self._leases = 0

    def ask(self, host: int, name: str, *arguments: Any) -> Any:
        """What a host answers."""
        self.tell(host, name, *arguments)
        return self.answer(host)

    def tell(self, host: int, name: str, *arguments: Any) -> None:
        """Ask, without waiting."""
        self._pipes[host].send((name, arguments))

    def answer(self, host: int) -> Any:
        """The answer to what was asked. SoapError with the host's words if it failed."""
        try:
            fine, found = self._pipes[host].recv()
        except EOFError:
            raise SoapError(f"the process of emulated host {host} has ended") from None
        if not fine:
            raise SoapError(f"emulated host {host}: {found}")
        return found

    def ask_all(self, hosts: Sequence[int], name: str, *arguments: Any) -> list[Any]:
        """The same of several hosts at once."""
        for host in hosts:
            self.tell(host, name, *arguments)
        return [self.answer(host) for host in hosts]

    def control_ns(self) -> int:
        """From this process to a host's, or back: half of a question that asks for nothing."""
        times = []
        for _ in range(PINGS):
            begin = time.perf_counter_ns()
            self.ask(0, "busy_ns")
            times.append(time.perf_counter_ns() - begin)
        return int(median(times) / 2)

    def measured_links(self) -> Topology:
        """The topology with the links' figures as messages between two hosts have them: each message's time is a line over its bytes."""
        port = self.ask(1, "echo")
        found = self.ask(0, "probe", self.addresses[1], port)
        self.ask(1, "leave")
        line = fit(*zip(*((size, median(own)) for size, own in found.items()), strict=True))
        latency, rate = line.alpha_seconds / 4, 1 / line.beta_seconds_per_byte  # there and back, over two links each
        links = tuple(replace(link, bandwidth_bytes_per_second=rate, latency_seconds=latency) for link in self.topology.links)
        return replace(self.topology, links=links, described=())

    @contextmanager
    def prepared(self, design: Design) -> Iterator[None]:
        """Servers and workers of a design."""
        used, self._leases = [*design.roles], 0
        try:
            for server, device in enumerate(design.servers):
                self.tell(device, "serve", server, design.layout, steps_of(design))
            servers = {server: (self.addresses[device], self.answer(device)) for server, device in enumerate(design.servers)}
            self.ask_all([lane.front for lane in design.lanes], "join", design.layout, servers)
            yield
        finally:
            self.ask_all(used, "leave")

    def train(self, design: Design, seconds: float = 0.0, leases: int = 0) -> Trained:
        """Train for so long behind the warm-up, or so many leases of each worker. The design must be ``prepared``."""
        self._work(design, Clocks(range(len(design.lanes)), design.consistency.bound), leases=1)  # connections are made
        used = [*design.roles]
        clocks = Clocks(range(len(design.lanes)), design.consistency.bound)
        before, busy, begin = self.ask_all(used, "counters"), self.ask_all(used, "busy_ns"), time.perf_counter()
        ended, from_s = self._work(design, clocks, seconds, leases)
        length_ns = 1e9 * (time.perf_counter() - begin)
        after, spent = self.ask_all(used, "counters"), self.ask_all(used, "busy_ns")
        moved = [[b - a for a, b in zip(*own, strict=True)] for own in zip(before, after, strict=True)]
        sent = {host: own[0] - own[2] * HEADER_BYTES for host, own in zip(used, moved, strict=True)}
        received = {host: own[1] - own[3] * HEADER_BYTES for host, own in zip(used, moved, strict=True)}
        idle = {host: 1 - (b - a) / length_ns for host, a, b in zip(used, busy, spent, strict=True)}
        rate = design.batch * sum(_rate([at for at in own if from_s <= at <= from_s + seconds]) for own in ended)
        return Trained(rate, sum(map(len, ended)), sent, received, dict(clocks.missing), idle)

    def _work(self, design: Design, clocks: Clocks, seconds: float = 0.0, leases: int = 0) -> tuple[list[list[float]], float]:
        """By worker, when its leases were done; and when the warm-up was over. Without ``leases``, until ``seconds`` are over and each
        worker has done those of its warm-up and two more."""
        ended: list[list[float]] = [[] for _ in design.lanes]
        hosts, steps = [lane.front for lane in design.lanes], steps_of(design)
        idle, busy, begin = set(range(len(hosts))), dict[Any, int](), 0.0

        def wanted(worker: int) -> bool:
            if leases:
                return len(ended[worker]) < leases
            if begin and time.perf_counter() < begin + seconds:
                return True
            return min(map(len, ended)) < WARM_UP + 2

        while True:
            for worker in sorted(idle):
                if wanted(worker) and clocks.may_start(worker):
                    clocks.started(worker)
                    idle.remove(worker)
                    step = 0 if steps is None else steps.of(self._leases)
                    self.tell(hosts[worker], "work", self._leases, self._samples(design.batch), step)
                    busy[self._pipes[hosts[worker]]] = worker
            if not busy:
                return ended, begin
            for ready in wait(list(busy)):
                worker = busy.pop(ready)
                report: Report = self.answer(hosts[worker])
                assert report.seconds > 0
                clocks.finished(worker)
                ended[worker].append(time.perf_counter())
                idle.add(worker)
            if not begin and min(map(len, ended)) >= WARM_UP:
                begin = time.perf_counter()

    def _samples(self, batch: int) -> Any:
        """The next lease's, in turn."""
        first = self._leases * batch
        self._leases += 1
        return np.arange(first, first + batch) % len(self._batches)


def steps_of(design: Design) -> Steps | None:
    """Which leases are one update, if those of a step are."""
    return Steps(ENDLESS, len(design.lanes)) if design.averaged else None


def _rate(ended: Sequence[float]) -> float:
    """Leases per second between the first and the last of these."""
    return (len(ended) - 1) / (ended[-1] - ended[0]) if len(ended) > 1 else 0.0


@contextmanager
def hosts_of(count: int, rate: str, source: Source, batches: Batches) -> Iterator[Hosts]:
    """So many emulated hosts, whose links have this rate, with a process on each. Needs root."""
    topology = preset(f"emulated:{count}x1@{rate}")
    context = multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = "1"
    with emulated(host_limits(topology, 1.0, cpu_cores())) as emulation:
        addresses = tuple(str(host_address(emulation.number, host)) for host in range(count))
        job = Job(source, batches, emulation.place, tuple(sorted(os.sched_getaffinity(0))), secrets.token_bytes(32), addresses)
        pairs = [context.Pipe() for _ in range(count)]
        own = [context.Process(target=run, args=(host, job, there), daemon=True) for host, (_, there) in enumerate(pairs)]
        try:
            for process, (_, there) in zip(own, pairs, strict=True):
                process.start()
                there.close()
            yield Hosts([here for here, _ in pairs], topology, batches, addresses)
        finally:
            for here, _ in pairs:
                try:
                    here.send(None)
                except OSError:
                    continue
            for process in own:
                process.join(END_S)
                if process.is_alive():
                    process.kill()
                    process.join()
