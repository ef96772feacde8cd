"""A compiled walk against the same walk in Python, proposal by proposal."""

from __future__ import annotations

from math import log

import pytest

from benchmarks.metropolis_walk import walk
from soap import api
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.simulator.drawn_engine import DrawnEngine
from soap.simulator.draws import Draws as SomeDraws
from soap.simulator.engine import Engine
from soap.simulator.shared import Shared
from soap.strategy.config import OpConfig
from tests.simulator.examples import ExampleSpreads, pairwise_cluster

pytestmark = pytest.mark.long  # its loop, with the engine in it, is compiled for it alone

STEPS = 300
WRAP = 2**64


class Draws:
    """splitmix64's upper 63 bits."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def __call__(self) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) % WRAP
        z = (self._state ^ self._state >> 30) * 0xBF58476D1CE4E5B9 % WRAP
        z = (z ^ z >> 27) * 0x94D049BB133111EB % WRAP
        return (z ^ z >> 31) >> 1


def choices_of(graph: OperatorGraph, devices: int) -> dict[str, list[OpConfig]]:
    """One part on each device, and as many as are possible of the first factor."""
    found = {}
    for op in graph.operators:
        rest = (1,) * (len(op.factors) - 1)
        found[op.name] = [OpConfig((1, *rest) if op.factors else (), (device,)) for device in range(devices)]
        if op.factors and op.partitionable and op.factors[0].size % devices == 0:
            found[op.name].append(OpConfig((devices, *rest), tuple(range(devices))))
    return found


def replayed(engine: Engine, choices: dict[str, list[OpConfig]], beta_per_ns: float, seed: int) -> list[int]:
    """Cost after each step."""
    draw, costs = Draws(seed), []
    operators = [op.name for op in engine.graph.operators]
    for _ in range(STEPS):
        name = operators[draw() % len(operators)]
        config = choices[name][draw() % len(choices[name])]
        bound = engine.makespan_ns - log(((draw() >> 10) + 1) / 2**53) / beta_per_ns
        if engine.strategy.operators[name] != config:
            cost = engine.propose(name, config)
            assert cost is not None
            if cost <= int(bound):
                engine.accept()
            else:
                engine.reject()
        costs.append(engine.makespan_ns)
    return costs


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("model", ["alexnet", "gpt"])
def test_same_decisions(model: str, bounded: bool) -> None:
    graph, topology = api.load(f"zoo:{model}:tiny", plan_only=True).graph, pairwise_cluster(2, 2)
    choices = choices_of(graph, topology.device_count)
    start = api.classical("data_parallel", graph, topology)
    walked, stepped = (Engine(Shared(graph, topology, RooflineCosts(topology))) for _ in range(2))
    for engine in (walked, stepped):
        engine.load(start)
        engine.simulate()
    beta_per_ns = 30 / stepped.makespan_ns
    expected = replayed(stepped, choices, beta_per_ns, 3)
    outcome = walk(walked, choices, STEPS, beta_per_ns, 3, bounded=bounded, log=STEPS)
    assert outcome.costs_ns.tolist() == expected
    assert walked.strategy == stepped.strategy
    assert 10 < outcome.accepted < outcome.proposals < STEPS


def test_an_engine_with_draws_takes_no_walk() -> None:
    graph, topology = api.load("zoo:rnnlm:tiny", plan_only=True).graph, pairwise_cluster(2)
    engine = DrawnEngine(Shared(graph, topology, RooflineCosts(topology)), SomeDraws(ExampleSpreads(), 2))
    engine.load(api.classical("data_parallel", graph, topology))
    before = engine.simulate()
    with pytest.raises(ValueError, match="without: a walk compares makespans"):
        walk(engine, choices_of(graph, 2), 10, 1e-6)
    assert engine.makespan_ns == before
