"""Servers killed at random moments lose nothing that they acknowledged, by a count of the pushes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.elastic.pusher import PARTITIONS, opened

ROOT = Path(__file__).parents[2]
SAID_S = 60


@pytest.fixture(scope="module")
def pusher() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.elastic.pusher"]
    started = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    yield started
    assert started.stdin is not None
    started.stdin.close()
    assert started.wait(30) == 0


def killed(pusher: subprocess.Popen[str], folder: Path, lease: int, acknowledged: int, moment: Callable[[], object]) -> list[list[int]]:
    """Start a server, wait for so many acknowledgements and then for the moment, and kill it. Returns the leases that each partition has
    acknowledged."""
    assert pusher.stdin is not None and pusher.stdout is not None
    pusher.stdin.write(f"{folder} {lease}\n")
    pid = int(pusher.stdout.readline().split()[1])
    found: list[list[int]] = [[] for _ in PARTITIONS]

    def take(line: str) -> None:
        partition, number = map(int, line.split())
        found[partition].append(number)

    for _ in range(acknowledged):
        take(pusher.stdout.readline())
    moment()
    os.kill(pid, signal.SIGKILL)
    while (line := pusher.stdout.readline()) != "gone\n":
        assert line, "the pusher has ended"
        take(line)
    return found


def snapshot_begins(folder: Path) -> None:
    """Wait until a snapshot is being written."""
    end = time.monotonic() + SAID_S
    while not any(name.endswith(".tmp") for name in os.listdir(folder / "partition-000000")):
        assert time.monotonic() < end, "no snapshot was written"


@pytest.mark.parametrize("during", ["pushes", "snapshots"])
@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.long)])
def test_nothing_acknowledged_is_lost(pusher: subprocess.Popen[str], tmp_path: Path, kills: int, during: str) -> None:
    rng, lease = random.Random(kills), 0
    acknowledged = [set[int]() for _ in PARTITIONS]
    for kill in range(kills):
        folder = tmp_path / "store"
        moment = partial(time.sleep, rng.random() * 0.01) if during == "pushes" else partial(snapshot_begins, folder)
        for own, leases in zip(acknowledged, killed(pusher, folder, lease, rng.randrange(2, 30), moment), strict=True):
            own.update(leases)
        copy = tmp_path / f"{kill}"  # what is checked is not the folder with which the next server goes on
        shutil.copytree(tmp_path / "store", copy)
        store = opened(copy)
        for partition, (state, own) in enumerate(zip(store.state(), acknowledged, strict=True)):
            assert all(number in state.counted for number in own), f"partition {partition} lost a push"
            assert state.version == len(state.counted) <= len(own) + kill + 1, "more than what each kill may have met underway"
            assert torch.equal(state.values, torch.full_like(state.values, state.version)), "pushes counted twice, or not"
        store.close()
        shutil.rmtree(copy)
        lease = max(0, min(map(max, acknowledged)) - 2)  # some are pushed again
    assert min(map(len, acknowledged)) > kills
