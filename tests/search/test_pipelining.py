"""Searches that find pipelines: the start, its moves, and chains inside stages."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from soap import api
from soap.cluster.topology import DeviceType, Topology
from soap.errors import InfeasibleError, StrategyError
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.search.chains import search
from soap.search.compiled.runner import CompiledChain
from soap.search.offloading import with_offloading
from soap.search.options import SearchOptions
from soap.search.pipeline_moves import BORDER, DEVICES, MICROBATCHES, PIPELINE_MOVES, SCHEDULE, pipeline_moves
from soap.search.pipelines import pipelines
from soap.search.pipelining import best_pipeline, is_cut, is_legal, pipelined, space_of
from soap.search.recomputing import with_recomputation
from soap.search.record import SearchResult
from soap.search.space import build_space
from soap.search.starts import Start
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.shared import Shared
from soap.simulator.simulate import Simulator
from soap.strategy.named import PIPELINE
from soap.strategy.stages import chunks_of, devices_of_stages
from tests.graph_builder import GraphBuilder, mlp, transformer
from tests.search.toys import compiled_space
from tests.strategies import GPU, cluster

BUSY = DeviceType("test-busy", "cpu", {"float32": 1e8}, 1e9, 2**30, 1e-7, "made up for tests")
"""Slow beside the network, so that stages have something to do."""
TOPOLOGY = cluster([1, 1, 1, 1], BUSY, bandwidth_bytes_per_second=2e7, latency_seconds=1e-6)
"""Four hosts with a network on which sums of gradients take longer than everything else."""


def heavy() -> OperatorGraph:
    """Equal layers with far larger weights than activations."""
    g = GraphBuilder("heavy")
    x = g.input("x", 16, 64)
    for i in range(8):
        x = g.elementwise(g.linear(x, 64, name=f"layers.{i}.fc"), name=f"layers.{i}.act")
    return g.build(g.mean(x, name="mean"))


GRAPH = heavy()
SPACE = build_space(GRAPH, 4)


def simulator(topology: Topology = TOPOLOGY, graph: OperatorGraph = GRAPH) -> Simulator:
    return Simulator(graph, topology, RooflineCosts(topology))


def found(**options: object) -> SearchResult:
    return search(GRAPH, TOPOLOGY, IncrementalSimulator(simulator()), SearchOptions(budget=100, confidence=0, **options))  # type: ignore[arg-type]


def start() -> Start:
    evaluator = IncrementalSimulator(simulator())
    best = best_pipeline(SPACE, TOPOLOGY, evaluator)
    assert best is not None
    return best


@pytest.mark.slow
def test_a_pipeline_is_found_where_sums_of_gradients_are_dear() -> None:
    """Without anyone asking. The best strategy without micro-batches is slower, as only one stage would be at work at a time."""
    usual, plain = found(), found(pipelines=False)
    assert is_cut(usual.strategy) and len(devices_of_stages(GRAPH, usual.strategy)) > 1
    assert usual.start_costs[PIPELINE][1] and PIPELINE not in plain.start_costs and not is_cut(plain.strategy)
    assert usual.cost_ns <= usual.start_costs[PIPELINE][0] < plain.cost_ns
    assert simulator().run(usual.strategy).makespan_ns == usual.cost_ns
    assert {row.move for row in usual.rows if row.phase == PIPELINE} <= {*PIPELINE_MOVES}


@pytest.mark.long
def test_equal_searches_find_the_same() -> None:
    one, other = found(), found()
    assert one.strategy == other.strategy and one.rows == other.rows


@pytest.mark.long
def test_searches_that_expect_nothing_of_pipelines_are_as_without() -> None:
    """On a fast network data parallelism is near the best that there is."""
    topology = cluster([4], BUSY, bandwidth_bytes_per_second=1e12, latency_seconds=1e-9)
    results = []
    for wanted in (None, False):
        evaluator = IncrementalSimulator(simulator(topology))
        results.append(search(GRAPH, topology, evaluator, SearchOptions(budget=60, confidence=0, pipelines=wanted)))
    assert results[0] == results[1]


@pytest.mark.slow
def test_a_search_may_begin_at_it_by_name_and_by_a_strategy() -> None:
    named = found(starts=[PIPELINE])
    assert {*named.start_costs} == {"data_parallel", PIPELINE}
    given = found(starts=["data_parallel"], initial=named.strategy)
    assert given.cost_ns <= named.cost_ns and is_cut(given.strategy)
    with pytest.raises(StrategyError, match=r"in micro-batches: operator 'layers\.0\.fc' breaks pins"):
        found(initial=named.strategy, pins={"layers.0.fc": "b:4"})


@pytest.mark.slow
def test_moves_change_one_thing_and_know_when_they_are_legal() -> None:
    own = start().strategy
    legal = {move: 0 for move in PIPELINE_MOVES}
    for proposal in pipeline_moves(GRAPH, own):
        if not is_legal(SPACE, TOPOLOGY, proposal.strategy):
            continue
        legal[proposal.move] += 1
        other = proposal.strategy
        differ = {
            BORDER: chunks_of(GRAPH, own.stages) != chunks_of(GRAPH, other.stages),
            MICROBATCHES: own.microbatches != other.microbatches,
            SCHEDULE: own.schedule != other.schedule,
            DEVICES: devices_of_stages(GRAPH, own) != devices_of_stages(GRAPH, other),
        }
        assert [move for move, changed in differ.items() if changed] == [proposal.move]
        assert simulator().run(other).makespan_ns > 0
    assert all(legal.values())


def two_stages(graph: OperatorGraph, topology: Topology) -> Start:
    """The most promising pipeline of two stages and four micro-batches."""
    found = pipelines(Shared(graph, topology, RooflineCosts(topology)), 2)
    return Start("two", pipelined(graph, topology, next(own for own in found if (len(own.stages), own.microbatches) == (2, 4))), 0, 0)


def test_stages_exchange_devices_and_give_one_away() -> None:
    two = two_stages(GRAPH, cluster([2, 2], BUSY)).strategy
    groups = {devices_of_stages(GRAPH, move.strategy) for move in pipeline_moves(GRAPH, two) if move.move == DEVICES}
    assert devices_of_stages(GRAPH, two) == (frozenset({0, 1}), frozenset({2, 3}))
    assert groups == {tuple(map(frozenset, own)) for own in (({2, 3}, {0, 1}), ({0}, {1, 2, 3}), ({0, 1, 2}, {3}))}


def test_the_space_of_a_pipeline_stays_in_its_stages() -> None:
    own = start()
    space = space_of(SPACE, own)
    assert space is not None
    for position, (op, config) in enumerate(own.strategy.operators.items()):
        assert space.allows(position, config)
        assert {*space.operators[position].devices} == {*config.devices}, op
    assert space_of(SPACE, replace(own, strategy=replace(own.strategy, microbatches=1, stages={}, schedule=None))) is SPACE
    saving = with_offloading(with_recomputation(SPACE))
    inside = space_of(saving, own)
    assert inside is not None and inside.by_field["offload"] == saving.by_field["offload"] and inside.by_field["recompute"]


def activations() -> OperatorGraph:
    """Equal layers that keep more than they have parameters."""
    g = GraphBuilder("activations")
    x = g.input("x", 64, 32, 8)
    for i in range(8):
        for part in "abcd":
            x = g.elementwise(x, name=f"layers.{i}.{part}")
        x = g.elementwise(g.linear(x, 8, name=f"layers.{i}.fc"), x, name=f"layers.{i}.add")
    return g.build(g.mean(x, name="mean"))


@pytest.mark.long  # `test_recomputing` and `test_a_pipeline_is_found_where_sums_of_gradients_are_dear` hold its halves
def test_a_pipeline_that_lacks_memory_recomputes_and_then_offloads() -> None:
    """Each only as far as the options leave it."""
    graph = activations()
    wide = cluster([1, 1], replace(GPU, memory_bytes=2**40))
    roomy = [pipelined(graph, wide, own) for own in pipelines(Shared(graph, wide, RooflineCosts(wide)), 2)]
    needs = min(max(Simulator(graph, wide, RooflineCosts(wide)).run(own).peak_bytes) for own in roomy)
    topology = replace(wide, limits=(needs * 95 // 100,) * 2)  # less than the smallest pipeline needs

    def starts(**options: object) -> dict[str, bool]:
        own = SearchOptions(budget=1, starts=[PIPELINE], confidence=0, **options)  # type: ignore[arg-type]
        evaluator = IncrementalSimulator(Simulator(graph, topology, RooflineCosts(topology)))
        return {name: fits for name, (_, fits) in search(graph, topology, evaluator, own).start_costs.items() if PIPELINE in name}

    assert starts() == {PIPELINE: False, f"{PIPELINE}, recompute": True}
    with pytest.raises(InfeasibleError):
        starts(recompute=False)


@pytest.mark.slow
def test_compiled_chains_run_inside_stages() -> None:
    """Of two devices each, with copies inside them, and with recomputation: what they hold is legal, and costs what the reference says."""
    graph, topology = transformer(layers=2), cluster([2, 2], BUSY)
    own, two = simulator(topology, graph), two_stages(graph, topology)
    space = space_of(with_recomputation(build_space(graph, 4)), two)
    assert space is not None
    chain = CompiledChain(compiled_space(space, topology, own.costs), two.strategy, seed=3, proposals=1500)
    rng = random.Random(0)
    for last in range(150, 1500, 150):
        chain.run(last, beta=rng.choice((3.0, 300.0)), focus=100.0)
        for strategy in (chain.strategy, chain.best):
            strategy.validate(graph, 4)
            assert all(getattr(strategy, name) == getattr(two.strategy, name) for name in ("microbatches", "stages", "schedule"))
        assert own.run(chain.strategy).makespan_ns == chain.cost_ns
    assert all(chain.moves[name].accepted for name in ("redraw", "informed", "run", "recompute"))
    assert own.run(chain.best).makespan_ns == chain.best_ns <= chain.start_ns


def test_what_has_no_pipeline_is_said() -> None:
    one = cluster([1], BUSY)
    with pytest.raises(StrategyError, match="strategy 'pipeline': model 'mlp' has no pipeline on 1 devices; expected several devices"):
        api.simulated_name(PIPELINE, Simulator(mlp(), one, RooflineCosts(one)))
    with pytest.raises(StrategyError, match="strategy 'pipeline' is found by simulating"):
        api.classical(PIPELINE, mlp(), one)
