"""Tasks in processes of this machine. A process that is killed loses its task, which is then done again, and nothing else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import escape
from multiprocessing.connection import Connection, wait
from pathlib import Path

from soap.files import reason
from soap.preprocessing.container import PreprocessError, owner
from soap.preprocessing.manager import private_bytes
from soap.preprocessing.node import Lost
from soap.preprocessing.work import Done, Task, Work

THREADS = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "ARROW_IO_THREADS")}
"""A worker has one core."""
MEMORY = {"MALLOC_TRIM_THRESHOLD_": "1048576", "MALLOC_MMAP_THRESHOLD_": "1048576", "ARROW_DEFAULT_MEMORY_POOL": "system"}
"""What a task needed goes back to the system when it ends."""


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    task: Task | None = None
    begun: int = 0


class Processes:
    """Does tasks in worker processes, started when they are first needed."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._workers: list[_Worker] = []
        self._count = 0
        self._lost: list[Lost] = []
        self._closed = False

    @property
    def processes(self) -> Sequence[int]:
        """Ids of all workers."""
        return [worker.process.pid for worker in self._workers]

    def used_bytes(self) -> int:
        """Memory of all workers."""
        return sum(map(private_bytes, self.processes))

    def start(self, task: Task) -> None:
        """Give a task to an idle worker, or to a new one. PreprocessError if there is none, and none can be started."""
        worker = next((worker for worker in self._workers if worker.task is None), None)
        messages: list[Work | Task] = [task]
        if worker is None:
            try:
                worker, messages = self._new(), [self._work, task]
            except OSError as cause:  # no memory, or no more processes allowed: with fewer at once it goes on
                if not self._workers:
                    raise PreprocessError(f"cannot start a process: {reason(cause)}; make room for one, and start again") from None
                self._lost.append(Lost(task))
                return
        worker.task, worker.begun = task, self._count
        self._count += 1
        try:
            for message in messages:
                worker.connection.send(message)
        except OSError:
            self._drop(worker)

    def wait(self, limit_s: float) -> Sequence[Done | Lost]:
        """What has ended. PreprocessError if a task failed."""
        found: list[Done | Lost] = [*self._lost]
        self._lost.clear()
        busy = {worker.connection: worker for worker in self._workers if worker.task is not None}
        for connection in wait(list(busy), 0 if found else limit_s):
            worker = busy[connection]  # type: ignore[index]
            try:
                kind, value = worker.connection.recv()
            except (EOFError, OSError):
                self._drop(worker)
                continue
            if kind == "ready":
                continue
            task, worker.task = worker.task, None
            if kind == "done":
                found.append(value)
            elif kind == "lost":
                assert task is not None
                found.append(Lost(task))
            else:
                raise PreprocessError(value)
        found += self._lost
        self._lost.clear()
        return found

    def take_back(self) -> Task | None:
        """Kill the worker whose task is the youngest."""
        busy = [worker for worker in self._workers if worker.task is not None]
        if not busy:
            return None
        worker = max(busy, key=lambda worker: worker.begun)
        task, worker.task = worker.task, None
        self._end(worker)
        return task

    def close(self) -> None:
        """End all workers. A thread that runs their node meanwhile starts no new ones."""
        self._closed = True
        for worker in list(self._workers):
            self._end(worker)

    def _new(self) -> _Worker:
        if self._closed:
            raise PreprocessError("the run was ended")
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, **THREADS, **MEMORY, "PYTHONPATH": path}
        command = [sys.executable, "-m", "soap.preprocessing.worker", str(theirs.fileno())]
        with theirs:
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
        worker = _Worker(process, Connection(ours.detach()))
        self._workers.append(worker)
        return worker

    def _drop(self, worker: _Worker) -> None:
        """A worker was killed."""
        if worker.task is not None:
            self._lost.append(Lost(worker.task))
        self._end(worker)

    def _end(self, worker: _Worker) -> None:
        if worker not in self._workers:  # ended by another thread, by ``close``
            return
        self._workers.remove(worker)
        worker.process.kill()
        worker.process.wait()
        with suppress(OSError):
            worker.connection.close()
        for left in self._work.path.glob(f"**/.*.{escape(owner(worker.process.pid))}.tmp"):
            left.unlink(missing_ok=True)
