"""Workers that cannot be started, or die before their first task: tasks are lost, not the run."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from soap.preprocessing.container import PreprocessError
from soap.preprocessing.inputs import TSV, Unit
from soap.preprocessing.node import Lost
from soap.preprocessing.processes import Processes, _Worker
from soap.preprocessing.spec import PRESETS
from soap.preprocessing.work import INDEX, Task, Work

UNITS = tuple(Unit(i, f"/data/day_{i}", TSV, 10, 0) for i in range(20_000))
"""More than a socket holds, so that a dead worker is met while its work is sent."""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    found = Processes(Work(str(tmp_path), PRESETS["criteo-kaggle"], UNITS))
    yield found
    found.close()


def test_worker_that_dies_before_it_reads_its_work_loses_its_task(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    task = Task(INDEX, 0)
    processes.start(task)
    assert list(processes.wait(10)) == [Lost(task)]
    assert list(processes.processes) == []


def test_no_process_can_be_started(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    busy = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(PreprocessError, match="cannot start a process: resource temporarily unavailable; make room for one"):
        processes.start(Task(INDEX, 0))
    ours, theirs = socket.socketpair()
    with theirs:
        processes._workers.append(_Worker(busy, Connection(ours.detach()), Task(INDEX, 1)))
        processes.start(Task(INDEX, 2))
        assert list(processes.wait(10)) == [Lost(Task(INDEX, 2))], "the other one goes on; with fewer at once this one is done again"
