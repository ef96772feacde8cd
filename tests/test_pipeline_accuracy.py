"""What ``benchmarks.pipeline_accuracy`` runs, keeps and says, of made-up rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import memory_rates, pipeline_accuracy
from benchmarks.accuracy_report import FOUND, USUAL
from benchmarks.memory_rates import CELLS, MICROBATCHES, prepared
from benchmarks.models import export_model
from benchmarks.pipeline_accuracy import PLANS, UNPIPELINED, Round, by_hand
from soap import api

NAMES = [*(shape.name for shape in PLANS), FOUND, UNPIPELINED, USUAL]
MEASURED = {name: (10 + place) * 10**6 for place, name in enumerate(NAMES)}
ROUND = Round("gpt", "200Mbit/s", 0, {name: time * 102 // 100 for name, time in MEASURED.items()}, MEASURED, "a box", 0.05)


@pytest.mark.long
def test_plans_are_pipelines_of_the_model_on_all_hosts(tmp_path: Path) -> None:
    graph = api.load(export_model(pipeline_accuracy.MODEL, tmp_path), plan_only=True).graph
    topology = api.load_cluster("emulated:4x1@1Gbit/s")
    found = by_hand(graph, topology)
    assert [*found] == NAMES[: len(PLANS)] and 2 * len(PLANS) == 12
    simulator = api.simulator_for(graph, topology, costs="estimate")
    for shape, strategy in zip(PLANS, found.values(), strict=True):
        assert {device for own in strategy.operators.values() for device in own.devices} == {0, 1, 2, 3}
        assert (strategy.microbatches, strategy.schedule) == (shape.microbatches, shape.schedule)
        assert simulator.run(strategy).makespan_ns > 0


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_rates_begin_with_a_legal_strategy_of_the_space(cell: str) -> None:
    """Sixteen devices, and micro-batches of fewer samples."""
    simulator = api.simulator_for(api.load("zoo:gpt:tiny@64", plan_only=True), "p100-4x4", costs="estimate")
    own, space, start = prepared(simulator, cell)
    start.validate(own.graph, own.topology.device_count)
    assert start.microbatches == (MICROBATCHES if cell in memory_rates.UNLIMITED[1:] else 1)
    assert all(space.allows(position, start.operators[op.name]) for position, op in enumerate(own.graph.operators))
