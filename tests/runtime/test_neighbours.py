"""Busy processes beside the one that measures: they work until they are no longer wanted, and none outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from soap.errors import RuntimeFailure
from soap.measure.neighbours import Neighbours
from soap.tracing.load import load_model

MODEL = "zoo:rnnlm:tiny"
ROOT = Path(__file__).resolve().parents[2]


def neighbours(count: int = 1, model: str = MODEL, **options: str) -> Neighbours:
    degrees = [[1] * len(op.factors) for op in load_model(MODEL, plan_only=True).graph.operators]
    return Neighbours(count, model, {}, degrees, 1, **options)


def spent_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_they_work_until_the_end() -> None:
    with neighbours(2) as beside:
        pids = [process.pid for process in beside._processes]
        assert len(set(pids)) == 2
        before = [spent_s(pid) for pid in pids]
        stop = time.monotonic() + 60
        while any(spent_s(pid) < start + 0.2 for pid, start in zip(pids, before, strict=True)):
            assert time.monotonic() < stop, "a neighbour does nothing"
            time.sleep(0.05)
        beside.check()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_none_are_none() -> None:
    with neighbours(0) as beside:
        beside.check()


@pytest.mark.slow
def test_one_that_cannot_start_is_one_line() -> None:
    with pytest.raises(RuntimeFailure, match=r"could not be started: .*nosuch") as error, neighbours(model="nosuch.pt2"):
        pass
    assert "\n" not in str(error.value)


@pytest.mark.long
def test_one_that_ends_is_noticed() -> None:
    with neighbours() as beside:
        beside._processes[0].kill()
        beside._processes[0].wait()
        with pytest.raises(RuntimeFailure, match="has ended"):
            beside.check()


PARENT = """
import sys, time
from tests.runtime.test_neighbours import neighbours
with neighbours() as beside:
    print(beside._processes[0].pid, flush=True)
    time.sleep(1000)
"""


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.slow
def test_none_outlives_a_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        pid = int(parent.stdout.readline())
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.communicate()
    stop = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and "zombie" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < stop, "a neighbour outlives its parent"
        time.sleep(0.05)
