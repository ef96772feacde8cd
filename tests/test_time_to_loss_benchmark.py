"""What ``benchmarks.time_to_loss`` works out, keeps and says, of made-up cells; what it trains beside what it times."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import soap
from benchmarks import kept, time_to_loss, time_to_loss_page
from benchmarks.convergence_page import WINDOW
from benchmarks.convergence_tasks import TASKS, Data
from benchmarks.models import export_model
from benchmarks.time_to_loss import Cell, Known, chosen_for, losses_of
from benchmarks.time_to_loss_race import NET
from soap.errors import SoapError
from soap.strategy.sync import compressed
from tests.strategies import CPU, cluster

STEPS = {"dense": [90, 100, 110], "bf16": [100, 100, 120], "rgc": [130, None, 140]}
TIMES = {name: [ms * 10**6 for ms in own] for name, own in {"dense": [99, 100, 105], "bf16": [50], "rgc": [20], "DDP": [80]}.items()}
RUN = {"method": "bf16", "steps": 101, "seconds": 5.25, "apart": 1e-6}
CELL = Cell("lstm", "50Mbit/s", 500, 1.5, STEPS, TIMES, [RUN], "a box", 0.05)


def test_time_is_steps_times_a_steps_time() -> None:
    assert [time_to_loss_page.seconds(CELL, name) for name in ("dense", "bf16", "rgc")] == [10.0, 5.0, None]
    rows = [[own.strip() for own in line.strip("|").split("|")] for line in time_to_loss_page.lines(CELL)]
    assert rows == [
        ["lstm", "50Mbit/s", "dense", "100", "100.0", "10.0", "1.00", "0.80"],
        ["lstm", "50Mbit/s", "bf16", "100", "50.0", "5.0", "2.00", "1.60"],
        ["lstm", "50Mbit/s", "rgc", "not in 500", "20.0", "", "", ""],
        ["lstm", "50Mbit/s", "DDP", "100", "80.0", "8.0", "1.25", "1.00"],
    ]
    text = " ".join(time_to_loss_page.page([CELL, replace(CELL, rate="1Gbit/s", whole=[])]).split())
    assert text.index("| lstm | 50Mbit/s") < text.index("| lstm | 1Gbit/s")
    assert "101 steps in 5.2 s by the wall clock; 100 steps times the step's time are 5.0 s. All its losses are within 1.0e-06" in text
    assert "Other programs" not in text
    busy = time_to_loss_page.page([replace(CELL, others_share=0.42)])
    assert "so steps are too long: lstm at 50Mbit/s: 42%." in busy
    assert "From beginning to end" not in time_to_loss_page.page([replace(CELL, whole=[])])


def test_steps_are_counted_to_the_dense_runs_last_loss() -> None:
    falling = [float(100 - step) for step in range(60)]
    known = Known({"dense": [falling, falling], "slow": [[100 - step / 2 for step in range(60)], falling]})
    assert known.aim == pytest.approx(sum(falling[-WINDOW:]) / WINDOW)
    assert known.steps == {"dense": [60, 60], "slow": [None, 60]}


def test_cells_are_kept_and_anything_else_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "cells.json"
    assert time_to_loss.read(None) == time_to_loss.read(path) == []
    kept.write(path, [asdict(CELL)], time_to_loss.VERSION)
    assert time_to_loss.read(path) == [CELL]
    kept.write(path, [{**asdict(CELL), "times_ns": {"bf16": [1]}}], time_to_loss.VERSION)
    with pytest.raises(SoapError, match=r"cells/0/times_ns: 'dense' is a required property; expected a file of benchmarks.time_to_loss"):
        time_to_loss.read(path)


def digits() -> Data:
    """As many made-up digits as two batches."""
    generator = torch.Generator().manual_seed(0)
    images, wanted = torch.rand(32, 1, 8, 8, generator=generator), torch.randint(10, (32,), generator=generator)
    return Data((images, wanted), (images, wanted))


@pytest.mark.slow
def test_what_is_timed_is_what_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exported model has the net's parameters, and all that the emulation compresses can be compressed in a plan."""
    monkeypatch.setitem(TASKS, "digits", replace(TASKS["digits"], data=digits))
    for name in ("digits", "lstm"):
        graph = soap.load(export_model(f"task-{name}", tmp_path), plan_only=True).graph
        chosen = {NET + own for own in chosen_for(TASKS[name], "rgc:0.01")}
        dense = {tensor.name for tensor in graph.parameters if tensor.name not in graph.sparse}
        assert chosen and chosen <= dense
        strategy = soap.api.classical("data_parallel", graph, cluster([1] * 4, CPU))
        syncs = {NET + own: compressed(how) for own, how in chosen_for(TASKS[name], "rgc:0.01").items()}
        strategy.with_changes(parameters=syncs).validate(graph, 4)
    assert chosen_for(TASKS["lstm"], "dense") == {}
    losses = losses_of("digits", "rgc:0.01", 0, 3)
    assert len(losses) == 3 and losses == losses_of("digits", "rgc:0.01", 0, 3) != losses_of("digits", "rgc:0.01", 1, 3)
