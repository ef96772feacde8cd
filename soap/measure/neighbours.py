"""Processes that keep the other cores busy while one is measured, with the same kind of work: tiles of the same model.

Cores of one machine are not independent: hardware threads share execution units, all cores share caches and memory. A process among N
that all train is slower than one alone, and how much depends on what the others do. So they run the model's tiles meanwhile.

They are plain Python processes that read their job from standard input, and end when it is closed or their parent is gone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import cycle
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

from soap.errors import RuntimeFailure

BOOTSTRAP = "import sys; sys.path.append(sys.argv.pop(1)); from soap.measure.neighbours import main; main()"
START_S = 180.0
"""Seconds to start Python with torch and load the model on a busy machine."""
READY = "ready"


class Neighbours:
    """So many busy processes, from entering the context until leaving it. RuntimeFailure if they cannot be started. ``model``,
    ``reading``: arguments of ``tracing.load.load_model``. ``degrees``: of each operator, how its tiles are cut."""

    def __init__(
        self, count: int, model: str, reading: Mapping[str, Any], degrees: Sequence[Sequence[int]], threads: int, command: str = BOOTSTRAP
    ) -> None:
        self._count, self._threads, self._command = count, threads, command
        self._job = json.dumps({"model": model, "reading": dict(reading), "degrees": [list(own) for own in degrees], "threads": threads})
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Neighbours:
        try:
            for _ in range(self._count):
                self._processes.append(self._start())
            stop = time.monotonic() + START_S
            for process in self._processes:
                self._await(process, stop)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()
        self._processes = []

    def check(self) -> None:
        """RuntimeFailure if one of them has ended by itself: then measurements since are not what they should be."""
        for process in self._processes:
            if process.poll() is not None:
                raise RuntimeFailure(f"a process that was to keep a core busy has ended with code {process.returncode}; measure again")

    def _start(self) -> subprocess.Popen[str]:
        root = str(Path(__file__).resolve().parents[2])
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", self._command, root], env=environment, text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        except OSError as cause:
            raise RuntimeFailure(f"cannot start a process to keep a core busy: {cause}") from None
        assert process.stdin is not None
        with suppress(OSError):  # it has ended already, and its error says why
            process.stdin.write(self._job + "\n")
            process.stdin.flush()
        return process

    def _await(self, process: subprocess.Popen[str], stop: float) -> None:
        lines: list[str] = []
        assert process.stdout is not None
        reader = threading.Thread(target=lambda: lines.append(process.stdout.readline()), daemon=True)  # type: ignore[union-attr]
        reader.start()
        reader.join(max(0.1, stop - time.monotonic()))
        if lines and lines[0].strip() == READY:
            return
        late = process.poll() is None and not lines
        process.kill()
        errors = "" if late else process.communicate()[1]
        reason = f"not ready after {START_S:g} s" if late else (errors.strip().splitlines() or ["no reason given"])[-1]
        reason = reason.partition(": ")[2] if reason.startswith("soap.errors.") else reason
        raise RuntimeFailure(f"a process to keep a core busy could not be started: {reason}")


def main() -> None:
    """Read a job, confirm it, and run tiles until the parent has gone."""
    import torch

    from soap.measure.tile_timing import TileTimer
    from soap.plan.tiling import tiles_of
    from soap.runtime.system.process import keep_freed_memory
    from soap.strategy.config import OpConfig
    from soap.tracing.load import load_model

    job = json.loads(sys.stdin.readline())
    _end_with_parent()
    torch.set_num_threads(job["threads"])
    keep_freed_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        timer = TileTimer(load_model(job["model"], **job["reading"]), torch.device("cpu"), job["threads"])
    tiles = []
    for position, degrees in enumerate(job["degrees"]):
        tiles.append(tiles_of(timer.graph, position, OpConfig(tuple(degrees), (0,) * prod(degrees)))[0])
    print(READY, flush=True)
    for tile in cycle(tiles):
        timer.exercise(tile)


def _end_with_parent() -> None:
    def wait() -> None:
        sys.stdin.read()  # until the other end is closed, however the parent ended
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
