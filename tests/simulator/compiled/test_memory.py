"""The compiled bound of memory is never below what ``simulator.memory.peaks`` says, and mostly equal."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from soap import api
from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.profiles.roofline import RooflineCosts
from soap.simulator.compiled.memory_tables import FITS, UNKNOWN
from soap.simulator.engine import Engine
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.lowering import PlanBuilder, build_plan
from soap.simulator.memory.bound import MemoryBound
from soap.simulator.memory.peaks import peak_bytes
from soap.simulator.simulate import Simulator
from soap.strategy.classical import random_config, random_strategy
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.sync import parameter_server
from tests.extent import often
from tests.graph_builder import GraphBuilder, transformer
from tests.strategies import CPU, cases, cluster


def bound(
    graph: OperatorGraph,
    topology: Topology,
    limit: int = 1 << 60,
    states: int = 2,
    training: PlannedTraining = PLAIN,
) -> tuple[Engine, MemoryBound]:
    """An engine, and the bound of what it holds."""
    engine = Engine(graph, topology, RooflineCosts(topology), training=training)
    return engine, MemoryBound(engine, [limit] * topology.device_count, states)


@settings(suppress_health_check=list(HealthCheck))
@given(
    case=cases(max_moves=5, max_tiles=4, servers=True),
    seed=st.integers(0, 2**16),
    training=st.sampled_from((PLAIN, PlannedTraining(kept=1, made=1, densest=0.5, dense=True))),
)
def test_never_below(case: tuple[OperatorGraph, Topology, Strategy], seed: int, training: PlannedTraining) -> None:
    graph, topology, strategy = case
    engine, memory = bound(graph, topology, training=training)
    builder = PlanBuilder(graph, topology, training)
    engine.load(strategy)
    engine.simulate()
    draw = random.Random(seed)
    for _ in range(6):
        exact = peak_bytes(builder.build(strategy))
        assert all(own <= most for most, own in zip(memory.bound_bytes(), exact, strict=True))
        op = draw.choice(graph.operators)
        config = random_config(op, topology.device_count, draw)
        proposed = strategy.with_operator(op.name, config)
        try:
            proposed.validate(graph, topology.device_count)
        except StrategyError:  # micro-batches allow less
            continue
        engine.propose(op.name, config)
        exact = peak_bytes(builder.build(proposed))
        told = memory.bound_bytes()  # of what is proposed
        assert all(own <= most for most, own in zip(told, exact, strict=True))
        if draw.random() < 0.5:
            engine.accept()
            strategy = proposed
        else:
            engine.reject()


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
    engine, memory = bound(graph, topology)
    engine.load(strategy)
    exact = peak_bytes(build_plan(graph, strategy, topology))
    assert all(own <= most for most, own in zip(memory.bound_bytes(), exact, strict=True))


NETS = ["alexnet", "dlrm", "gpt", "inception_v3", "lm", "nmt", "resnet50", "rnnlm", "rnntc"]


@pytest.mark.parametrize("net", often(NETS, {*NETS} - {"inception_v3", "resnet50"}, pytest.mark.slow))
def test_equal_for_data_parallelism_and_close_for_others(net: str) -> None:
    graph, topology = api.load(f"zoo:{net}:tiny", plan_only=True).graph, cluster([2, 2])
    engine, memory = bound(graph, topology, states=1)
    usual = api.classical("data_parallel", graph, topology)
    engine.load(usual)
    assert memory.bound_bytes() == list(peak_bytes(build_plan(graph, usual, topology), 1))
    for seed in range(2):
        strategy = random_strategy(graph, topology, random.Random(seed))
        engine.load(strategy)
        exact = peak_bytes(build_plan(graph, strategy, topology), 1)
        assert all(own <= most <= 1.3 * own for most, own in zip(memory.bound_bytes(), exact, strict=True))


def test_the_verdict_changes_at_the_bound() -> None:
    graph, topology = transformer(), cluster([2, 2])
    strategy = random_strategy(graph, topology, random.Random(3))
    engine, memory = bound(graph, topology)
    engine.load(strategy)
    most = max(memory.bound_bytes())
    assert [verdict(graph, topology, strategy, limit) for limit in (most - 1, most)] == [UNKNOWN, FITS]


def test_a_plan_that_fits_in_its_simulated_order_alone_fits() -> None:
    """Between the peak of that order and the bound for any order, the whole of it decides, for deltas as well."""
    graph, topology = transformer(), cluster([2, 2])
    usual = api.classical("data_parallel", graph, topology)
    whole = Simulator(graph, topology, RooflineCosts(topology)).run(usual)
    peak, most = max(whole.peak_bytes), max(use.total for use in whole.memory)
    assert peak < most
    for limit, lacking in ((peak, False), (peak - 1, True)):
        small = cluster([2, 2], replace(CPU, memory_bytes=limit))
        simulator = Simulator(graph, small, RooflineCosts(small))
        evaluator = IncrementalSimulator(simulator)
        assert verdict(graph, small, usual, limit) == UNKNOWN
        evaluator.makespan_ns(usual)
        assert evaluator.overflow_bytes(usual) == simulator.overflow_bytes(usual) == simulator.run(usual).overflow_bytes
        assert (simulator.cost(usual)[1] > 0) == lacking != simulator.run(usual).fits


def verdict(graph: OperatorGraph, topology: Topology, strategy: Strategy, limit: int) -> int:
    """Whether a strategy fits into that much on each device."""
    engine, memory = bound(graph, topology, limit)
    engine.load(strategy)
    return memory.verdict()


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
