from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.search.explanation import Line, explain, explain_unkept
from soap.simulator.analysis.attribution import Activity
from soap.simulator.analysis.timeline import busy_time_ns, critical_path_ns
from soap.simulator.simulate import Simulator
from soap.simulator.tasks import TaskKind
from soap.strategy.classical import CLASSICAL, random_strategy
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.marks import OFFLOADED, with_each_mark
from soap.strategy.offloading import offloadable
from soap.strategy.recomputation import RECOMPUTED, STAYS, run_levels, runs_of
from tests.extent import FEW
from tests.graph_builder import mlp, transformer
from tests.simulator.examples import PointCosts
from tests.strategies import cluster

FOUR = cluster([2, 2])
GRAPH = transformer(batch=4, layers=2)
SIMULATOR = Simulator(GRAPH, FOUR, PointCosts())
USUAL = CLASSICAL["data_parallel"](GRAPH, FOUR)


def explained(strategy: Strategy) -> list[Line]:
    return explain(GRAPH, SIMULATOR.run(strategy), SIMULATOR.run(USUAL), (strategy, USUAL), SIMULATOR)


@pytest.mark.slow
@given(st.integers(0, 99))
@FEW
def test_figures_are_the_simulator_s(seed: int) -> None:
    strategy = random_strategy(GRAPH, FOUR, random.Random(seed))
    simulation, lines = SIMULATOR.run(strategy), explained(strategy)
    assert sorted(name for line in lines for name in line.operators) == sorted(op.name for op in GRAPH.operators)
    for line in lines:
        assert {strategy.operators[name] for name in line.operators} == {line.config}
        assert {USUAL.operators[name] for name in line.operators} == {line.usual}
        back = {name: line.usual for name in line.operators}
        assert line.back_ns == SIMULATOR.makespan_ns(strategy.with_changes(back))
        for name in line.operators:
            assert line.back_alone_ns[name] == SIMULATOR.makespan_ns(strategy.with_operator(name, line.usual))
    path = Counter[Activity]()
    for line in lines:
        for (kind, _), duration in line.binding.path_ns.items():
            path[kind] += duration
    assert sum(path.values()) == pytest.approx(simulation.makespan_ns, abs=4 * len(lines))  # of rounding
    on_path = critical_path_ns(simulation.tasks, simulation.schedule)
    assert path[Activity.COMPUTATION] == on_path.get(TaskKind.FORWARD, 0) + on_path.get(TaskKind.BACKWARD, 0)
    busy = busy_time_ns(simulation.tasks)
    for line in lines:
        assert all(duration <= busy[where] + 1 for (_, where), duration in line.binding.path_ns.items())
        assert line.binding.slack_ns >= 0


def test_costs_are_of_the_busiest_device() -> None:
    graph = mlp()
    simulator = Simulator(graph, FOUR, PointCosts())
    usual = CLASSICAL["data_parallel"](graph, FOUR)
    strategy = usual.with_operator("fc0", OpConfig((1, 1, 1), (2,)))
    simulation = simulator.run(strategy)
    (line,) = [own for own in explain(graph, simulation, simulator.run(usual), (strategy, usual), simulator) if own.operators == ("fc0",)]
    own = [task for task in simulation.tasks.tasks if task.name in ("forward fc0[0]", "backward fc0[0]")]
    assert line.costs[Activity.COMPUTATION] == sum(task.duration_ns for task in own)
    assert line.usual_costs[Activity.COMPUTATION] < line.costs[Activity.COMPUTATION]  # a quarter of the work, on each
    assert line.costs[Activity.COMMUNICATION] == line.usual_costs[Activity.COMMUNICATION] == 0  # its input is the model's
    assert line.back_ns == simulator.makespan_ns(usual)


def test_repeated_layers_are_one_line_if_configured_alike() -> None:
    strategy = USUAL.with_operator("1.fc1", OpConfig((1, 1, 1, 1), (0,)))
    lines = {line.operators for line in explained(strategy)}
    assert ("0.fc2", "1.fc2") in lines
    assert ("0.fc1",) in lines and ("1.fc1",) in lines


def test_data_parallelism_set_back_is_itself() -> None:
    for line in explained(USUAL):
        assert line.back_ns == SIMULATOR.makespan_ns(USUAL)
        assert line.costs == line.usual_costs


def test_what_keeping_all_would_be_run_by_run() -> None:
    """Equal runs of repeated layers are one line if they have equal marks; marked operators outside of runs are lines of their own."""
    first = run_levels(GRAPH, RECOMPUTED)[0]
    marked_so_far = {*first, *(name for run in runs_of(GRAPH) for name in run)}
    alone = next(op.name for op in GRAPH.operators if op.name in offloadable(GRAPH) and op.name not in marked_so_far)
    strategy = with_each_mark(USUAL, {**first, alone: OFFLOADED})
    lines = explain_unkept(GRAPH, strategy, SIMULATOR)
    assert [line.marks for line in lines] == [dict(first), {alone: OFFLOADED}] and [line.runs for line in lines] == [1, 1]
    for line in lines:
        kept = with_each_mark(strategy, dict.fromkeys(line.marks, STAYS))
        assert (line.kept_ns, line.kept_overflow_bytes) == SIMULATOR.cost(kept)
    assert lines[0].kept_ns < SIMULATOR.makespan_ns(strategy)
    deep = transformer(batch=4, layers=4)
    marked = with_each_mark(CLASSICAL["data_parallel"](deep, FOUR), {name: RECOMPUTED for run in runs_of(deep) for name in run})
    every = explain_unkept(deep, marked, Simulator(deep, FOUR, PointCosts()))
    assert [line.runs for line in every] == [1, 2, 1, 1] and sum(len(line.marks) for line in every) == sum(map(len, runs_of(deep)))
    assert explain_unkept(GRAPH, USUAL, SIMULATOR) == []
