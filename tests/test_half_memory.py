"""What ``benchmarks.half_memory`` takes, keeps and says: of a small model, and of made-up cells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import half_memory
from benchmarks.accuracy_report import FOUND
from benchmarks.half_memory import Cell, Run
from soap import api
from soap.cluster.memory_budget import with_memory_budget
from soap.search.options import SearchOptions

MS, MIB = 10**6, 2**20
RUNS = (
    Run(FOUND, 95 * MS, 100 * MS, (98.0 * MS, 102.0 * MS), 9 * MIB, 8 * MIB),
    Run("fsdp", 150 * MS, 130 * MS, (130.0 * MS, 130.0 * MS), 6 * MIB, 6 * MIB),
    Run("zero1", 120 * MS, 110 * MS, (107.8 * MS, 112.2 * MS), 10 * MIB, 10 * MIB),
)
CELL = Cell("emulated-gpt", 20 * MIB, 10 * MIB, RUNS, 0.02, "a box")


def test_a_conclusion_says_whether_the_found_plan_is_the_best_and_fits() -> None:
    said = half_memory.conclusion(CELL)
    assert "10.0 MiB of 20.0 MiB: the found plan is the measured best of 3 that fit: " in said
    assert "that fit: zero1 takes 1.100 times as long (1.10 to 1.10 by rounds)." in said
    assert "2 of 3 predictions are within 10%; none held more than the limit. Others used 2% of the cores." in said
    worse = replace(CELL, plans=(replace(RUNS[0], measured_ns=143 * MS, measured_bytes=11 * MIB), *RUNS[1:]), others_share=0.4)
    said = half_memory.conclusion(worse)
    assert "is not the measured best of 3 that fit: zero1 takes 0.769 times as long" in said
    assert "1 of 3 held more than the limit" in said and "40% of the cores (too much" in said


@pytest.mark.long  # it searches
def test_contenders_fit_and_differ() -> None:
    """With half of what data parallelism needs it is none of them, and nothing that needs more is."""
    graph = api.load("zoo:gpt:tiny", plan_only=True).graph
    simulator = api.simulator_for(graph, half_memory.CLUSTER, costs="estimate")
    needed = max(simulator.run(api.classical("data_parallel", graph, simulator.topology)).peak_bytes)
    options = SearchOptions(budget=50, memory_budget=f"{needed // 2} B", costs="estimate", risk=None)
    outcome = api.find(graph, half_memory.CLUSTER, options, polish=False)
    tight = api.simulator_for(graph, with_memory_budget(simulator.topology, options.memory_budget), costs="estimate")
    found = half_memory.contenders(tight, outcome, 6)
    assert next(iter(found)) == FOUND and 1 < len(found) <= max(6, 1 + len(half_memory.ALWAYS))
    assert "data_parallel" not in found and len({*map(repr, found.values())}) == len(found)
    assert all(tight.overflow_bytes(strategy) == 0 for strategy in found.values())
    assert all(max(tight.run(strategy).peak_bytes) <= needed // 2 for strategy in found.values())
