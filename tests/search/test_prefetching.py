"""How many groups of values are gathered ahead: a move of chains and of descents, where parameters may be gathered for their uses."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from math import exp

import pytest

from soap.profiles.roofline import RooflineCosts
from soap.search.compiled.memory import MOVES
from soap.search.compiled.runner import CompiledChain
from soap.search.descent import prefetch, propose_descent
from soap.search.space import MOST_PREFETCHED, build_space
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.simulate import Simulator
from soap.strategy.classical import data_parallel, fsdp
from soap.strategy.sync import sync_choices
from tests.graph_builder import mlp
from tests.search.toys import compiled_space
from tests.strategies import GPU, cluster

GRAPH, TOPOLOGY = mlp(64, (256,) * 10), cluster([1, 1], GPU, 1e10)
SPACE = build_space(GRAPH, 2, syncs=sync_choices(GRAPH, TOPOLOGY, saving=True))
COSTS, SHARED = RooflineCosts(TOPOLOGY), fsdp(GRAPH, TOPOLOGY)


@pytest.mark.slow
def test_a_chain_takes_each_by_its_time() -> None:
    simulator = Simulator(GRAPH, TOPOLOGY, COSTS)
    cost_ns = [simulator.makespan_ns(replace(SHARED, prefetch=ahead)) for ahead in range(MOST_PREFETCHED + 1)]
    assert len(set(cost_ns)) > 2
    chain = CompiledChain(compiled_space(SPACE, TOPOLOGY, COSTS), SHARED, seed=1, proposals=4000)
    chain.weights = {move: float(move == "prefetch") for move in MOVES}
    start_ns, visits, beta = chain.cost_ns, Counter[int](), 20.0
    for proposals in range(1, 4001):
        chain.run(proposals, beta=beta, focus=0.0)
        ahead = chain.strategy.prefetch
        assert chain.cost_ns == cost_ns[ahead] and chain.strategy == replace(SHARED, prefetch=ahead)
        visits[ahead] += 1
    ends = (0, MOST_PREFETCHED)  # there half of the moves have no effect, and are not counted
    weights = [exp(-beta * cost / start_ns) / (2 if ahead in ends else 1) for ahead, cost in enumerate(cost_ns)]
    assert sum(abs(visits[ahead] / 4000 - weight / sum(weights)) for ahead, weight in enumerate(weights)) / 2 < 0.05
    assert chain.best_ns == min(cost_ns) == cost_ns[chain.best.prefetch]
    entry = next(chain.log())
    assert (entry.move, entry.operators, entry.operator) == ("prefetch", 0, -1)


def test_nothing_is_proposed_where_nothing_is_gathered() -> None:
    usual, rng = data_parallel(GRAPH, TOPOLOGY), random.Random(1)
    assert all(prefetch(rng, SPACE, usual) is None for _ in range(10))
    chain = CompiledChain(compiled_space(SPACE, TOPOLOGY, COSTS), usual, seed=1, proposals=5)
    chain.weights = {move: float(move == "prefetch") for move in MOVES}
    assert chain.run(5, beta=1.0, focus=0.0) == 0
    without = CompiledChain(compiled_space(build_space(GRAPH, 2), TOPOLOGY, COSTS), usual, seed=1, proposals=5)
    assert without.weights["prefetch"] == 0 < chain.weights["prefetch"]


def test_moves_go_one_up_or_down_within_limits() -> None:
    rng = random.Random(2)
    for ahead in (0, 1, MOST_PREFETCHED, 9):
        strategy = replace(SHARED, prefetch=ahead)
        found = {own.strategy.prefetch for own in (prefetch(rng, SPACE, strategy) for _ in range(40)) if own is not None}
        assert found == {after for after in (ahead - 1, ahead + 1) if after >= 0 and (after < ahead or after <= MOST_PREFETCHED)}
    drawn = [own for own in (propose_descent(rng, SPACE, SHARED) for _ in range(200)) if own is not None]
    assert {own.strategy.prefetch for own in drawn if own.move == "prefetch"} == {0, 2}


def test_a_change_of_it_is_a_delta() -> None:
    """Successive questions about strategies that differ in nothing else."""
    simulator = Simulator(GRAPH, TOPOLOGY, COSTS)
    evaluator = IncrementalSimulator(simulator)
    for ahead in (1, 0, 3, 3, 1, 4096, 2):
        strategy = replace(SHARED, prefetch=ahead)
        assert evaluator.makespan_ns(strategy) == Simulator(GRAPH, TOPOLOGY, COSTS).makespan_ns(strategy)
