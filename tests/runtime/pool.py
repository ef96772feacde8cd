"""A few gloo processes that stay alive and run one function after another: starting them costs seconds, a case milliseconds."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_S = 60


class RankError(AssertionError):
    """A case failed in a rank; the message is its traceback."""


class Pool:
    """``run(function, *args)`` calls it on every rank and returns the results in rank order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        results, errors = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT_S if not errors else 1):
                errors.append(f"rank {rank} gave no answer")
                continue
            try:
                ok, value = pipe.recv()
            except EOFError:
                ok, value = False, f"rank {rank} died"
            (results if ok else errors).append(value)
        if errors:
            self.close()  # the others may wait for the one that failed
            raise RankError("\n".join(errors))
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = mp.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S / 2)
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args)))
        except Exception:
            pipe.send((False, f"rank {rank}: {traceback.format_exc()}"))
