"""Strategies that are run in turns are told apart, and found again."""

from __future__ import annotations

from benchmarks.turns import in_turns, turns_of
from soap.measure.iteration import StepTimes
from soap.simulator.simulate import Simulator
from soap.strategy.classical import CLASSICAL
from tests.graph_builder import mlp
from tests.simulator.examples import PointCosts
from tests.strategies import cluster


def test_each_runs_once_per_turn_and_is_found_again() -> None:
    graph, topology = mlp(), cluster([2])
    simulator = Simulator(graph, topology, PointCosts())
    strategies = {name: CLASSICAL[name](graph, topology) for name in ("data_parallel", "model_parallel")}
    runs = in_turns(strategies, {name: simulator.run(strategy) for name, strategy in strategies.items()}, 3)
    assert [strategy for strategy, _ in runs.values()] == list(strategies.values()) * 3
    tiles = {name: sum(len(config.devices) for config in strategy.operators.values()) for name, strategy in strategies.items()}
    assert [len(order.forward) for _, order in runs.values()] == list(tiles.values()) * 3
    assert all(sorted(order.backward) == list(range(len(order.forward))) for _, order in runs.values())
    measured = {name: StepTimes((number,), (0.0,)) for number, name in enumerate(runs)}
    assert [own.times_ns for own in turns_of(measured, "data_parallel")] == [(0,), (2,), (4,)]
    assert [own.times_ns for own in turns_of(measured, "model_parallel")] == [(1,), (3,), (5,)]
    assert turns_of(measured, "another") == []
