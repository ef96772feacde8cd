"""Hosts keep optimizer states, and what operators keep, where nothing else fits, and only there."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest

from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.search.chains import search
from soap.search.compiled.memory import MOVES
from soap.search.compiled.runner import CompiledChain
from soap.search.constraints import brought_inside, parse
from soap.search.descent import recompute
from soap.search.offloading import budgeted_offloading, offload_to_fit, offloading_starts, with_offloading
from soap.search.options import SearchOptions
from soap.search.recomputing import with_recomputation
from soap.search.space import build_space
from soap.search.starts import Start, evaluated
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.lowering import build_plan
from soap.simulator.simulate import Simulator
from soap.strategy.classical import data_parallel
from soap.strategy.marks import OFFLOADED, mark_of
from soap.strategy.named import named, offloaded_names, saving_names
from soap.strategy.offloading import away, offloadable, with_offload
from soap.strategy.recomputation import LIGHT, RECOMPUTED, STAYS, runs_of, with_marks
from soap.strategy.sync import ALL_REDUCE, SHARDED, SHARDED_STATE, SPARSE_ALL_GATHER
from tests.graph_builder import GraphBuilder, mlp
from tests.search.test_recomputing import wide
from tests.search.toys import compiled_space
from tests.strategies import GPU, cluster

GRAPH = mlp(batch=4)


def gpus(memory_bytes: int) -> Topology:
    return cluster([1, 1], replace(GPU, memory_bytes=memory_bytes))


def deep() -> OperatorGraph:
    """Many layers with more parameters than activations: little is gathered at a time."""
    g = GraphBuilder()
    x = g.input("x", 2, 64)
    for i in range(16):
        x = g.linear(x, 64, name=f"layer.{i}")
    return g.build(g.mean(x))


def starts_of(topology: Topology) -> list[Start]:
    simulator = Simulator(GRAPH, topology, RooflineCosts(topology))
    found = simulator.run(data_parallel(GRAPH, topology))
    return [Start("data_parallel", data_parallel(GRAPH, topology), found.makespan_ns, found.overflow_bytes)]


def test_it_is_tried_only_where_nothing_fits() -> None:
    large, small = gpus(2**40), gpus(1000)
    assert offloading_starts(GRAPH, large, starts_of(large), SearchOptions()) == {}
    assert [*offloading_starts(GRAPH, small, starts_of(small), SearchOptions())] == [*offloaded_names()]
    assert offloading_starts(GRAPH, small, starts_of(small), SearchOptions(syncs=[SHARDED_STATE])) == {}
    without = offloading_starts(GRAPH, small, starts_of(small), SearchOptions(recompute=False))
    assert without and not any("recompute" in name for name in without)
    assert [*saving_names(small)][-len(without) - 1 :] == [*offloaded_names()]  # last


def test_choices_of_each_parameter() -> None:
    choices = (ALL_REDUCE, SPARSE_ALL_GATHER, SHARDED_STATE, SHARDED)
    space = with_offloading(build_space(GRAPH, 2, syncs={GRAPH.parameters[0].name: choices}))
    (found,) = space.syncs.values()
    assert found == (*choices, *(replace(sync, offload=True) for sync in (ALL_REDUCE, SHARDED_STATE, SHARDED)))
    assert with_offloading(space).syncs == space.syncs


def test_frozen_parameters_are_gathered_but_have_nothing_to_offload() -> None:
    name = GRAPH.parameters[0].name
    tensors = [replace(tensor, requires_grad=False) if tensor.name == name else tensor for tensor in GRAPH.tensors.values()]
    graph = replace(GRAPH, tensors={tensor.name: tensor for tensor in tensors})
    choices = (ALL_REDUCE, SHARDED)
    assert with_offloading(build_space(graph, 2, syncs={name: choices})).syncs == {name: choices}
    topology = cluster([2, 2], GPU)
    plan = build_plan(graph, data_parallel(graph, topology).with_parameter(name, replace(SHARDED, offload=True)), topology)
    assert not plan.offloaded and [sync.offload for sync in plan.syncs if sync.parameter == name] == [False]


def test_moves_mark_sets_of_operators_that_have_no_other_mark() -> None:
    """In chains and in descents: what is recomputed is not offloaded, and the other way round."""
    space, draw, topology = with_offloading(with_recomputation(build_space(GRAPH, 2))), random.Random(3), gpus(2**40)
    assert {GRAPH.operators[each.position].name for own in space.by_field["offload"] for each in own} == offloadable(GRAPH)
    usual = data_parallel(GRAPH, topology)
    made = [own.strategy for own in (recompute(draw, space, usual) for _ in range(80)) if own is not None]
    kinds = {mark_of(config) for own in made for config in own.operators.values()}
    assert kinds == {STAYS, RECOMPUTED, LIGHT, OFFLOADED}
    chain = CompiledChain(compiled_space(space, topology, RooflineCosts(topology)), usual, seed=2, proposals=80)
    chain.weights = {move: float(move == "recompute") for move in MOVES}
    seen = set()
    for proposals in range(8, 81, 8):
        chain.run(proposals, beta=1e-3, focus=0.0)
        seen |= {mark_of(config) for config in chain.strategy.operators.values()}
    assert seen == kinds and not any(config.offload for config in chain.best.operators.values())
    assert chain.cost_ns == Simulator(GRAPH, topology, RooflineCosts(topology)).run(chain.strategy).makespan_ns


def test_pins_mark_and_unmark() -> None:
    names = sorted(offloadable(GRAPH))
    space = build_space(GRAPH, 2, allowed=parse(GRAPH, 2, [(names[0], "offload")], [(names[1], "offload")]))
    usual = data_parallel(GRAPH, gpus(2**40))
    inside = brought_inside(space, with_marks(with_offload(usual, [names[1]], True), [names[0]], True))
    assert inside == with_offload(usual, [names[0]], True)
    sets = (with_offloading(space).by_field["offload"], with_recomputation(space).by_field["recompute"])
    found, again = ({GRAPH.operators[each.position].name for own in each_set for each in own} for each_set in sets)
    assert not {names[0], names[1]} & found and names[0] not in again
    for pins, told in (
        ([(names[0], "offload"), (names[0], "recompute")], "is to be recomputed and to offload what it keeps"),
        ([(names[0], "offload,recompute")], "has one mark at most"),
    ):
        with pytest.raises(StrategyError, match=told):
            parse(GRAPH, 2, pins, [])


@pytest.mark.parametrize("share", [0.95, 0.85])
def test_no_more_runs_offload_than_it_takes(share: float) -> None:
    graph, ample = wide(), gpus(2**40)
    usual = data_parallel(graph, ample)
    kept, least = (max(Simulator(graph, ample, RooflineCosts(ample)).run(own).peak_bytes) for own in (usual, away(graph, usual)))
    assert least < 0.8 * kept
    topology = gpus(int(share * kept))
    simulator = Simulator(graph, topology, RooflineCosts(topology))
    made = offload_to_fit(graph, topology, usual, simulator.peak_share)
    assert simulator.run(made.strategy).fits and 0 < made.runs < made.of_runs == len(runs_of(graph)) and made.selective == 0
    names = [name for name, config in made.strategy.operators.items() if config.offload]
    chosen = [run for run in runs_of(graph) if {*run} <= {*names}]
    assert len(chosen) == made.runs and {name for run in chosen for name in run} == {*names}
    assert not simulator.run(with_offload(made.strategy, chosen[-1], False)).fits
    assert made.least_ns < made.added_ns and (made.gap == inf) == (made.runs == 1) == (made.least_ns == 0)
    evaluator = IncrementalSimulator(simulator)
    starts = [evaluated(evaluator, "data_parallel", usual), evaluated(evaluator, "all", away(graph, usual))]
    assert budgeted_offloading(graph, topology, evaluator, starts[:1]) == {"data_parallel, offload_kept": made}
    assert starts[1].fits and budgeted_offloading(graph, topology, evaluator, [starts[1]]) == {}
    hopeless = gpus(1000)
    evaluator = IncrementalSimulator(Simulator(graph, hopeless, RooflineCosts(hopeless)))
    assert budgeted_offloading(graph, hopeless, evaluator, [evaluated(evaluator, "data_parallel", usual)]) == {}


@pytest.mark.slow
def test_a_search_finds_it() -> None:
    """Devices have room for sharded values whose states are on hosts, which is too little for all starts that do not offload."""
    graph, ample = deep(), gpus(2**40)
    peak = max(Simulator(graph, ample, RooflineCosts(ample)).run(named("fsdp+offload", graph, ample)).peak_bytes)
    topology = gpus(peak)
    evaluator = IncrementalSimulator(Simulator(graph, topology, RooflineCosts(topology)))
    found = search(graph, topology, evaluator, SearchOptions(budget=50, seed=1))
    assert any(sync.offload for sync in found.strategy.parameters.values())
    assert evaluator.overflow_bytes(found.strategy) == 0
    assert {start.name for start in found.starts if start.fits} <= {*offloaded_names()}
