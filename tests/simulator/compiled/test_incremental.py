"""What a search gets from the compiled simulator is what ``Simulator`` says, whatever strategies follow each other."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.oracles.drawn_cost import cost_ns
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.simulator import incremental, simulate
from soap.simulator.drawn_times import reference_times_ns
from soap.simulator.draws import Draws
from soap.simulator.folded import FoldedSimulation
from soap.simulator.folding import Folding
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.simulate import Simulator
from soap.strategy.classical import data_parallel, random_config, random_strategy
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.megatron import staged
from soap.strategy.named import named
from soap.strategy.recomputation import refusal
from soap.strategy.stages import stages_of
from soap.strategy.sync import SHARDED, SHARDED_STATE, SPARSE_ALL_GATHER, fitted, parameter_server
from tests.graph_builder import transformer
from tests.simulator.examples import ExampleSpreads
from tests.strategies import cases, cluster, with_rails

SERVERS = (SyncConfig(), parameter_server(), parameter_server(2, "host"), SHARDED)


def following(graph: OperatorGraph, topology: Topology, strategy: Strategy, draw: random.Random) -> Strategy:
    """Another strategy: one operator's or parameter's change away, several, another prefetch, or all new."""
    kind = draw.random()
    if kind < 0.1:
        return random_strategy(graph, topology, draw)
    if kind < 0.3 and graph.parameters:
        name = draw.choice(graph.parameters).name
        sync = draw.choice((*SERVERS, SPARSE_ALL_GATHER) if name in graph.sparse else SERVERS)
        return strategy.with_parameter(name, fitted(graph, name, sync))
    if kind < 0.4:
        return replace(strategy, prefetch=draw.randrange(3))
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        op = draw.choice(graph.operators)
        strategy = strategy.with_operator(op.name, random_config(op, topology.device_count, draw))
    return strategy


@settings(suppress_health_check=list(HealthCheck))
@given(case=cases(max_moves=3, max_tiles=4), seed=st.integers(0, 2**16))
def test_as_the_simulator(case: tuple[OperatorGraph, Topology, Strategy], seed: int) -> None:
    graph, topology, current = case
    plain = Simulator(graph, topology, RooflineCosts(topology))
    compiled = IncrementalSimulator(plain)
    draw = random.Random(seed)
    for _ in range(12):
        proposed = following(graph, topology, current, draw)
        assert (compiled.makespan_ns(proposed), compiled.overflow_bytes(proposed)) == plain.cost(proposed)
        if draw.random() < 0.4:
            current = proposed


def test_large_strategies_are_folded_or_go_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "MANY_TILES", 1)
    graph, topology = transformer(), cluster([2, 2])
    simulator = Simulator(graph, topology, RooflineCosts(topology))
    evaluator = IncrementalSimulator(simulator)
    regular = data_parallel(graph, topology)
    drawn = random_strategy(graph, topology, random.Random(1))
    changed = drawn.with_operator("head", random_config(graph.operators[graph.index["head"]], 4, random.Random(2)))
    assert isinstance(simulator.run_folded(regular), FoldedSimulation)
    assert isinstance(simulator.run_folded(drawn), str) and isinstance(simulator.run_folded(changed), str)
    whole = {id(own): simulator.run(own) for own in (regular, drawn, changed)}
    monkeypatch.setattr(simulator, "run", lambda strategy: pytest.fail("lowered in Python"))
    for own in (regular, drawn, changed, regular, drawn):
        assert evaluator.makespan_ns(own) == whole[id(own)].makespan_ns
        assert evaluator.overflow_bytes(own) == whole[id(own)].overflow_bytes
    assert evaluator.engine_for(drawn) is None


def test_proposals_on_large_strategies_go_to_one_engine_of_two_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever readers own, with draws and without: one is made for all-reduces, and one for parts, which have prices of their own."""
    monkeypatch.setattr(simulate, "MANY_TILES", 1)
    graph, topology, made = transformer(batch=8), cluster([4, 4]), []
    make = incremental.folded_engine
    monkeypatch.setattr(incremental, "folded_engine", lambda *own: made.append(own) or make(*own))
    simulator, draws = Simulator(graph, topology, RooflineCosts(topology)), Draws(ExampleSpreads(), 3)
    proposed = [named("data_parallel", graph, topology), strategy := named("fsdp", graph, topology)]
    for op in graph.operators[2:6]:
        strategy = strategy.with_operator(op.name, replace(strategy.operators[op.name], recompute=not refusal(graph, op)))
        proposed.append(strategy)
    proposed += [replace(strategy, prefetch=2), strategy.with_parameter(graph.parameters[0].name, SHARDED_STATE), proposed[0]]
    plain, drawn = IncrementalSimulator(simulator), IncrementalSimulator(simulator, draws)
    for own in proposed:
        outcome = simulator.run_folded(own, nearly=True)
        assert isinstance(outcome, FoldedSimulation)
        assert plain.makespan_ns(own) == outcome.makespan_ns
        assert drawn.makespan_ns(own) == cost_ns(reference_times_ns(outcome, draws), draws.risk)
    assert len(made) == 4


def test_large_pipelines_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "MANY_TILES", 1)
    graph, topology = transformer(batch=24), with_rails(cluster([4, 4]))
    halves = [position >= len(graph.operators) // 2 for position in range(len(graph.operators))]
    made = staged(graph, topology, halves, [range(4), range(4, 8)], microbatches=3)
    strategy = replace(made, microbatches=3, stages=stages_of(graph, halves), schedule="1f1b")
    simulator = Simulator(graph, topology, RooflineCosts(topology))
    evaluator, whole = IncrementalSimulator(simulator), simulator.run(strategy)
    folding = simulator.folding(strategy)
    assert isinstance(folding, Folding) and folding.count == 4
    monkeypatch.setattr(simulator, "run", lambda strategy: pytest.fail("lowered all devices"))
    assert (evaluator.makespan_ns(strategy), evaluator.overflow_bytes(strategy)) == (whole.makespan_ns, whole.overflow_bytes)
