"""The compiled chain: its stationary distribution on a space that can be enumerated, and that it is what it says it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import combinations, permutations, product
from math import exp, inf, prod
from typing import NamedTuple

import pytest

from benchmarks.oracles.drawn_cost import cost_ns as draws_cost_ns
from benchmarks.oracles.exhaustive import all_strategies
from soap import api
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.search.compiled.memory import MOVES, STEP
from soap.search.compiled.runner import DEFAULT_WEIGHTS, CompiledChain
from soap.search.constraints import brought_inside, parse
from soap.search.space import OperatorSpace, Space, build_space, make_config
from soap.search.starts import different, reference_strategies, starting_strategies
from soap.simulator import engine
from soap.simulator.drawn_engine import DrawnEngine
from soap.simulator.drawn_times import drawn_times
from soap.simulator.draws import Draws, Risk
from soap.simulator.engine import Engine
from soap.simulator.shared import Shared
from soap.simulator.simulate import Simulator
from soap.strategy.config import OpConfig, Strategy, SyncConfig
from soap.strategy.sync import parameter_server
from tests.graph_builder import GraphBuilder
from tests.search.toys import Key, compiled_space, key_of
from tests.simulator.examples import ExampleSpreads
from tests.strategies import CPU, cluster


class Case(NamedTuple):
    """A space that can be enumerated, with the cost of every strategy in it."""

    graph: OperatorGraph
    topology: Topology
    costs: RooflineCosts
    space: Space
    cost_ns: dict[Key, int]
    start: Strategy


@cache
def enumerated(layers: int = 3) -> Case:
    """Equal layers on two devices with a slow link: 8 structured configurations each, and nothing shuffled."""
    g = GraphBuilder()
    x = g.input("x", 8, 16)
    for i in range(layers):
        x = g.linear(x, 16, name=f"layer.{i}")
    graph = g.build(g.mean(x))
    topology = cluster([2], CPU, 1e9, 1e-6)
    references = [api.classical(name, graph, topology) for name in ("data_parallel", "megatron", "model_parallel")]
    space = build_space(graph, 2, references=references, shuffled=0.0)
    costs = RooflineCosts(topology)
    engine = Engine(Shared(graph, topology, costs))
    found = {}
    for strategy in all_strategies(space):
        engine.load(strategy)
        found[key_of(strategy)] = engine.play()
    return Case(graph, topology, costs, space, found, references[0])


def visits(chain: CompiledChain, proposals: int, beta: float, focus: float) -> Counter[Key]:
    """Steps in every state; moves without effect are steps, too."""
    counts: Counter[Key] = Counter()
    state = key_of(chain.strategy)
    for _ in range(proposals):
        before = int(chain.arrays.at[STEP])
        chain.run(chain.proposals + 1, beta=beta, focus=focus)
        counts[state] += int(chain.arrays.at[STEP]) - before - 1
        if next(chain.log(chain.proposals - 1)).accepted:
            state = key_of(chain.strategy)
        counts[state] += 1
    return counts


def distance(
    counts: Counter[Key],
    cost_ns: dict[Key, int],
    beta: float,
    start_ns: int,
    seen: tuple[int, ...] = (0, 1, 2, 3),
    weight: Mapping[Key, float] | None = None,
) -> float:
    """Total variation between visits and weight * exp(-beta * cost / start), normalised, over configurations of the operators ``seen``."""
    least = min(cost_ns.values())
    target, visited = Counter[Key](), Counter[Key]()
    for key, cost in cost_ns.items():
        own = 1.0 if weight is None else weight[key]
        target[tuple(key[i] for i in seen)] += own * exp(-beta * (cost - least) / start_ns)  # type: ignore[assignment]
    for key, count in counts.items():
        assert key in cost_ns
        visited[tuple(key[i] for i in seen)] += count
    total, steps = sum(target.values()), sum(counts.values())
    return sum(abs(visited[key] / steps - weight / total) for key, weight in target.items()) / 2


ONLY = [{move: 1.0 if move in ("redraw", other) else 0.0 for move in MOVES} for other in MOVES]
"""Each move beside the one that reaches everything."""


ALONE = [
    # Few runs are accepted; how they are drawn is tested below, too.
    pytest.param(weights, 240_000 if move == "run" else 120_000, id=move)
    for weights, move in zip(ONLY, MOVES, strict=True)
    if move in ("informed", "group", "run")
]


@pytest.mark.long  # ``test_what_does_not_fit_is_never_accepted`` looks at where all moves lead
@pytest.mark.parametrize(("weights", "proposals"), [pytest.param(DEFAULT_WEIGHTS, 120_000, id="all"), *ALONE])
def test_visits_follow_the_boltzmann_distribution(weights: dict[str, float], proposals: int) -> None:
    case = enumerated()
    assert len(case.cost_ns) >= 500
    beta, focus = 12.0, 3.0
    chain = CompiledChain(compiled_space(case.space, case.topology, case.costs), case.start, seed=3, proposals=proposals)
    chain.weights = weights
    start_ns = chain.cost_ns
    counts = visits(chain, proposals, beta, focus)
    assert distance(counts, case.cost_ns, beta, start_ns) < 0.07  # independent draws would give about 0.03
    assert distance(counts, case.cost_ns, 0.7 * beta, start_ns) > 0.09  # what another temperature would give
    for pair in combinations(range(4), 2):
        assert distance(counts, case.cost_ns, beta, start_ns, pair) < 0.03
    for move, weight in weights.items():
        alone = ("sync", "recompute", "prefetch")  # of these the space has but one way
        assert (chain.moves[move].accepted > 0) == (weight > 0 and move not in alone)


@pytest.mark.long
def test_under_draws_visits_follow_the_cost_of_all_draws() -> None:
    """In two stages, the first of which knows nothing of draws."""
    case, draws = enumerated(), Draws(ExampleSpreads(1.5), 3, seed=4, risk=Risk.WORST)
    engine, cost_ns = DrawnEngine(Shared(case.graph, case.topology, case.costs), draws), {}
    for strategy in all_strategies(case.space):
        engine.load(strategy)
        cost_ns[key_of(strategy)] = engine.simulate()
    proposals, beta = 60_000, 12.0
    chain = CompiledChain(compiled_space(case.space, case.topology, case.costs, draws=draws), case.start, seed=3, proposals=proposals)
    chain.weights = ONLY[MOVES.index("informed")]
    start_ns = chain.cost_ns
    assert start_ns == cost_ns[key_of(case.start)] > case.cost_ns[key_of(case.start)]
    counts = visits(chain, proposals, beta, 3.0)
    for pair in combinations(range(4), 2):
        assert distance(counts, cost_ns, beta, start_ns, pair) < 0.04
    assert distance(counts, cost_ns, beta, start_ns) < 0.09
    assert distance(counts, case.cost_ns, beta, start_ns) > 0.13  # what the first stage alone would follow
    assert chain.best_ns == min(cost_ns[key] for key in counts)
    assert chain.cost_ns == cost_ns[key_of(chain.strategy)]


@pytest.mark.long
@pytest.mark.parametrize("weights", [pytest.param(DEFAULT_WEIGHTS, id="all"), ONLY[MOVES.index("run")]])
def test_runs_through_branches_follow_the_weighted_distribution(weights: dict[str, float]) -> None:
    """Two paths that meet again, and shuffled placements, which have less weight; distributions of each operator and of each pair."""
    g = GraphBuilder()
    x = g.linear(g.input("x", 8, 16), 2, name="first")
    graph = g.build(g.mean(g.elementwise(g.elementwise(x, name="left"), x, name="right")))
    topology = cluster([2], CPU, 1e9, 1e-6)
    space = build_space(graph, 2, shuffled=0.5)
    costs = RooflineCosts(topology)
    engine = Engine(Shared(graph, topology, costs))
    options = [_all_configs(own) for own in space.operators]
    cost_ns: dict[Key, int] = {}
    weight: dict[Key, float] = {}
    for configs in product(*options):
        strategy = Strategy(dict(zip((op.name for op in graph.operators), configs, strict=True)))
        engine.load(strategy)
        cost_ns[key_of(strategy)] = engine.play()
        weight[key_of(strategy)] = exp(sum(own.log_weight(config) for own, config in zip(space.operators, configs, strict=True)))
    assert len(set(weight.values())) > 2 and any(len(edges) > 2 for edges in space.edges)
    proposals, beta = 100_000, 8.0
    start = api.classical("data_parallel", graph, topology)
    chain = CompiledChain(compiled_space(space, topology, costs), start, seed=4, proposals=proposals)
    chain.weights = weights
    start_ns = chain.cost_ns
    counts = visits(chain, proposals, beta, 3.0)
    for seen in combinations(range(4), 2):
        assert distance(counts, cost_ns, beta, start_ns, seen, weight) < 0.045  # shrinks with the root of the steps: 0.018 at 320,000
    assert distance(counts, cost_ns, beta, start_ns, (0, 1)) > 0.1  # what equal weights would give
    assert chain.moves["run"].accepted > 500


def _all_configs(own: OperatorSpace) -> list[OpConfig]:
    """Structured ones and shuffled ones."""
    found = [make_config(grid, devices) for grid in own.grids for devices in permutations(own.devices, prod(grid))]
    return [config for config in found if own.log_weight(config) > -inf]


def of_the_zoo() -> tuple[Space, Simulator, dict[str, Strategy]]:
    """A model of the zoo on 16 devices: its space, its simulator, and the strategies that a search starts from."""
    graph, topology = api.load("zoo:nmt:tiny", plan_only=True).graph, api.load_cluster("p100-4x4")
    starts = starting_strategies(graph, topology, None, None, 0)
    space = build_space(graph, topology.device_count, references=reference_strategies(graph, topology, starts.values()))
    return space, api.simulator_for(graph, topology), dict(starts)


@pytest.mark.slow
def test_steps_are_what_the_simulator_says() -> None:
    space, simulator, starts = of_the_zoo()
    topology = simulator.topology
    compiled = compiled_space(space, topology, simulator.costs)
    chains = [CompiledChain(compiled, starts["data_parallel"], seed=1, proposals=300) for _ in range(2)]
    for step in range(1, 4):
        chains[0].run(100 * step, beta=200.0, focus=100.0)
        assert chains[0].cost_ns == simulator.makespan_ns(chains[0].strategy)
        assert chains[0].best_ns == simulator.makespan_ns(chains[0].best)
    chains[1].run(300, beta=200.0, focus=100.0)
    assert chains[1].strategy == chains[0].strategy
    assert list(chains[1].log()) == list(chains[0].log())
    assert chains[0].proposals == sum(counts.proposed for counts in chains[0].moves.values()) == 300
    log = list(chains[0].log())
    assert chains[0].best_ns == min(entry.cost_ns for entry in log if entry.accepted and entry.cost_ns is not None)
    assert any(entry.operators > 1 for entry in log)


@pytest.mark.slow
def test_steps_under_draws_are_what_the_simulator_says() -> None:
    space, simulator, starts = of_the_zoo()
    topology = simulator.topology
    draws = Draws(ExampleSpreads(), 5, risk=Risk.TAIL)
    chain = CompiledChain(compiled_space(space, topology, simulator.costs, draws=draws), starts["data_parallel"], seed=1, proposals=300)
    for step in range(1, 4):
        chain.run(100 * step, beta=200.0, focus=100.0)
        for cost, strategy in ((chain.cost_ns, chain.strategy), (chain.best_ns, chain.best)):
            (times,) = drawn_times(simulator, [strategy], draws, compiled=False)
            assert cost == draws_cost_ns(times.times_ns, draws.risk)
    assert sum(entry.accepted for entry in chain.log()) > 10


@pytest.mark.slow
def test_what_does_not_fit_is_never_accepted() -> None:
    case = enumerated(2)
    simulator = Simulator(case.graph, case.topology, case.costs)
    peaks = {key_of(strategy): max(simulator.run(strategy).peak_bytes) for strategy in all_strategies(case.space)}
    limit = sorted(peaks.values())[len(peaks) // 2]
    fitting = {key for key, peak in peaks.items() if peak <= limit}
    assert 40 < len(fitting) < len(peaks) - 40
    proposals, beta, start_ns = 8_000, 12.0, 160_000
    start = next(strategy for strategy in all_strategies(case.space) if key_of(strategy) in fitting)
    poor = cluster([2], replace(CPU, memory_bytes=limit), 1e9, 1e-6)
    chain = CompiledChain(compiled_space(case.space, poor, case.costs), start, seed=5, proposals=proposals, start_ns=start_ns)
    asked = []

    def fits(strategy: Strategy, engine: Engine) -> bool:
        asked.append(key_of(strategy))
        return key_of(strategy) in fitting

    counts: Counter[Key] = Counter()
    state = key_of(start)
    for _ in range(proposals):
        before, told = int(chain.arrays.at[STEP]), len(asked)
        chain.run(chain.proposals + 1, beta=beta, focus=1.0, fits=fits)
        counts[state] += int(chain.arrays.at[STEP]) - before - 1
        for key in asked[told:]:  # what is asked about is what would be accepted: the answer decides
            assert key_of(chain.strategy) == (key if key in fitting else state)
        state = key_of(chain.strategy)
        counts[state] += 1
    assert set(counts) <= fitting
    assert fitting & set(asked) and set(asked) - fitting  # near the limit the sum does not tell
    assert distance(counts, {key: case.cost_ns[key] for key in fitting}, beta, start_ns, (0, 1)) < 0.06


def test_what_certainly_fits_is_not_asked_for() -> None:
    case = enumerated()
    chain = CompiledChain(compiled_space(case.space, case.topology, case.costs), case.start, seed=5, proposals=500)
    asked: list[Strategy] = []
    chain.run(500, beta=12.0, focus=1.0, fits=lambda strategy: asked.append(strategy) is not None)
    assert asked == []
    assert sum(counts.accepted for counts in chain.moves.values()) > 0


def test_only_operators_that_changed_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    case, read = enumerated(), list[OpConfig]()
    chain = CompiledChain(compiled_space(case.space, case.topology, case.costs), case.start, seed=5, proposals=500)
    usual = engine.read_config
    monkeypatch.setattr(engine, "read_config", lambda held, *own: read.append(held) or usual(held, *own))
    assert chain.strategy == case.start and read == []
    for last in range(1, 500):
        chain.run(last, beta=12.0, focus=1.0)
        read.clear()
        before, after = chain.engine._configs.copy(), chain.strategy
        (logged,) = chain.log(last - 1)
        assert len(read) == logged.operators * logged.accepted
        found = Engine(Shared(case.graph, case.topology, case.costs))
        if logged.accepted:
            assert after.operators != dict(zip(after.operators, before, strict=True))
            found.load(after)
            assert found.simulate() == chain.cost_ns


@pytest.mark.slow
def test_synchronizations_follow_the_boltzmann_distribution() -> None:
    case = enumerated()
    syncs = (SyncConfig(), parameter_server(2))
    costs_ns, engine = {}, Engine(Shared(case.graph, case.topology, case.costs))
    names = [tensor.name for tensor in case.graph.parameters]
    for chosen in product(syncs, repeat=len(names)):
        engine.load(case.start.with_changes(parameters=dict(zip(names, chosen, strict=True))))
        costs_ns[chosen] = engine.play()
    space = replace(case.space, syncs=dict.fromkeys(names, syncs))
    chain = CompiledChain(compiled_space(space, case.topology, case.costs), case.start, seed=1, proposals=12_000)
    chain.weights = {move: float(move == "sync") for move in MOVES}
    beta, start_ns = 3.0, chain.cost_ns
    assert start_ns == costs_ns[(SyncConfig(),) * len(names)]
    counts: Counter[tuple[SyncConfig, ...]] = Counter()
    for _ in range(12_000):
        chain.run(chain.proposals + 1, beta=beta, focus=1.0)
        strategy = chain.strategy
        assert chain.cost_ns == costs_ns[tuple(strategy.sync(name) for name in names)]
        counts[tuple(strategy.sync(name) for name in names)] += 1
    assert len(costs_ns) == 64 and len({*costs_ns.values()}) > 3
    weights = {key: exp(-beta * cost / start_ns) for key, cost in costs_ns.items()}
    total = sum(weights.values())
    assert sum(abs(counts[key] / 12_000 - weight / total) for key, weight in weights.items()) / 2 < 0.06
    assert chain.best_ns == min(costs_ns.values())
    assert costs_ns[tuple(chain.best.sync(name) for name in names)] == chain.best_ns
    entry = next(chain.log())
    assert (entry.move, entry.operators) == ("sync", 0) and -6 <= entry.operator < 0


def test_a_state_outside_of_the_space_is_left_for_good() -> None:
    case = enumerated()
    outside = api.classical("data_parallel", case.graph, case.topology)
    name = case.graph.operators[0].name
    config = outside.operators[name]
    outside = outside.with_operator(name, OpConfig((4, *(1 for _ in config.degrees[1:])), (0, 1, 0, 1)))
    chain = CompiledChain(compiled_space(case.space, case.topology, case.costs), outside, seed=5, proposals=300)
    assert chain.arrays.grid[0] == -1
    chain.run(300, beta=0.1, focus=0.0)
    assert key_of(chain.strategy) in case.cost_ns
    assert Simulator(case.graph, case.topology, case.costs).makespan_ns(chain.strategy) == chain.cost_ns


@pytest.mark.slow
def test_constraints_are_obeyed() -> None:
    """A pinned operator, one that must not be cut along a factor, and a device that nobody may use."""
    graph, topology = api.load("zoo:nmt:tiny", plan_only=True).graph, api.load_cluster("p100-4x4")
    allowed = parse(graph, 16, [("head*", "sample:4")], [("*lstm*", "replicas"), ("*", "@3,5")])
    space = build_space(graph, 16, allowed=allowed)
    starts = [brought_inside(space, s) for s in starting_strategies(graph, topology, None, None, 0).values()]
    space = replace(space, references=different(starts))
    compiled = compiled_space(space, topology, api.simulator_for(graph, topology).costs)
    chain = CompiledChain(compiled, starts[0], seed=1, proposals=3000)
    for step in range(1, 31):
        chain.run(100 * step, beta=20.0, focus=30.0)
        for op, own in zip(graph.operators, space.operators, strict=True):
            config = chain.strategy.operators[op.name]
            assert own.log_weight(config) > -inf
            assert not {3, 5} & set(config.devices)
    assert sum(counts.accepted for counts in chain.moves.values()) > 100
    assert all(counts.accepted > 0 for move, counts in chain.moves.items() if move not in ("segment", "sync", "recompute", "prefetch"))


@pytest.mark.long
@pytest.mark.slow
def test_a_chain_goes_on_from_another_strategy() -> None:
    space, simulator, starts = of_the_zoo()
    topology = simulator.topology
    chain = CompiledChain(compiled_space(space, topology, simulator.costs), starts["data_parallel"], seed=1, proposals=2000)
    for step in range(1, 21):
        chain.run(100 * step, beta=100.0, focus=100.0)
        assert chain.cost_ns == simulator.makespan_ns(chain.strategy)
        if step % 3 == 0:
            chain.run(chain.proposals + step % 4, beta=10.0, focus=0.0)  # so that either trial may be the current one
            chain.move_to(chain.best if step % 2 else starts["megatron"])
        assert chain.best_ns == simulator.makespan_ns(chain.best)
