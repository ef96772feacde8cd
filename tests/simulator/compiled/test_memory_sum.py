"""The sum of what a strategy makes and moves is never below what the sweep finds, whatever order its tasks have."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from soap import api
from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.profiles.roofline import RooflineCosts
from soap.simulator.compiled.memory_sum import FITS, UNKNOWN
from soap.simulator.engine import Engine
from soap.simulator.folded_bound import folded_engine
from soap.simulator.folding import fold
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.memory.engine_played import engine_played
from soap.simulator.memory.memory_sum import MemorySum
from soap.simulator.memory.plan_arrays import plan_arrays
from soap.simulator.memory.sweep import swept, with_allowance
from soap.simulator.shared import Shared
from soap.simulator.simulate import Simulator
from soap.strategy.classical import random_config
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.named import named
from soap.strategy.sync import parameter_server
from tests.extent import often
from tests.graph_builder import GraphBuilder, transformer
from tests.simulator.compiled.agreement import most_bytes
from tests.simulator.copied import Case, copied, with_parts
from tests.strategies import CPU, cases, cluster


def summed(
    graph: OperatorGraph,
    topology: Topology,
    limit: int = 1 << 60,
    states: int = 2,
    training: PlannedTraining = PLAIN,
) -> tuple[Engine, MemorySum]:
    """An engine, and the sum of what it holds."""
    engine = Engine(Shared(graph, topology, RooflineCosts(topology), training))
    return engine, MemorySum(engine, [limit] * topology.device_count, states)


def check(memory: MemorySum, simulator: Simulator, strategy: Strategy) -> None:
    """It is at least what the sweep finds of the strategy that the engine holds, or proposes."""
    curves = simulator.run(strategy).memory_over_time
    assert all(curve.peak_bytes <= most for curve, most in zip(curves, most_bytes(memory), strict=True))


@pytest.mark.slow
@settings(suppress_health_check=list(HealthCheck))
@given(
    case=cases(max_moves=5, max_tiles=4, servers=True, ports=True),
    seed=st.integers(0, 2**16),
    training=st.sampled_from((PLAIN, PlannedTraining(kept=1, made=1, densest=0.5, dense=True))),
    states=st.sampled_from((0, 1, 2)),
)
def test_never_below(case: tuple[OperatorGraph, Topology, Strategy], seed: int, training: PlannedTraining, states: int) -> None:
    graph, topology, strategy = case
    engine, memory = summed(graph, topology, states=states, training=training)
    simulator = Simulator(graph, topology, RooflineCosts(topology), states, training)
    engine.load(strategy)
    engine.simulate()
    draw = random.Random(seed)
    for _ in range(4):
        check(memory, simulator, strategy)
        op = draw.choice(graph.operators)
        config = random_config(op, topology.device_count, draw)
        proposed = strategy.with_operator(op.name, config)
        try:
            proposed.validate(graph, topology.device_count)
        except StrategyError:  # micro-batches allow less
            continue
        engine.propose(op.name, config)
        check(memory, simulator, proposed)
        if draw.random() < 0.5:
            engine.accept()
            strategy = proposed
        else:
            engine.reject()


@settings(suppress_health_check=list(HealthCheck))
@given(copied().flatmap(with_parts))
def test_never_below_of_two_copies(case: Case) -> None:
    graph, topology, strategy = case
    folding = fold(graph, topology, strategy)
    assume(not isinstance(folding, str))
    assert not isinstance(folding, str)
    engine, small = folded_engine(folding, RooflineCosts(topology)), folding.topology
    engine.load(folding.copies.strategy)
    engine.simulate()
    plan = folding.plan
    arrays = plan_arrays(plan)
    peaks = swept(plan, arrays, engine_played(engine, plan, arrays), small, 2).peaks().tolist()
    most = most_bytes(MemorySum(engine, [1 << 60] * small.device_count))
    assert all(peak <= sum_bytes for peak, sum_bytes in zip(peaks, most, strict=True))


def test_users_that_cut_a_table_across_each_other_ask_for_its_pieces() -> None:
    """One cuts its rows, one its columns: who reads all of it looks rows up in four pieces."""
    g = GraphBuilder()
    ids, table = g.input("ids", 40, dtype="int64"), g.parameter("table", 2, 2)
    users = [g.embedding(ids, 2, 2, weight=table, name=f"find{i}") for i in range(3)]
    graph = g.build(g.cross_entropy(g.elementwise(*users), g.input("targets", 40, dtype="int64")))
    topology = cluster([1, 1], CPU)
    strategy = api.classical("single_device", graph, topology).with_parameter("table", parameter_server(rows=True))
    for name, degrees, devices in (("find0", (1, 2, 1), (0, 0)), ("find1", (1, 1, 2), (0, 0)), ("find2", (1, 1, 1), (1,))):
        strategy = strategy.with_operator(name, OpConfig(degrees, devices))
    engine, memory = summed(graph, topology)
    engine.load(strategy)
    check(memory, Simulator(graph, topology, RooflineCosts(topology)), strategy)


NETS = ["alexnet", "dlrm", "gpt", "inception_v3", "lm", "nmt", "resnet50", "rnnlm", "rnntc"]
NEAR = {"data_parallel": 2, "megatron": 2, "zero1": 5, "fsdp": 10}
"""Strategy -> of the peak the sum is at most so many times as much."""


@pytest.mark.parametrize("net", often(NETS, {*NETS} - {"gpt", "inception_v3", "resnet50"}, pytest.mark.slow))
def test_near_the_peaks_of_models(net: str) -> None:
    """Nearest where little is moved, so that chains need not ask about data parallelism on half of the memory."""
    graph, topology = api.load(f"zoo:{net}:tiny", plan_only=True).graph, cluster([2, 2])
    engine, memory = summed(graph, topology)
    simulator = Simulator(graph, topology, RooflineCosts(topology))
    for name, times in NEAR.items():
        strategy = named(name, graph, topology)
        engine.load(strategy)
        peak = max(curve.peak_bytes for curve in simulator.run(strategy).memory_over_time)
        assert peak <= max(most_bytes(memory)) <= times * peak, name


def verdict(graph: OperatorGraph, topology: Topology, strategy: Strategy, limit: int) -> int:
    """Whether a strategy fits into that much on each device."""
    engine, memory = summed(graph, topology, limit)
    engine.load(strategy)
    return memory.verdict()


def test_the_verdict_changes_at_the_sum_with_its_allowance() -> None:
    graph, topology = transformer(), cluster([2, 2])
    strategy = api.classical("megatron", graph, topology)
    engine, memory = summed(graph, topology)
    engine.load(strategy)
    most = with_allowance(max(most_bytes(memory)))
    assert [verdict(graph, topology, strategy, limit) for limit in (most - 1, most + 1)] == [UNKNOWN, FITS]


def test_a_plan_that_fits_in_its_simulated_order_alone_fits() -> None:
    """Between the peak of that order and the sum the whole of it decides, for deltas as well."""
    graph, topology = transformer(), cluster([2, 2])
    usual = api.classical("data_parallel", graph, topology)
    peak = max(Simulator(graph, topology, RooflineCosts(topology)).run(usual).peak_bytes)
    for limit, lacking in ((peak, False), (peak - 1, True)):
        small = cluster([2, 2], replace(CPU, memory_bytes=limit))
        simulator = Simulator(graph, small, RooflineCosts(small))
        evaluator = IncrementalSimulator(simulator)
        assert verdict(graph, small, usual, limit) == UNKNOWN
        evaluator.makespan_ns(usual)
        assert evaluator.overflow_bytes(usual) == simulator.overflow_bytes(usual) == simulator.run(usual).overflow_bytes
        assert (simulator.cost(usual)[1] > 0) == lacking != simulator.run(usual).fits


def test_what_certainly_fits_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, topology = transformer(), cluster([2, 2])
    simulator = Simulator(graph, topology, RooflineCosts(topology))
    asked: list[Strategy] = []
    monkeypatch.setattr(simulator, "overflow_of_played", lambda strategy, engine: asked.append(strategy) or 17)
    evaluator = IncrementalSimulator(simulator)
    usual = api.classical("data_parallel", graph, topology)
    other = usual.with_operator("head", random_config(graph.operators[graph.index["head"]], 4, random.Random(2)))
    for strategy in (usual, other, usual):
        assert (evaluator.overflow_bytes(strategy), asked) == (0, [])
