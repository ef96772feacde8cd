"""Cuts: what they try, and that what they take is better and fits."""

from __future__ import annotations

import random

import pytest

from benchmarks.optimality import small_cluster
from benchmarks.small_nets import lenet
from soap import api
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.search import search
from soap.search.cuts import (
    MAX_COMPARED,
    MAX_ROUNDS,
    Cut,
    Follower,
    changes_at,
    find_cut,
    improve_by_cuts,
    pair_count,
    pairs_of,
    round_count,
)
from soap.search.options import SearchOptions
from soap.search.polish import polish, structured_count
from soap.search.space import build_space
from soap.simulator.engine import Engine
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.shared import Shared
from soap.simulator.simulate import Simulator
from soap.strategy.classical import random_strategy
from soap.strategy.config import OpConfig, Strategy
from tests.extent import often
from tests.graph_builder import GraphBuilder, transformer
from tests.search.toys import ManyCalls, aligned_configs, layers
from tests.strategies import cluster


def held(simulator: Simulator, strategy: Strategy) -> Engine:
    engine = Engine(Shared(simulator.graph, simulator.topology, simulator.costs))
    engine.load(strategy)
    engine.simulate()
    return engine


def diamond() -> OperatorGraph:
    """first -> (left, first) -> last -> mean."""
    g = GraphBuilder()
    x = g.linear(g.input("x", 8, 16), 2, name="first")
    return g.build(g.mean(g.elementwise(g.elementwise(x, name="left"), x, name="last"), name="mean"))


def test_operators_follow_the_nearer_end() -> None:
    space = build_space(layers(5), 2)
    assert pairs_of(space) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert pair_count(space) == 4 * space.operators[0].structured_count ** 2
    cut = find_cut(space, (1, 2), 9)
    assert cut == Cut((1, 2), ((Follower(0, space.edges[0][0]),), (Follower(3, space.edges[3][0]), Follower(4, space.edges[4][0]))))
    assert [f.position for side in find_cut(space, (1, 2), 2).followers for f in side] == [0, 3]
    assert find_cut(space, (1, 2), 1) == Cut((1, 2), ((), ()))


def test_every_operator_of_a_branching_graph_follows_once() -> None:
    space = build_space(diamond(), 2)
    assert pairs_of(space) == [(0, 1), (0, 2), (1, 2), (2, 3)]
    for ends in pairs_of(space):
        cut = find_cut(space, ends, 4)
        assert sorted([*ends, *(f.position for side in cut.followers for f in side)]) == [0, 1, 2, 3]


def test_a_cut_tries_every_pair_and_what_aligns_with_it() -> None:
    graph = diamond()
    space = build_space(graph, 2)
    cut = find_cut(space, (2, 3), 4)
    tried = list(changes_at(space, cut))
    ends = [(changes["last"], changes["mean"]) for changes in tried]
    assert len(set(ends)) == len(ends) == space.operators[2].structured_count * space.operators[3].structured_count
    for changes in tried:
        for position, name in enumerate(("first", "left")):
            whole = Strategy({op.name: changes[op.name] for op in graph.operators})
            assert changes[name] in aligned_configs(graph, whole, position, space.edges[position])
    split = OpConfig((2, 1), (0, 1))
    found = next(changes for changes in tried if changes["last"] == split)
    assert found["left"] == split and found["first"] == OpConfig((2, 1, 1), (0, 1))


@pytest.mark.parametrize("seed", often(range(4), range(1), pytest.mark.slow))
def test_afterwards_no_cut_is_better(seed: int) -> None:
    graph, topology = transformer(layers=1), cluster([2])
    simulator = Simulator(graph, topology, RooflineCosts(topology))
    space = build_space(graph, 2)
    engine = held(simulator, random_strategy(graph, topology, random.Random(seed)))
    costs, improved = [engine.makespan_ns], True
    while improved:
        improved, compared = improve_by_cuts(
            engine, space, simulator.overflow_bytes, lambda strategy, names, cost_ns: costs.append(cost_ns)
        )
        assert 0 < compared <= 2 * pair_count(space)
    assert costs == sorted(set(costs), reverse=True) and len(costs) > 1
    assert costs[-1] == engine.makespan_ns == simulator.makespan_ns(engine.strategy)
    for radius in (len(graph.operators), 1):
        for ends in pairs_of(space):
            for changes in changes_at(space, find_cut(space, ends, radius)):
                assert engine.propose_changes(changes, at_most_ns=costs[-1] - 1) is None
                engine.reject()


@pytest.mark.slow
def test_what_a_search_compares_at_cuts_is_bounded() -> None:
    graph = lenet()
    rounds = [round_count(build_space(graph, devices)) for devices in (2, 3, 4, 8)]
    assert rounds == [MAX_ROUNDS, MAX_ROUNDS, 1, 0]
    simulator = api.simulator_for(graph, small_cluster(4))
    found = search(graph, simulator.topology, IncrementalSimulator(simulator), SearchOptions(budget=20))
    assert found.polished > pair_count(build_space(graph, 4)) and found.locally_optimal
    assert found.polished <= MAX_COMPARED + 2 * 10 * structured_count(build_space(graph, 4))
    assert found.cost_ns == simulator.makespan_ns(found.strategy)


@pytest.mark.slow
def test_what_does_not_fit_is_not_taken() -> None:
    graph, topology = transformer(layers=1), cluster([2])
    simulator = Simulator(graph, topology, RooflineCosts(topology))
    start = random_strategy(graph, topology, random.Random(1))
    engine, asked = held(simulator, start), []

    def overflow_bytes(strategy: Strategy) -> int:
        asked.append(strategy)
        return 1

    improved, _ = improve_by_cuts(engine, build_space(graph, 2), overflow_bytes)
    assert not improved and asked and engine.strategy == start
    assert all(simulator.makespan_ns(strategy) < simulator.makespan_ns(start) for strategy in asked[:20])


@pytest.mark.slow
def test_a_strategy_of_two_halves_is_reached_from_a_local_optimum() -> None:
    """LeNet on three devices: the convolutions on two of them, the rest on the third; from one device, polishing alone ends elsewhere."""
    graph, topology = lenet(), small_cluster(3)
    simulator = Simulator(graph, topology, ManyCalls(topology))
    space = build_space(graph, 3)
    assert round_count(space) == MAX_ROUNDS
    engine = held(simulator, api.classical("single_device", graph, simulator.topology))
    polished = polish(engine, space, simulator.overflow_bytes)
    assert polished.locally_optimal
    improved, _ = improve_by_cuts(engine, space, simulator.overflow_bytes)
    assert improved and engine.makespan_ns < polished.cost_ns
    devices = [set(engine.strategy.operators[op.name].devices) for op in graph.operators]
    assert devices[:4] == [devices[0]] * 4 and devices[4:] == [devices[4]] * 4 and not devices[0] & devices[4]
