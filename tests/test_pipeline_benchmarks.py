"""Pipelines in benchmarks: by layers, as published rows, and beside torch.distributed.pipelining."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.contenders import curves
from benchmarks.models import export_model
from benchmarks.pipeline_contenders import SCHEDULES, PipelineContest
from soap.measure.iteration import peak_memory
from soap.runtime.comm.launch import launch


def test_a_peak_counts_from_when_it_is_restarted() -> None:
    with peak_memory(torch.device("cpu")) as peak:
        kept, large = torch.zeros(1000), torch.zeros(100_000)
        del large
        peak.restart()
        small = torch.zeros(2000)
        del small
    assert peak.bytes == 4 * 3000 and kept.numel() == 1000


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_both_sides_of_a_contest_train_alike(schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    name = "runtime-gpt-tiny"
    contest = PipelineContest(name, export_model(name, tmp_path), SCHEDULES[schedule].ours, schedule, {}, settled=True, microbatches=4)
    ours, theirs = launch(2, curves, (contest, 3))[1]
    assert len(ours) == 3 and ours[0] > ours[-1]
    assert ours == pytest.approx(theirs, rel=1e-5)
