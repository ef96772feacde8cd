"""Pipelines in benchmarks: by layers, as published rows, and beside torch.distributed.pipelining."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.contenders import curves
from benchmarks.layers import by_layers, layer_chunks
from benchmarks.models import export_model
from benchmarks.pipeline_contenders import SCHEDULES, PipelineContest
from benchmarks.published import strategy_of
from benchmarks.published_models import graph_of
from soap.measure.iteration import peak_memory
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.runtime.comm.launch import launch
from soap.simulator.simulate import Simulator
from soap.strategy.stages import chunks_of, devices_of_stages
from tests.strategies import cluster
from tests.test_published import TINY, made


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    """A small GPT of four layers, for 8 samples."""
    return graph_of({**TINY, "layers": 4}, 8)


@pytest.mark.long
def test_chunks_begin_with_layers(graph: OperatorGraph) -> None:
    chunks = layer_chunks(graph, 2)
    first = next(op.name for op, chunk in zip(graph.operators, chunks, strict=True) if chunk == 1)
    assert first.startswith("blocks.2.") and chunks == sorted(chunks) and chunks[-1] == 1
    assert {*layer_chunks(graph, 4)} == {0, 1, 2, 3}


@pytest.mark.long
def test_a_published_pipeline_has_neighbours_in_its_stages(graph: OperatorGraph) -> None:
    """Tensor parallelism by two, and two stages: all four devices of a stage's host."""
    row, topology = made(strategy="pipeline+recompute", tensor=2, pipeline=2, microbatches=2, batch=8), cluster([4, 4])
    strategy = strategy_of(row, graph, topology)
    assert devices_of_stages(graph, strategy) == (frozenset(range(4)), frozenset(range(4, 8)))
    assert (strategy.microbatches, strategy.schedule) == (2, "1f1b") and any(own.recompute for own in strategy.operators.values())
    assert Simulator(graph, topology, RooflineCosts(topology)).run(strategy).makespan_ns > 0


@pytest.mark.long
def test_interleaved_chunks_go_round(graph: OperatorGraph) -> None:
    strategy = by_layers(graph, cluster([1, 1]), stages=2, microbatches=4, schedule="interleaved:2")
    chunks = chunks_of(graph, strategy.stages)
    own = {chunk: {*strategy.operators[op.name].devices} for op, chunk in zip(graph.operators, chunks, strict=True)}
    assert own == {0: {0}, 1: {1}, 2: {0}, 3: {1}}


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
