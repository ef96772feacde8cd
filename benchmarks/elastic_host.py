"""What an emulated host does in ``benchmarks.bipartite``: a process that serves partitions, works on leases, or both, as it is told.

``Worker`` and ``Store`` are those of training; there is no Ray: the launcher's part is the parent process's (``elastic_cluster``), which
talks to its hosts by pipes. Whatever computes does so on the host's device, one thing at a time (``SharedProcessor``); what only sends or
receives does not. Each host has a device of its own, whose threads Python runs in one process.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from benchmarks.bipartite_peers import data_parallel, hogwild
from benchmarks.elastic_work import Measuring
from benchmarks.shared_processor import InTurn, SharedProcessor
from soap.elastic.layout import Layout
from soap.elastic.leases import Steps
from soap.elastic.messages import decode, encode
from soap.elastic.store import Keeping
from soap.elastic.transport import Buffer, Listener, connect
from soap.elastic.worker import Batches, Report, Source, Worker
from soap.emulation.placement import Placement, card_counters
from soap.runtime.system import clock

OPTIMIZER = partial(torch.optim.Adagrad, lr=0.01)
PROBES = (2**10, 2**16, 2**19, 2**21)
"""Bytes of messages from which the links' figures follow."""
REPEATS = 5


@dataclass(frozen=True)
class Job:
    """What all hosts know."""

    source: Source
    batches: Batches
    place: Placement
    cores: tuple[int, ...]
    secret: bytes
    addresses: tuple[str, ...]


class Host:
    """A host's own state: the partitions that it serves, and its worker, if it has them."""

    def __init__(self, number: int, job: Job) -> None:
        self._number, self._job = number, job
        self.device = SharedProcessor(job.place.shares[number])
        self._stack = ExitStack()
        self._worker: Worker | None = None

    def serve(self, server: int, layout: Layout, steps: Steps | None) -> int:
        """Serve a server's partitions, ``steps``: where an update is that of a whole step. Returns the port."""
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        keeping = Keeping(folder, OPTIMIZER, snapshot_every_pushes=None)
        store = keeping.store(server, layout, self._job.source, steps)
        self._stack.callback(store.close)

        def answer(frame: memoryview) -> Sequence[Buffer]:
            with self.device.computing():
                return encode(store.answer(decode(frame)))

        listener = Listener(answer, self._job.secret, self._job.addresses[self._number])
        self._stack.callback(listener.close)
        return listener.port

    def join(self, layout: Layout, servers: Mapping[int, tuple[str, int]]) -> None:
        """Have a worker for this layout."""
        self._worker = Worker(self._job.source, self._job.batches, layout, servers.__getitem__, self._job.secret)
        self._stack.callback(self._worker._owners.close)

    def work(self, lease: int, indices: Sequence[int], step: int) -> Report:
        """Do a lease. ``step``: the one it belongs to, where an update is that of a whole step; else 0."""
        assert self._worker is not None
        clock.install(InTurn(self.device))
        try:
            with self.device.computing():
                return self._worker.work(lease, np.asarray(indices), step=step)
        finally:
            clock.install(None)

    def leave(self) -> None:
        """Serve and work no longer."""
        self._stack.close()
        self._worker = None

    def counters(self) -> tuple[int, int, int, int]:
        """See ``card_counters``."""
        return card_counters()

    def busy_ns(self) -> int:
        """How long the device has computed."""
        return self.device.busy_ns

    def echo(self) -> int:
        """Answer any frame by an empty one. Returns the port."""
        listener = Listener(lambda frame: [], self._job.secret, self._job.addresses[self._number])
        self._stack.callback(listener.close)
        return listener.port

    def probe(self, host: str, port: int) -> dict[int, list[float]]:
        """Seconds until a frame of each size is answered by an empty one."""
        peer = connect(host, port, self._job.secret)
        found: dict[int, list[float]] = {}
        for size in PROBES * (REPEATS + 1):
            data = np.zeros(size, np.uint8)
            begin = time.perf_counter_ns()
            peer.ask([data])
            found.setdefault(size, []).append((time.perf_counter_ns() - begin) / 1e9)
        peer.close()
        return {size: own[1:] for size, own in found.items()}

    def measure(self, layout: Layout, batch: int, steps: Steps | None) -> dict[str, Any]:
        """See ``Measuring``."""
        return Measuring(self.device, self._job.source, self._job.batches, layout, OPTIMIZER, steps).all(batch)

    def data_parallel(self, spec: str, rank: int, world: int, port: int, batch: int, seconds: float) -> float:
        """See ``bipartite_peers``."""
        address = f"tcp://{self._job.addresses[0]}:{port}"
        return data_parallel(spec, self._job.batches, self.device.share, (rank, world, address), batch, seconds)

    def hogwild(self, spec: str, threads: int, batch: int, seconds: float) -> float:
        """See ``bipartite_peers``."""
        return hogwild(spec, self._job.batches, self.device.share, threads, batch, seconds)


def run(number: int, job: Job, parent: Connection) -> None:
    """The process: does what it is told until it is told nothing more."""
    torch.set_num_threads(1)
    job.place(number)
    os.sched_setaffinity(0, job.cores)  # devices keep to their shares by their clocks, wherever they compute
    host = Host(number, job)
    while True:
        try:
            asked = parent.recv()
        except EOFError:
            return
        if asked is None:
            host.leave()
            return
        name, arguments = asked
        act: Callable[..., Any] = getattr(host, name)
        try:
            answer = True, act(*arguments)
        except Exception:
            answer = False, traceback.format_exc()
        parent.send(answer)
