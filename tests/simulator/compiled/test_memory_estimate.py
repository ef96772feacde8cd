"""Estimates of memory in compiled code: near the exact peaks, learning from answers, and never the last word of a search."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from soap.cluster.topology import Topology
from soap.profiles.roofline import RooflineCosts
from soap.search.compiled.runner import CompiledChain, CompiledSpace
from soap.search.recomputing import recompute_to_fit, with_recomputation
from soap.search.space import build_space
from soap.simulator.compiled.memory_tables import ASKED_AT, FIT_UP_TO, LACKED_FROM, LIKELY, UNKNOWN, UNLIKELY, WHOLE
from soap.simulator.engine import Engine
from soap.simulator.memory.bound import FIRST_SLACK, MemoryBound
from soap.simulator.simulate import Simulator
from soap.strategy.classical import data_parallel
from soap.strategy.config import Strategy
from soap.strategy.named import named
from soap.strategy.recomputation import recomputed, runs_of
from soap.strategy.sync import sync_choices
from tests.exactly import exactly
from tests.extent import often
from tests.graph_builder import transformer
from tests.strategies import CPU, GPU, cluster

GRAPH = transformer(layers=4, batch=64)


def limited(share: float, kind: object = CPU) -> Topology:
    """Two devices with this share of what data parallelism needs."""
    topology = cluster([1, 1], kind)  # type: ignore[arg-type]
    most = max(Simulator(GRAPH, topology, RooflineCosts(topology)).run(data_parallel(GRAPH, topology)).peak_bytes)
    return replace(topology, limits=(int(share * most),) * 2)


def strategies(topology: Topology) -> list[Strategy]:
    """Data parallelism, and what saves memory: runs recomputed at random, owners shared, split layers."""
    draw, usual, runs = random.Random(3), data_parallel(GRAPH, topology), runs_of(GRAPH)
    chosen = [[name for run in draw.sample(runs, count) for name in run] for count in (1, 2, len(runs) - 1, len(runs))]
    found = [usual, *(recomputed(GRAPH, usual, names) for names in chosen)]
    return found + [named(name, GRAPH, topology) for name in ("zero1", "fsdp", "fsdp+recompute", "megatron", "megatron+recompute")]


@pytest.mark.parametrize("kind", [CPU, GPU])
def test_is_near_the_exact_peak(kind: object) -> None:
    topology = limited(0.5, kind)
    simulator = Simulator(GRAPH, topology, RooflineCosts(topology))
    engine = Engine(GRAPH, topology, simulator.costs)
    memory = MemoryBound(engine, topology.memory_limits)
    ratios = []
    for strategy in strategies(topology):
        engine.load(strategy)
        engine.simulate()
        memory.likely()
        if memory.verdict() == UNKNOWN:
            exact = max(simulator.run(strategy).peak_bytes) / topology.memory_limits[0]
            ratios.append(memory._fixed["guess"][ASKED_AT] / WHOLE / exact)
    assert len(ratios) >= 5
    assert min(ratios) > 0.6 and max(ratios) < 1.7, ratios


def test_a_proposal_is_estimated_as_if_it_were_held() -> None:
    topology = limited(0.5)
    engine, alone = (Engine(GRAPH, topology, RooflineCosts(topology)) for _ in range(2))
    memory, other = MemoryBound(engine, topology.memory_limits), MemoryBound(alone, topology.memory_limits)
    usual = recomputed(GRAPH, data_parallel(GRAPH, topology))
    engine.load(usual)
    engine.simulate()
    for run in runs_of(GRAPH):
        changes = {name: replace(usual.operators[name], recompute=False) for name in run}
        engine.propose_changes(changes)
        alone.load(usual.with_changes(changes))
        alone.simulate()
        assert memory.likely() == other.likely() == UNKNOWN
        assert memory._fixed["guess"][ASKED_AT] == other._fixed["guess"][ASKED_AT] > 0
        engine.reject()


def test_learns_from_answers() -> None:
    topology = limited(0.5)
    engine = Engine(GRAPH, topology, RooflineCosts(topology))
    memory = MemoryBound(engine, topology.memory_limits)
    all_runs = [name for run in runs_of(GRAPH) for name in run]
    little, much = (recomputed(GRAPH, data_parallel(GRAPH, topology), names) for names in (all_runs, all_runs[: len(all_runs) // 2]))

    def likely(strategy: Strategy, *, better: bool = False) -> int:
        engine.load(strategy)
        engine.simulate()
        return memory.likely(better=better)

    guess = memory._fixed["guess"]
    assert likely(little) == UNKNOWN and memory.told(fits=True) and likely(little) == LIKELY
    lower = guess[FIT_UP_TO]
    assert likely(much) == UNKNOWN and guess[ASKED_AT] > lower
    assert memory.told(fits=False) and likely(much) == UNLIKELY and guess[LACKED_FROM] == guess[ASKED_AT]
    assert likely(much, better=True) == UNKNOWN  # it is within the slack
    for _ in range(FIRST_SLACK.bit_length()):
        memory.told(fits=False)
    assert likely(much, better=True) == UNLIKELY
    likely(little)
    assert not memory.told(fits=False)  # what was likely to fit does not
    assert likely(little) == UNLIKELY and guess[FIT_UP_TO] < lower


@pytest.mark.slow
@pytest.mark.parametrize("saving", often([False, True], [True]))
def test_an_estimating_chain_asks_less_and_its_best_fits(saving: bool) -> None:
    topology = limited(0.7)
    simulator = Simulator(GRAPH, topology, RooflineCosts(topology))
    start = recompute_to_fit(GRAPH, topology, data_parallel(GRAPH, topology), simulator.costs, exactly(simulator)).strategy
    syncs = sync_choices(GRAPH, topology, saving=True) if saving else {}
    space = CompiledSpace(with_recomputation(build_space(GRAPH, 2, syncs=syncs)), topology, simulator.costs)
    asked: dict[bool, int] = {}
    for estimating in (False, True):
        count = 0

        def fits(strategy: Strategy) -> bool:
            nonlocal count
            count += 1
            return simulator.overflow_bytes(strategy) == 0

        chain = CompiledChain(space, start, seed=4, proposals=400, estimating=estimating)
        begin = chain.best_ns
        chain.run(400, beta=50.0, focus=1.0, fits=fits)
        asked[estimating] = count
        assert chain.best_ns <= begin and simulator.overflow_bytes(chain.best) == 0
        assert simulator.makespan_ns(chain.best) == chain.best_ns
    assert asked[True] < asked[False] / 2, asked
