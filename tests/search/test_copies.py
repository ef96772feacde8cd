"""Chains of strategies of many tiles: two of their equal copies are played, by moves that keep copies alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soap.cluster.memory_budget import with_memory_budget
from soap.cluster.topology import Topology
from soap.profiles.roofline import RooflineCosts
from soap.search.chains import search
from soap.search.compiled.runner import CompiledChain
from soap.search.copies import Copies, copies_of
from soap.search.offloading import with_offloading
from soap.search.options import SearchOptions
from soap.search.recomputing import with_recomputation
from soap.search.space import build_space
from soap.simulator import simulate
from soap.simulator.engine import Engine
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy
from soap.strategy.named import named
from soap.strategy.sync import sync_choices
from tests.graph_builder import mlp
from tests.strategies import GPU, cluster

pytestmark = pytest.mark.slow  # the first use compiles for a minute

GRAPH, TOPOLOGY = mlp(512, (256,) * 10), cluster([4, 4], GPU, 1e10)
COSTS = RooflineCosts(TOPOLOGY)
SPACE = with_recomputation(build_space(GRAPH, 8, syncs=sync_choices(GRAPH, TOPOLOGY, saving=True)))


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "MANY_TILES", 2)


def made(start: Strategy, topology: Topology = TOPOLOGY) -> tuple[Simulator, Copies]:
    """A simulator, and a start as copies."""
    simulator = Simulator(GRAPH, topology, RooflineCosts(topology))
    found = copies_of(SPACE, IncrementalSimulator(simulator), start)
    assert found is not None
    return simulator, found


@pytest.mark.parametrize("name", ["data_parallel", "fsdp", "megatron:2"])
def test_costs_are_those_of_the_whole(name: str) -> None:
    start = named(name, GRAPH, TOPOLOGY)
    simulator, copies = made(start)
    chain = CompiledChain(copies.compiled, copies.start, seed=1, proposals=200)
    for proposals in range(10, 201, 10):
        chain.run(proposals, beta=20.0, focus=0.0)
        found = copies.unfolded(chain.strategy)
        folded = simulator.run_folded(found, nearly=True)
        assert not isinstance(folded, str) and folded.makespan_ns == chain.cost_ns
        whole_ns = simulator.run(found).makespan_ns
        assert whole_ns == chain.cost_ns if folded.folding.exact else 0.999 * chain.cost_ns < whole_ns <= chain.cost_ns
        assert all(config.placed_like(start.operators[name]) is config for name, config in found.operators.items())
        assert found.microbatches == start.microbatches
    moves = {entry.move for entry in chain.log() if entry.accepted}
    assert moves >= {"sync", "recompute"} and moves <= {"sync", "recompute", "prefetch"}
    assert simulator.makespan_ns(copies.unfolded(chain.best)) == chain.best_ns


def tight() -> Topology:
    """A cluster where nearly all parameters have to be owned in parts."""
    most, least = (max(Simulator(GRAPH, TOPOLOGY, COSTS).run(named(name, GRAPH, TOPOLOGY)).peak_bytes) for name in ("zero1", "fsdp"))
    return with_memory_budget(TOPOLOGY, f"{(most + 3 * least) // 4} B")


def test_what_fits_is_what_fits_as_a_whole() -> None:
    topology = tight()
    simulator, copies = made(named("fsdp", GRAPH, topology), topology)
    chain, answers = CompiledChain(copies.compiled, copies.start, seed=2, proposals=50), set[bool]()

    def fits(strategy: Strategy, engine: Engine) -> bool:
        answer, found = copies.fits(strategy, engine), copies.unfolded(strategy)
        assert answer == (simulator.overflow_bytes(found) == 0) and answer <= simulator.run(found).fits
        answers.add(answer)
        return answer

    chain.run(50, beta=5.0, focus=0.0, fits=fits)
    assert answers == {True, False} and simulator.run(copies.unfolded(chain.best)).fits


@pytest.mark.parametrize("short", [0, 1, 6])
def test_a_device_that_may_use_less_than_others_counts(short: int) -> None:
    start = named("fsdp", GRAPH, TOPOLOGY)
    folded = Simulator(GRAPH, TOPOLOGY, COSTS).run_folded(start, nearly=True)
    assert not isinstance(folded, str)
    needed = folded.peak_bytes[short]
    for lacking in (0, 1):
        topology = replace(TOPOLOGY, limits=tuple(10 * needed if device != short else needed - lacking for device in range(8)))
        evaluator = IncrementalSimulator(Simulator(GRAPH, topology, COSTS))
        evaluator.makespan_ns(start)
        assert (evaluator.overflow_bytes(start) > 0) == (lacking > 0)


def test_what_keeps_a_strategy_from_being_folded_is_left_out() -> None:
    evaluator, space = IncrementalSimulator(Simulator(GRAPH, TOPOLOGY, COSTS)), with_offloading(SPACE)
    copies = copies_of(space, evaluator, named("fsdp", GRAPH, TOPOLOGY))
    assert copies is not None and len(space.marks) > len(SPACE.marks) == len(copies.compiled.space.marks) > 0


def test_nothing_is_searched_so_that_is_small_or_cannot_be_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = IncrementalSimulator(Simulator(GRAPH, TOPOLOGY, COSTS))
    assert copies_of(SPACE, evaluator, named("model_parallel", GRAPH, TOPOLOGY)) is None
    monkeypatch.setattr(simulate, "MANY_TILES", 2**14)
    assert copies_of(SPACE, evaluator, named("fsdp", GRAPH, TOPOLOGY)) is None


def test_a_search_goes_on_from_its_best_start() -> None:
    topology = tight()
    simulator = Simulator(GRAPH, topology, RooflineCosts(topology))
    found = search(GRAPH, topology, IncrementalSimulator(simulator), SearchOptions(budget=60, seed=1, starts=("fsdp",)))
    assert len(found.rows) == 60 and {row.move for row in found.rows} == {"sync", "recompute", "prefetch"}
    start_ns = min(start.cost_ns for start in found.starts if start.fits)
    assert simulator.makespan_ns(found.strategy) == found.cost_ns < start_ns and simulator.run(found.strategy).fits
