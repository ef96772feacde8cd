"""Plans that are too large for a list of tasks: their times and their memory are those of such a list."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from soap import api
from soap.api import large_plans
from soap.api.large_plans import large_prediction
from soap.cli import simulate
from soap.schedules.named import parse
from soap.simulator import steady
from soap.simulator.folded import FoldedSimulation
from soap.simulator.simulate import Simulator
from soap.simulator.steady import OFF_LINE, Played, on_line
from soap.strategy.config import Strategy
from soap.strategy.megatron import staged
from soap.strategy.named import named
from soap.strategy.stages import stages_of
from tests.graph_builder import transformer

NAME = "megatron:2x2+microbatches:2"


@pytest.mark.parametrize("sharing", ["", "+zero1", "+fsdp"])
def test_time_and_memory_are_those_of_two_copies(monkeypatch: pytest.MonkeyPatch, sharing: str) -> None:
    graph, topology = transformer(batch=12), api.load_cluster("h100-6x2")
    simulator = api.simulator_for(graph, topology, costs="estimate")
    strategy = named(f"megatron:2x2{sharing}+microbatches:2", graph, topology)
    assert large_prediction(simulator, strategy) is None  # it is small
    monkeypatch.setattr(large_plans, "MOST_PLANNED_TILES", 0)
    found, folded = large_prediction(simulator, strategy), simulator.run_folded(strategy, nearly=True)
    whole = simulator.run(strategy)
    assert found is not None and found.copies == 3 and isinstance(folded, FoldedSimulation)
    assert found.makespan_ns == folded.makespan_ns >= whole.makespan_ns
    assert not folded.folding.exact or folded.makespan_ns == whole.makespan_ns
    assert found.peak_bytes == max(folded.peak_bytes) >= max(whole.peak_bytes)


def test_command_tells_time_and_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(large_plans, "MOST_PLANNED_TILES", 0)
    asked = ["zoo:gpt:tiny", "--cluster", "h100-4x4", "--builtin", NAME, "--costs", "estimate"]
    assert simulate.main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] and told["folded"]["copies"] == 4 and told["predicted_ns"] > 0
    assert simulate.main(asked) == 0
    assert "4 copies of the model do the same: two were simulated" in capsys.readouterr().out
    assert simulate.main([*asked, "--explain"]) == 2
    assert "expected one of fewer micro-batches or devices" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["megatron:4x3+microbatches:2", "megatron:2x2+recompute+microbatches:2"])
def test_a_plan_of_no_equal_copies_is_played_whole(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    graph, topology = transformer(batch=12), api.load_cluster("h100-6x2")
    simulator = api.simulator_for(graph, topology, costs="estimate")
    monkeypatch.setattr(large_plans, "MOST_PLANNED_TILES", 0)
    monkeypatch.setattr(simulator, "folding", lambda *given, **named: "no copies")
    strategy = named(name, graph, topology)
    found, whole = large_prediction(simulator, strategy), simulator.run(strategy)
    assert found is not None and (found.copies, found.makespan_ns) == (1, whole.makespan_ns)
    assert found.peak_bytes == max(whole.peak_bytes) and found.fits and whole.fits
    assert large_prediction(simulator, strategy, whole=False) is None


def test_command_says_that_a_whole_plan_is_told_in_brief(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(large_plans, "MOST_PLANNED_TILES", 0)
    asked = ["zoo:gpt:tiny", "--cluster", "h100-4", "--builtin", "megatron:2x2+microbatches:2", "--costs", "estimate"]
    assert simulate.main(asked) == 0
    assert "tiles: time and memory alone; with --explain or --timeline all of it" in capsys.readouterr().out
    assert simulate.main([*asked, "--explain"]) == 0
    assert "time and memory alone" not in capsys.readouterr().out


SCHEDULES = [("accumulation", 36), ("1f1b", 36), ("gpipe", 36), ("zb-h1", 48), ("interleaved:2", 121)]


@pytest.mark.parametrize(("schedule", "count"), SCHEDULES)
def test_many_micro_batches_follow_from_three_numbers_of_few(monkeypatch: pytest.MonkeyPatch, schedule: str, count: int) -> None:
    graph, topology = transformer(batch=2 * count, layers=4), api.load_cluster("h100-2x2")
    simulator = api.simulator_for(graph, topology, costs="estimate")
    monkeypatch.setattr(large_plans, "MOST_PLANNED_TILES", 0)
    chunks = [position * 2 * parse(schedule).chunks // len(graph.operators) for position in range(len(graph.operators))]
    made = staged(graph, topology, [chunk % 2 for chunk in chunks], [(0, 1), (2, 3)], microbatches=count)
    strategy = replace(made, microbatches=count, stages=stages_of(graph, chunks), schedule=schedule)
    found, whole = large_prediction(simulator, strategy), simulator.run(strategy)
    assert found is not None and 0 < found.microbatches < count / 2
    assert abs(found.makespan_ns / whole.makespan_ns - 1) < OFF_LINE
    assert abs(found.peak_bytes / max(whole.peak_bytes) - 1) < 2e-3  # once by ZB-H1 something is held a little longer


def test_few_micro_batches_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, topology = transformer(batch=32), api.load_cluster("h100-2x2")
    simulator = api.simulator_for(graph, topology, costs="estimate")
    monkeypatch.setattr(large_plans, "MOST_PLANNED_TILES", 0)
    strategy = named("data_parallel+microbatches:8", graph, topology)
    found = large_prediction(simulator, strategy)
    assert found is not None and (found.microbatches, found.makespan_ns) == (0, simulator.run(strategy).makespan_ns)


@pytest.mark.parametrize(("turns", "at_most"), [((0, 1), 30), ((0, 3, 1), 80), ((0, 3, 1, 4, 2, 5), 80)])
def test_devices_that_take_turns_are_found_out(monkeypatch: pytest.MonkeyPatch, turns: tuple[int, ...], at_most: int) -> None:
    """Each micro-batch takes a millisecond, and the end of the last one some tenths more, in turns."""
    graph, topology = transformer(batch=1024, layers=1), api.load_cluster("h100-2")
    strategy = named("data_parallel+microbatches:512", graph, topology)

    def made(simulator: Simulator, strategy: Strategy, draws: object = None) -> Played:
        count = strategy.microbatches
        return Played(1_000_000 * count + 100_000 * turns[count % len(turns)], (count, count), 0, 1, count)

    monkeypatch.setattr(steady, "played", made)
    found = steady.steadily_played(api.simulator_for(graph, topology, costs="estimate"), strategy, tiles=0)
    expected = 512_000_000 + 100_000 * turns[512 % len(turns)]
    assert found is not None and found.microbatches <= at_most and abs(found.makespan_ns / expected - 1) < OFF_LINE


@pytest.mark.parametrize(("three", "expected"), [((100, 110, 120), 210), ((100, 110, 119), None), ((100_000, 110_000, 120_001), 210_011)])
def test_figures_on_a_line(three: tuple[int, int, int], expected: int | None) -> None:
    """The steeper of the two steps counts."""
    assert on_line(three, 11) == expected
