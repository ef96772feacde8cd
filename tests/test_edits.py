"""A configuration that is edited keeps what the edit does not name: fields that do not exist yet come through all of the code.

Each class gets a subclass with one more field, as if somebody had added it. Every operator, every parameter and the strategy itself carries
its own name in it, so that a value that is lost is noticed, and one that comes from elsewhere, too.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from benchmarks.oracles.exhaustive import best_neighbour
from soap.cluster.topology import Topology
from soap.model.graph import NEXT_STATE, OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.runner.config import RunnerConfig
from soap.runner.runner import adapted
from soap.runner.tuning import with_partitions
from soap.runtime.planned import resized_plan
from soap.search import chains, recomputing, starts
from soap.search.alignment import aligned_with
from soap.search.chains import search
from soap.search.compiled.memory import MOVES
from soap.search.compiled.runner import CompiledChain
from soap.search.constraints import brought_inside, parse
from soap.search.cuts import improve_by_cuts
from soap.search.descent import CHANGES, adopt, propose_descent
from soap.search.explanation import explain, explain_synchronization
from soap.search.metropolis import Proposal
from soap.search.options import SearchOptions
from soap.search.polish import polish
from soap.search.recomputing import with_recomputation
from soap.search.space import Space, build_space
from soap.simulator.engine import Engine
from soap.simulator.folding import Folding, fold
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.lowering import build_plan
from soap.simulator.shared import Shared
from soap.simulator.simulate import Simulator
from soap.strategy.classical import CLASSICAL, NAMED, data_parallel, random_strategy
from soap.strategy.config import OpConfig, Strategy, SyncConfig, settled
from soap.strategy.named import named
from soap.strategy.sync import SHARDED, SPARSE_ALL_GATHER, in_one_partition, parameter_server
from tests.graph_builder import GraphBuilder, mlp
from tests.search.toys import compiled_space
from tests.strategies import CPU, cluster

WHOLE = "strategy"


@dataclass(frozen=True, slots=True)
class NewOpConfig(OpConfig):
    mark: str = ""


@dataclass(frozen=True, slots=True)
class NewSyncConfig(SyncConfig):
    mark: str = ""


@dataclass(frozen=True)
class NewStrategy(Strategy):
    mark: str = ""


def new_config(config: OpConfig, mark: str) -> NewOpConfig:
    return NewOpConfig(config.degrees, config.devices, config.replicas, config.recompute, config.offload, config.shares, mark)


def new_sync(sync: SyncConfig, mark: str) -> NewSyncConfig:
    return NewSyncConfig(sync.owner, sync.payload, sync.residence, sync.within, sync.partitions, sync.compression, sync.offload, mark)


def marked(graph: OperatorGraph, strategy: Strategy) -> NewStrategy:
    operators = {name: new_config(config, name) for name, config in strategy.operators.items()}
    syncs = {tensor.name: new_sync(strategy.sync(tensor.name), tensor.name) for tensor in graph.parameters}
    pipeline = strategy.microbatches, strategy.stages, strategy.schedule
    return NewStrategy(operators, syncs, strategy.prefetch, *pipeline, strategy.consistency, strategy.workers, WHOLE)


def is_marked(strategy: Strategy) -> bool:
    """Whether everything carries its own name."""
    found = {**strategy.operators, **strategy.parameters}
    return getattr(strategy, "mark", None) == WHOLE and all(getattr(own, "mark", None) == name for name, own in found.items())


def lookups() -> OperatorGraph:
    """A sparse table, and equal layers behind it."""
    g = GraphBuilder()
    x = g.embedding(g.input("ids", 8, 1, dtype="int64"), 64, 16, weight=g.parameter("table", 64, 16))
    for i in range(3):
        x = g.linear(x, 16, name=f"layer.{i}")
    return g.build(g.mean(x))


GRAPH, FOUR = lookups(), cluster([2, 2], CPU)
COSTS = RooflineCosts(FOUR)
SIMULATOR = Simulator(GRAPH, FOUR, COSTS)
SYNCS = (SyncConfig(), SPARSE_ALL_GATHER, parameter_server(2, rows=True), parameter_server(4, "host", rows=True), SHARDED)


def space_of(device_count: int = 4, **options: Any) -> Space:
    references = [make(GRAPH, FOUR) for make in CLASSICAL.values()] if device_count == 4 else []
    syncs = {"table": tuple(new_sync(sync, "table") for sync in SYNCS)}
    return with_recomputation(build_space(GRAPH, device_count, references=references, syncs=syncs, **options))


def start(seed: int) -> NewStrategy:
    """Any strategy, sometimes with equal layers configured alike."""
    draw = random.Random(seed)
    made = random_strategy(GRAPH, FOUR, draw) if seed % 2 else draw.choice(list(NAMED.values()))(GRAPH, FOUR)
    return marked(GRAPH, made.with_parameter("table", draw.choice(SYNCS)))


def held(strategy: Strategy, simulator: Simulator = SIMULATOR) -> Engine:
    engine = Engine(Shared(simulator.graph, simulator.topology, simulator.costs))
    engine.load(strategy)
    engine.simulate()
    return engine


def told(proposals: Iterator[Proposal | None]) -> int:
    """How many proposals there are, all of which have lost nothing."""
    found = [proposal.strategy for proposal in proposals if proposal is not None]
    assert all(map(is_marked, found))
    return len(found)


def test_the_marks_are_lost_where_a_configuration_is_made_anew() -> None:
    """The judge of this file can fail."""
    strategy = start(0)
    name, config = next(iter(strategy.operators.items()))
    other = next(own for own in strategy.operators.values() if own is not config)
    assert is_marked(strategy) and not is_marked(Strategy(strategy.operators, strategy.parameters))
    assert not is_marked(strategy.with_operator(name, OpConfig(config.degrees, config.devices, config.replicas)))
    assert not is_marked(strategy.with_operator(name, other)) and not is_marked(strategy.with_parameter("table", SyncConfig()))


def test_edits_of_values() -> None:
    strategy = start(0)
    for name, config in strategy.operators.items():
        whole = config.placed((1,) * len(config.degrees), (3,))
        assert (whole.devices, getattr(whole, "mark", "")) == ((3,), name) and whole.placed_like(config) == config
        assert is_marked(strategy.with_operator(name, whole)) and config.placed_like(config) is config
    for made in (pickle.loads(pickle.dumps(strategy)), copy.deepcopy(strategy), copy.copy(strategy)):
        assert made == strategy and is_marked(made)


@pytest.mark.parametrize("change", [*CHANGES, "synchronize", "recompute"])
def test_moves_of_the_descent(change: str) -> None:
    space = space_of()
    found = [propose_descent(random.Random(seed), space, start(seed)) for seed in range(200)]
    assert told(proposal for proposal in found if proposal is not None and proposal.move == change) > 5


def test_adopting_a_reference() -> None:
    space = space_of()
    assert told(adopt(space, start(seed), reference) for seed in range(4) for reference in space.references) > 5


def test_alignment_with_a_neighbour() -> None:
    strategy, space = start(1), space_of()
    found = [
        (edge.neighbour, config)
        for position, edges in enumerate(space.edges)
        for edge in edges
        for config in aligned_with(GRAPH, strategy.operators[GRAPH.operators[edge.neighbour].name], position, edge)
    ]
    assert len(found) > 5 and all(getattr(config, "mark", "") == GRAPH.operators[source].name for source, config in found)


def test_pins_and_what_is_forbidden() -> None:
    moved = 0
    for pins, forbidden in (([("layer.*", "sample:2@0-1")], []), ([], [("*", "@3"), ("layer.*", "reduction")])):
        space = space_of(allowed=parse(GRAPH, 4, pins, forbidden))
        for seed in range(10):
            strategy = start(seed)
            inside = brought_inside(space, strategy)
            assert is_marked(inside)
            moved += inside is not strategy
    assert moved > 10


def test_operators_without_a_choice_and_fewer_devices() -> None:
    g = GraphBuilder()
    x = g.linear(g.input("x", 8, 4), 4, name="first")
    loss = g.mean(x)
    g.state(g.elementwise(g.batch_mean(x), g.constant("held", 4)))
    graph = g.build(loss)
    usual = marked(graph, data_parallel(graph, FOUR))
    wrong = usual.with_operator(NEXT_STATE, replace(usual.operators[NEXT_STATE], devices=(1,)))
    assert settled(graph, wrong, 4) == settled(graph, usual, 4) == usual != wrong
    assert build_plan(graph, usual, FOUR).strategy == usual and is_marked(usual)
    space = build_space(graph, 4)
    assert all(space.allows(position, usual.operators[op.name]) for position, op in enumerate(graph.operators))
    assert is_marked(starts.narrowed(graph, FOUR, usual, 2))
    assert starts.narrowed(graph, FOUR, usual, 2).operators["first"].devices == (0, 1)


def test_polishing_and_cuts() -> None:
    space, improved, cuts = space_of(), 0, 0
    small = build_space(GRAPH, 4, allowed=parse(GRAPH, 4, [("*", "@0-1")], []))
    for seed in range(3):
        engine = held(start(seed))
        found: list[Strategy] = []
        improve_by_cuts(engine, small, lambda strategy: 0, lambda strategy, names, cost_ns, found=found: found.append(strategy))
        cuts += len(found)
        polish(engine, space, lambda strategy: 0, limit=400, accepted=lambda own, cost_ns, found=found: found.append(own.strategy))
        assert all(map(is_marked, [*found, engine.strategy]))
        improved += len(found)
    assert improved > cuts > 0
    neighbour = best_neighbour(IncrementalSimulator(SIMULATOR), space, start(1))
    assert neighbour is not None and getattr(neighbour.config, "mark", "") == neighbour.name


def test_what_the_engine_is_told_comes_back() -> None:
    strategy = start(0)
    engine = held(strategy)
    assert engine.strategy == strategy
    name = "layer.1"
    moved = strategy.operators[name].placed((1,) * len(strategy.operators[name].degrees), (2,))
    served = new_sync(SYNCS[3], "table")
    engine.propose_changes({name: moved}, {"table": served})
    engine.accept()
    assert engine.strategy == strategy.with_changes({name: moved}, {"table": served}) and is_marked(engine.strategy)


@pytest.mark.parametrize("move", MOVES)
def test_compiled_chains(move: str) -> None:
    usual = data_parallel(GRAPH, FOUR)
    without_effect = {"place": starts.narrowed(GRAPH, FOUR, usual, 2), "prefetch": usual.with_parameter("table", SHARDED)}
    strategy = marked(GRAPH, without_effect.get("place" if move == "swap" else move, usual))
    chain = CompiledChain(compiled_space(space_of(), FOUR, COSTS), strategy, seed=3, proposals=80)
    chain.weights = {own: float(own == move) for own in MOVES}
    found = []
    for proposals in range(8, 81, 8):
        chain.run(proposals, beta=1e-3, focus=0.0)
        found += [chain.strategy, chain.best]
    assert any(own != strategy for own in found) and all(map(is_marked, found))
    assert all(own.parameters.keys() == strategy.parameters.keys() for own in found)  # those that are all-reduced, too


def test_a_compiled_chain_asks_with_everything() -> None:
    """Devices with so little memory that a bound does not say whether a strategy fits: then somebody is asked, with the whole of it."""
    small = replace(CPU, memory_bytes=20_000)
    topology = cluster([2, 2], small)
    strategy = marked(GRAPH, data_parallel(GRAPH, topology))
    chain = CompiledChain(compiled_space(space_of(), topology, COSTS), strategy, seed=3, proposals=300)
    asked: list[Strategy] = []

    def fits(proposed: Strategy, engine: Engine) -> bool:
        asked.append(proposed)
        return len(asked) % 2 == 0

    chain.run(300, beta=1.0, focus=0.0, fits=fits)
    assert len(asked) > 3 and all(map(is_marked, asked)) and is_marked(chain.strategy)


@pytest.mark.slow
def test_a_whole_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts, descent, tempered chains, and polishing."""

    def marking(make: Callable[[OperatorGraph, Topology], Strategy]) -> Callable[[OperatorGraph, Topology], Strategy]:
        return lambda graph, topology: marked(graph, make(graph, topology))

    for module, name in ((starts, "CLASSICAL"), (starts, "SYNCHRONIZED"), (recomputing, "STARTS")):
        monkeypatch.setattr(module, name, {own: marking(make) for own, make in getattr(module, name).items()})
    for module in (starts, chains):
        monkeypatch.setattr(module, "named", lambda name, graph, topology: marked(graph, named(name, graph, topology)))
    options = SearchOptions(budget=150, seed=1, syncs=[SyncConfig()], pins=[("layer.0", "sample:2")])
    for recompute in (None, True):
        found = search(GRAPH, FOUR, IncrementalSimulator(SIMULATOR), replace(options, recompute=recompute))
        assert is_marked(found.strategy) and all(is_marked(own.strategy) for own in found.starts)
        assert found.cost_ns < min(own.cost_ns for own in found.starts)


def test_folding() -> None:
    graph, topology = mlp(batch=8), cluster([1, 1, 1, 1])
    folding = fold(graph, topology, marked(graph, data_parallel(graph, topology)))
    assert isinstance(folding, Folding) and folding.count == 4
    assert is_marked(folding.copies.strategy) and is_marked(folding.plan.strategy)
    assert {len(config.devices) for config in folding.copies.strategy.operators.values()} == {2}


@pytest.mark.parametrize("name", CLASSICAL)
def test_batches_of_another_size(name: str) -> None:
    before = marked(mlp(batch=8), CLASSICAL[name](mlp(batch=8), FOUR))
    plan = resized_plan(build_plan(mlp(batch=8), before, FOUR), mlp(batch=6), FOUR)
    assert is_marked(plan.strategy) and plan.strategy == before
    assert is_marked(resized_plan(plan, mlp(batch=3), FOUR).strategy)


def test_partitions() -> None:
    served = marked(GRAPH, NAMED["parameter_server"](GRAPH, FOUR))
    tuned = with_partitions(served, ["table"], 7)
    assert tuned.sync("table").partitions == 7 and is_marked(tuned)
    assert is_marked(in_one_partition(tuned, ["table"])) and in_one_partition(tuned, ["table"]).sync("table").partitions == 1
    assert is_marked(adapted(tuned, RunnerConfig(optimizer=lambda tensors: None, partitions=3, search_partitions=False)))  # type: ignore[arg-type, return-value]


def test_explanations() -> None:
    class Noting(IncrementalSimulator):
        asked: list[Strategy] = []  # noqa: RUF012 - one instance

        def makespan_ns(self, strategy: Strategy) -> int:
            self.asked.append(strategy)
            return super().makespan_ns(strategy)

    strategy, usual, noting = start(1), data_parallel(GRAPH, FOUR), Noting(SIMULATOR)
    explain(GRAPH, SIMULATOR.run(strategy), SIMULATOR.run(usual), (strategy, usual), noting)
    assert len(noting.asked) > 3 and all(map(is_marked, noting.asked))
    noting.asked.clear()
    explain_synchronization(strategy, noting)
    reduced = {name: asked for asked in noting.asked for name, sync in asked.parameters.items() if sync == SyncConfig()}
    assert reduced.keys() == strategy.parameters.keys() and len(noting.asked) == len(reduced)
    assert all(is_marked(asked.with_parameter(name, strategy.sync(name))) for name, asked in reduced.items())
