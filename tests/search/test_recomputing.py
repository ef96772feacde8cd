"""Recomputation in searches: only where memory binds or if it is asked for; then what is too large is found a way to fit."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest

from soap.cli import plan_summary
from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.search.chains import search
from soap.search.compiled.memory import MOVES
from soap.search.compiled.runner import CompiledChain
from soap.search.constraints import brought_inside, parse
from soap.search.descent import recompute
from soap.search.options import SearchOptions
from soap.search.recomputing import recompute_to_fit, recomputing_starts, with_recomputation
from soap.search.space import build_space
from soap.search.starts import Start, memory_binds
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.simulate import Simulator
from soap.strategy.classical import NAMED, data_parallel
from soap.strategy.config import Strategy, SyncConfig
from soap.strategy.named import MOST_SAVING, named
from soap.strategy.recomputation import LIGHT, RECOMPUTED, STAYS, recomputed, repeatable, run_levels, runs_of, with_levels
from soap.strategy.sync import sync_choices
from tests.graph_builder import GraphBuilder, transformer
from tests.search.toys import compiled_space
from tests.strategies import CPU, cluster

LAYERS = 6


def wide() -> OperatorGraph:
    """Layers that are wide inside and narrow between each other, of a batch beside which parameters are small."""
    g = GraphBuilder("wide")
    x = g.input("x", 512, 8)
    for i in range(LAYERS):
        x = g.linear(g.elementwise(g.linear(x, 256, name=f"{i}.up"), name=f"{i}.act"), 8, name=f"{i}.down")
    return g.build(g.mean(x, name="mean"))


GRAPH = wide()


def limited(memory_bytes: int) -> Topology:
    return cluster([1, 1], replace(CPU, memory_bytes=memory_bytes))


AMPLE = limited(2**30)
SIMULATOR = Simulator(GRAPH, AMPLE, RooflineCosts(AMPLE))


def marks(strategy: Strategy) -> set[str]:
    return {name for name, config in strategy.operators.items() if config.recompute}


def found(topology: Topology, **options: object) -> Strategy:
    usual = SearchOptions(budget=120, cores=1, starts=["data_parallel"], risk=None, forbidden=[("*", "parameter,reduction,replicas")])
    simulator = IncrementalSimulator(Simulator(GRAPH, topology, RooflineCosts(topology)))
    return search(GRAPH, topology, simulator, replace(usual, **options)).strategy  # type: ignore[arg-type]


def test_a_model_of_a_few_bytes_has_runs_as_well() -> None:
    g = GraphBuilder()
    x = g.input("x", 1, 1)
    for _ in range(3):
        x = g.elementwise(g.elementwise(g.linear(x, 2)), x)
    assert all(run for run in runs_of(g.build(g.mean(x))))


def test_runs_lie_between_narrow_places() -> None:
    assert runs_of(GRAPH) == tuple((f"{i}.up", f"{i}.act") for i in range(LAYERS - 1))  # the last one is needed at once
    blocks = runs_of(transformer(layers=3))
    assert all(f"{i}.add2" not in run for run in blocks for i in range(2)) and len(blocks) >= 3
    assert len({name for run in blocks for name in run}) == sum(map(len, blocks))


def test_only_what_is_faster_and_does_not_fit_binds() -> None:
    fast, slow = Start("a", Strategy({}), 10, 0), Start("b", Strategy({}), 20, 5)
    assert not memory_binds([fast, slow]) and memory_binds([slow]) and memory_binds([replace(fast, overflow_bytes=1), slow])
    assert memory_binds([replace(fast, overflow_bytes=1), replace(slow, overflow_bytes=0)])


def test_nothing_is_recomputed_where_all_fits() -> None:
    assert not marks(found(AMPLE))


@pytest.mark.slow
def test_where_memory_binds_runs_are_recomputed_and_nothing_else_fits() -> None:
    kept = max(SIMULATOR.run(data_parallel(GRAPH, AMPLE)).peak_bytes)
    least = max(SIMULATOR.run(recomputed(GRAPH, data_parallel(GRAPH, AMPLE))).peak_bytes)
    assert least < 0.8 * kept
    topology = limited((kept + least) // 2)
    chosen = found(topology)
    assert marks(chosen) and Simulator(GRAPH, topology, RooflineCosts(topology)).run(chosen).fits
    pinned = found(topology, pins=[("5.up", "recompute")], forbidden=[("0.*", "recompute")])
    assert "5.up" in marks(pinned) and not any(name.startswith("0.") for name in marks(pinned))


def test_no_more_runs_are_recomputed_than_it_takes() -> None:
    usual = data_parallel(GRAPH, AMPLE)
    kept = max(SIMULATOR.run(usual).peak_bytes)
    for share in (0.9, 0.75):
        topology = limited(int(share * kept))
        simulator = Simulator(GRAPH, topology, RooflineCosts(topology))
        made = recompute_to_fit(GRAPH, topology, usual, simulator.costs, simulator.peak_share)
        assert simulator.run(made.strategy).fits and 0 < made.runs < made.of_runs
        held = {name: config.recompute for name, config in made.strategy.operators.items() if config.recompute}
        chosen = [k for k, levels in enumerate(run_levels(GRAPH, RECOMPUTED)) if levels.keys() <= held.keys()]
        assert len(chosen) == made.runs and made.selective == sum(held[f"{k}.up"] == LIGHT for k in chosen)
        last = run_levels(GRAPH, RECOMPUTED)[chosen[-1]]
        assert not simulator.run(with_levels(made.strategy, dict.fromkeys(last, STAYS))).fits
        assert made.least_ns < made.added_ns and (made.gap == inf) == (made.least_ns == 0)


def test_results_say_how_near_the_fewest_runs_are_to_the_best_choice() -> None:
    topology = limited(int(0.75 * max(SIMULATOR.run(data_parallel(GRAPH, AMPLE)).peak_bytes)))
    simulator = Simulator(GRAPH, topology, RooflineCosts(topology))
    options = SearchOptions(budget=5, cores=1, starts=["data_parallel"], risk=None, syncs=[SyncConfig()])
    result = search(GRAPH, topology, IncrementalSimulator(simulator), options, polish_up_to=0)
    (name,) = result.budgeted
    made = recompute_to_fit(GRAPH, topology, data_parallel(GRAPH, topology), simulator.costs, simulator.peak_share)
    assert name == "data_parallel, recompute" and result.budgeted[name] == made and made.runs > 1
    told = plan_summary.budgeted(name, made)
    assert told["gap"] == made.added_ns / made.least_ns - 1 > 0 and (told["runs"], told["of_runs"]) == (made.runs, made.of_runs)
    assert told["selective"] == made.selective and f"{made.runs} of {made.of_runs} runs" in plan_summary.budgeted_text(told)
    assert f"at most {made.gap:.1%} more than any choice of runs" in plan_summary.budgeted_text(told)
    alone = plan_summary.budgeted(name, replace(made, runs=1, least_ns=0))
    assert alone["gap"] is None and plan_summary.budgeted_text(alone).endswith("one step is enough, so nothing less is")


def test_what_saves_most_is_a_start_where_owners_may_be_shared() -> None:
    evaluator = IncrementalSimulator(SIMULATOR)
    lacking = [Start("data_parallel", data_parallel(GRAPH, AMPLE), 10, 5)]
    for syncs, expected in (({}, False), (sync_choices(GRAPH, AMPLE, saving=True), True)):
        more = recomputing_starts(build_space(GRAPH, 2, syncs=syncs), AMPLE, evaluator, lacking, wanted=None)
        assert more is not None and (MOST_SAVING in more[0]) == expected
        assert not expected or more[0][MOST_SAVING] == named(MOST_SAVING, GRAPH, AMPLE)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_move_marks_sets_alone(share: float) -> None:
    space, draw = with_recomputation(build_space(GRAPH, 2)), random.Random(1)
    names = [name for name in sorted(repeatable(GRAPH)) if draw.random() < share]
    strategy = recomputed(GRAPH, data_parallel(GRAPH, AMPLE), names)
    proposals = [own for own in (recompute(draw, space, strategy) for _ in range(40)) if own is not None]
    assert proposals
    for own in proposals:
        before, after = ({found.operators[name].recompute for name in own.operators} for found in (strategy, own.strategy))
        assert before != after and own.strategy.with_changes({n: strategy.operators[n] for n in own.operators}) == strategy


def test_compiled_chains_toggle_marks_alone() -> None:
    strategy = data_parallel(GRAPH, AMPLE)
    space = with_recomputation(build_space(GRAPH, 2))
    chain = CompiledChain(compiled_space(space, AMPLE, RooflineCosts(AMPLE)), strategy, seed=2, proposals=60)
    chain.weights = {move: float(move == "recompute") for move in MOVES}
    seen = set()
    for proposals in range(6, 61, 6):
        chain.run(proposals, beta=1e-3, focus=0.0)
        seen.add(frozenset(marks(chain.strategy)))
        assert {name: own.placed_like(config) for (name, own), config in zip(chain.strategy.operators.items(), strategy.operators.values(),
                strict=True)} == dict(chain.strategy.operators)
    assert len(seen) > 4 and not marks(chain.best)  # what fits never gains time by it
    assert chain.cost_ns == Simulator(GRAPH, AMPLE, RooflineCosts(AMPLE)).run(chain.strategy).makespan_ns


def test_the_move_is_out_of_reach_where_nothing_may_be_recomputed() -> None:
    space = compiled_space(build_space(GRAPH, 2), AMPLE, RooflineCosts(AMPLE))
    chain = CompiledChain(space, data_parallel(GRAPH, AMPLE), seed=2, proposals=9)
    assert chain.weights["recompute"] == 0


def test_the_strategy_of_that_name() -> None:
    strategy = NAMED["recompute"](GRAPH, AMPLE)
    ends = {f"{i}.down" for i in range(LAYERS - 1)}  # which keep what they make
    assert marks(strategy) == {name for run in runs_of(GRAPH) for name in run} | ends
    assert {name for name, config in strategy.operators.items() if config.recompute == LIGHT} == ends
    assert recomputed(GRAPH, data_parallel(GRAPH, AMPLE)) == strategy
    selective = named("data_parallel+selective", GRAPH, AMPLE)
    levels = {name: config.recompute for name, config in selective.operators.items() if config.recompute}
    assert levels == {name: RECOMPUTED if name.endswith(".act") else LIGHT for name in marks(strategy)}


@pytest.mark.parametrize(
    ("pins", "forbidden", "message"),
    [
        ([("mean", "recompute")], [("mean", "recompute")], "to be recomputed by pins and not by forbidden"),
        ([("table", "recompute")], [], "must not be recomputed: it looks rows up"),
    ],
)
def test_constraints_that_cannot_be_met(pins: list[tuple[str, str]], forbidden: list[tuple[str, str]], message: str) -> None:
    g = GraphBuilder()
    x = g.embedding(g.input("ids", 4, 1, dtype="int64"), 8, 4, name="table")
    graph = g.build(g.mean(g.linear(x, 4, name="layer")))
    names = {op.kind: op.name for op in graph.operators}
    pins, forbidden = ([(names.get(name, name), spec) for name, spec in own] for own in (pins, forbidden))
    with pytest.raises(StrategyError, match=message):
        parse(graph, 2, pins, forbidden)


def test_pins_mark_and_unmark() -> None:
    space = build_space(GRAPH, 2, allowed=parse(GRAPH, 2, [("*.up", "recompute"), ("1.act", "b:2,recompute")], [("*.down", "recompute")]))
    inside = brought_inside(space, recomputed(GRAPH, data_parallel(GRAPH, AMPLE), ["0.down", "2.act"]))
    assert marks(inside) == {*(f"{i}.up" for i in range(LAYERS)), "1.act", "2.act"}
    toggled = {GRAPH.operators[each.position].name for own in with_recomputation(space).by_field["recompute"] for each in own}
    assert toggled == {*(f"{i}.act" for i in range(LAYERS) if i != 1), "mean"}
