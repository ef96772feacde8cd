"""A few gloo processes that stay alive and run one function after another: starting them costs seconds, a case milliseconds.

Whatever happens, a run ends in bounded time, a failing rank's traceback is in the error, and no process outlives its parent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from soap.runtime.comm.rank_processes import end_with_launcher
from tests.kept_models import COLLECTED, keep_zoo_models

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0
START_TIMEOUT_S = 120.0
"""Importing torch on a loaded machine."""
GRACE_S = 1.0
"""How long the other ranks may still answer after one has failed: most wait for it, and would do so in vain."""


class RankError(AssertionError):
    """A case failed in a rank; the message is its traceback, in the order of failure if there are several."""


class Job(NamedTuple):
    """``function(*args)`` in a world of so many ranks; worlds of different numbers share nothing."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    size: int
    world: int


class Pool:
    """``run(function, *args)`` calls it on every rank and returns the results in rank order."""

    def __init__(self, size: int, timeout_s: float = TIMEOUT_S) -> None:
        self.size, self.timeout_s = size, timeout_s
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: dist.TCPStore | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._world, self._world_size = 0, 0

    def run(self, function: Callable[..., Any], *args: Any, ranks: int | None = None) -> list[Any]:
        """On the first ``ranks`` processes, which are then all of the world; on all of them if None."""
        size = self.size if ranks is None else ranks
        try:
            if not self._processes:
                self._start()
            if size != self._world_size:
                self._world, self._world_size = self._world + 1, size
            for pipe in self._pipes[:size]:
                pipe.send(Job(function, args, size, self._world))
            return self._collect(size, self.timeout_s)
        except BaseException:  # a test's own time limit as well
            self.close()  # what the other ranks are in the middle of cannot be ended otherwise
            raise

    def close(self) -> None:
        """End the ranks, in whatever state they are."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._store, self._folder = [], [], None, None
        self._world_size = 0

    def _collect(self, size: int, timeout_s: float) -> list[Any]:
        """The results in rank order. All ranks are waited for at once, so that the first failure is seen at once."""
        results: dict[int, Any] = {}
        errors: list[str] = []
        left = dict(enumerate(self._pipes[:size]))
        deadline = time.monotonic() + timeout_s
        while left:
            answered = wait(list(left.values()), timeout=max(0.0, deadline - time.monotonic()))
            if not answered:
                break
            for rank in [rank for rank, pipe in left.items() if pipe in answered]:
                ok, value = self._answer(rank, left.pop(rank))
                if ok:
                    results[rank] = value
                else:
                    errors.append(value)
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        expired = f"gave no answer in {timeout_s:g} s" if not errors else f"gave no answer {GRACE_S:g} s after that"
        errors += [f"rank {rank} {expired}; it stands at\n{self._position(rank)}" for rank in left]
        if errors:
            raise RankError("\n".join(errors))
        return [results[rank] for rank in range(size)]

    def _answer(self, rank: int, pipe: Connection) -> tuple[bool, Any]:
        try:
            ok, value = pipe.recv()
            return bool(ok), value
        except EOFError:
            self._processes[rank].join(GRACE_S)
            code = self._processes[rank].exitcode
            return False, f"rank {rank} died of {signal.Signals(-code).name}" if code and code < 0 else f"rank {rank} exited with {code}"

    def _position(self, rank: int) -> str:
        """The stacks of a rank that does not answer; it writes them on a signal, even while it waits in a collective."""
        assert self._folder is not None
        path = Path(self._folder.name, str(rank))
        if not path.exists():
            return "(still starting)"
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        text, before, end = "", None, time.monotonic() + 10 * GRACE_S
        while (not text or text != before) and time.monotonic() < end:  # it writes line by line
            time.sleep(0.1)
            text, before = path.read_text(), text
        return text.rstrip() or "(unknown: it reacts to no signal)"

    def _start(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="soap-pool-")
        for rank in range(self.size):
            context = mp.get_context("spawn") if rank == 0 else _forks()
            ours, theirs = context.Pipe()
            args = (rank, self._store.port, self.timeout_s, theirs, os.path.join(self._folder.name, str(rank)))
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._collect(self.size, START_TIMEOUT_S)


class FirstOf(Pool):
    """The first ranks of a pool, as one of their own: a process more is only started where one is needed."""

    def __init__(self, pool: Pool, size: int) -> None:
        super().__init__(size)
        self._pool = pool

    def run(self, function: Callable[..., Any], *args: Any, ranks: int | None = None) -> list[Any]:
        """As ``Pool.run``."""
        return self._pool.run(function, *args, ranks=self.size if ranks is None else ranks)


def _forks() -> Any:
    """Starts processes that have imported what ranks need, which takes each of them five seconds of a core otherwise. Rank 0 does so by
    itself: it hashes texts in another way than the others, so that what depends on the order of a set is seen."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["hypothesis", __name__, "tests.runtime.traced"])
    with contextlib.chdir(ROOT):  # where the server finds them
        forkserver.ensure_running()
    return context


def _serve(rank: int, port: int, timeout_s: float, pipe: Connection, stacks: str) -> None:
    end_with_launcher()
    os.chdir(ROOT)  # a test may have been in a folder of its own when ``multiprocessing``, which goes there, was imported
    torch.set_num_threads(1)
    gc.freeze()  # what has been imported stays
    gc.set_threshold(*COLLECTED)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout_s))
    world = 0
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        pipe.send((True, None))
        while True:
            try:
                job: Job = pipe.recv()
            except EOFError:
                return
            try:
                if job.world != world:
                    _join(store, rank, job, timeout_s / 2)  # so that a rank left alone tells where it waits
                    world = job.world
                keep_zoo_models()  # pickled functions have imported what they need
                pipe.send((True, job.function(*job.args)))
            except Exception:
                pipe.send((False, f"rank {rank}: {traceback.format_exc()}"))


def _join(store: dist.Store, rank: int, job: Job, timeout_s: float) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.size), LOCAL_RANK=str(rank), TORCHELASTIC_RUN_ID="pool", GLOO_SOCKET_IFNAME="lo")
    own = dist.PrefixStore(f"world{job.world}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=job.size, timeout=timedelta(seconds=timeout_s))
