"""How far workers may be apart, as a strategy says it, and who refuses what is stale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.simulator.engine import Engine
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.lowering import build_plan
from soap.simulator.shared import Shared
from soap.simulator.simulate import Simulator
from soap.strategy.classical import data_parallel
from soap.strategy.config import Strategy
from soap.strategy.consistency import MAX_BOUND, Consistency, parse
from soap.strategy.diff import compare
from soap.strategy.json_file import dumps, load_contents, strategy_hash
from tests.graph_builder import mlp
from tests.strategies import cluster

GRAPH, CLUSTER = mlp(), cluster([2, 2])
USUAL = data_parallel(GRAPH, CLUSTER)


@given(st.integers(0, MAX_BOUND))
def test_words(bound: int) -> None:
    assert parse(f"bounded:{bound}") == Consistency(f"bounded:{bound}", bound, stale=True)
    assert parse("sync") == Consistency("sync", 0, stale=False) and parse("async") == Consistency("async", None, stale=True)
    assert str(parse(str(parse(f"bounded:0{bound}")))) == f"bounded:{bound}"


@pytest.mark.parametrize("word", ["", "Sync", "bounded", "bounded:", "bounded:-1", "bounded:1.5", f"bounded:{MAX_BOUND + 1}", "bounded:٣"])
def test_other_words_are_refused_in_one_line(word: str) -> None:
    with pytest.raises(StrategyError, match=r"^consistency '.*': expected sync, bounded:D with D from 0 to 1000000, or async$"):
        Strategy({}, consistency=word)


def test_a_strategy_has_one_and_files_say_it() -> None:
    assert USUAL.consistency == "sync" and not USUAL.stale
    stale = replace(USUAL, consistency="bounded:04")
    assert stale.consistency == "bounded:4" and stale.stale and stale.with_changes() == stale
    text = dumps(stale, GRAPH, CLUSTER)
    assert '"consistency": "bounded:4"' in text and "consistency" not in dumps(USUAL, GRAPH, CLUSTER)
    assert load_contents(text).options == {"consistency": "bounded:4"}
    assert strategy_hash(stale, GRAPH) != strategy_hash(USUAL, GRAPH)
    found = compare(load_contents(text), load_contents(dumps(USUAL, GRAPH, CLUSTER)))
    assert found.options == (("consistency", "bounded:4", None),) and not found.equal


def reference(graph: OperatorGraph, topology: Topology, strategy: Strategy) -> object:
    return build_plan(graph, strategy, topology)


def engine(graph: OperatorGraph, topology: Topology, strategy: Strategy) -> object:
    own = Engine(Shared(graph, topology, RooflineCosts(topology)))
    own.load(strategy)
    return own


def whole(graph: OperatorGraph, topology: Topology, strategy: Strategy) -> object:
    simulator = Simulator(graph, topology, RooflineCosts(topology))
    simulator.run(replace(strategy, consistency="sync"))  # whose answer is kept
    return simulator.predict(strategy)


def delta(graph: OperatorGraph, topology: Topology, strategy: Strategy) -> object:
    evaluator = IncrementalSimulator(Simulator(graph, topology, RooflineCosts(topology)))
    evaluator.makespan_ns(replace(strategy, consistency="sync"))
    return evaluator.makespan_ns(strategy)


@pytest.mark.parametrize("simulate", [reference, engine, whole, delta])
def test_what_is_stale_has_no_step_to_simulate(simulate: Callable[[OperatorGraph, Topology, Strategy], object]) -> None:
    """Nothing takes a stale strategy for the exact one that it looks like."""
    for word in ("bounded:0", "async"):
        with pytest.raises(StrategyError, match=rf"^consistency {word}: the strategy is stale"):
            simulate(GRAPH, CLUSTER, replace(USUAL, consistency=word))
