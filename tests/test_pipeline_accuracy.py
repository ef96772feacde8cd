"""What ``benchmarks.pipeline_accuracy`` runs, keeps and says, of made-up rounds."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import kept, memory_rates, pipeline_accuracy
from benchmarks.accuracy_report import FOUND, USUAL
from benchmarks.memory_rates import CELLS, MICROBATCHES, prepared
from benchmarks.models import export_model
from benchmarks.pipeline_accuracy import PLANS, UNPIPELINED, Round, by_hand, gain_line, page
from soap import api
from soap.errors import SoapError

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


def test_the_page_has_medians_errors_and_the_gain() -> None:
    slower = {name: 2 * time for name, time in MEASURED.items()}
    rounds = [ROUND, replace(ROUND, number=1, measured_ns=slower, predicted_ns=slower), replace(ROUND, number=2)]
    text = page(rounds)
    assert "| 200Mbit/s | gpt | 4 stages, 4 micro-batches, gpipe | 10.2 | 10.0 | +2.0% | 100.0% | 96.1% |" in text
    assert "6 pipelines by layers: median error 2.0% (aim 5%), most 2.0% (aim 15%)" in text
    assert "3 rounds; others used 5% at most." in text
    assert "- 200Mbit/s: found 16.0 ms, best without micro-batches (found without pipelines) 17.0 ms: 1.06 times as fast" in text
    best = {FOUND: 10 * 10**6, UNPIPELINED: 30 * 10**6, USUAL: 20 * 10**6}
    assert f"({USUAL}) 20.0 ms: 2.00 times as fast" in gain_line("1Gbit/s", best)


def test_rounds_are_kept_and_anything_else_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rounds.json"
    kept.write(path, [asdict(ROUND)], pipeline_accuracy.VERSION)
    assert pipeline_accuracy.read(path) == [ROUND]
    kept.write(path, [{**asdict(ROUND), "measured_ns": {FOUND: 1}}], pipeline_accuracy.VERSION)
    with pytest.raises(SoapError, match="'found without pipelines' is a required property; expected a file of benchmarks"):
        pipeline_accuracy.read(path)


@pytest.mark.parametrize("cell", CELLS)
def test_rates_begin_with_a_legal_strategy_of_the_space(cell: str) -> None:
    """Sixteen devices, and micro-batches of fewer samples."""
    simulator = api.simulator_for(api.load("zoo:gpt:tiny@64", plan_only=True), "p100-4x4", costs="estimate")
    own, space, start = prepared(simulator, cell)
    start.validate(own.graph, own.topology.device_count)
    assert start.microbatches == (MICROBATCHES if cell in memory_rates.UNLIMITED[1:] else 1)
    assert all(space.allows(position, start.operators[op.name]) for position, op in enumerate(own.graph.operators))
