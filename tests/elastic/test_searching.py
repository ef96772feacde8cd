"""The search of servers and workers: the best of all plans where all can be looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soap.cluster.topology import Topology
from soap.elastic.faults import ElasticError
from soap.elastic.searching import PlanSpace, Search, kinds
from soap.elastic.simulation.steady import Delays
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.strategy.consistency import parse
from soap.tracing.load import load_model
from tests.elastic.stars import star
from tests.graph_builder import GraphBuilder
from tests.strategies import CPU

SLOW = replace(CPU, name="slow", memory_bandwidth_bytes_per_second=CPU.memory_bandwidth_bytes_per_second / 4)
CLUSTERS = {"alike": star(3, 1e8), "mixed": star([CPU, SLOW, CPU], 1e9), "narrow": star(3, 1e6)}


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return load_model("zoo:full_sparse:tiny", plan_only=True).graph


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("alike", "async"),
        ("mixed", "sync"),
        *(pytest.param(name, word, marks=pytest.mark.long) for name in CLUSTERS for word in ("async", "bounded:1", "sync")),
    ],
)
def test_found_plan_is_the_best_of_all(graph: OperatorGraph, name: str, word: str) -> None:
    topology = CLUSTERS[name]
    search = Search(graph, topology, RooflineCosts(topology), 8, parse(word))
    best = max(search.rate(choice) for choice in search.space.choices())
    assert search.count >= len(search.rates) == len({*search.space.choices()})
    found = Search(graph, topology, RooflineCosts(topology), 8, parse(word)).find()
    assert search.rates[next(choice for choice in search.space.choices() if search.space.plan(choice) == found.plan)] == best
    assert found.possible == search.count >= found.simulated
    assert found.report.samples_per_second == pytest.approx(best, rel=0.02)
    assert found.plan.consistency == parse(word)


def test_bound_leaves_plans_out(graph: OperatorGraph) -> None:
    found = Search(graph, CLUSTERS["narrow"], RooflineCosts(CLUSTERS["narrow"]), 8, parse("async")).find()
    assert found.simulated < found.possible


@pytest.mark.slow
def test_descent_ends_where_no_change_is_better(graph: OperatorGraph) -> None:
    topology = CLUSTERS["mixed"]
    search = Search(graph, topology, RooflineCosts(topology), 8, parse("async"))
    best = search.descent()
    simulated = len(search.rates)
    assert simulated < search.count
    assert all(search.rate(other) <= search.rate(best) for other in search.space.neighbours(best))
    assert {*search.space.neighbours(best)} <= {*search.space.choices()}
    alike = [choice for choice in search.space.choices() if len({*choice.axes}) == 1]
    assert search.rate(best) >= max(map(search.rate, alike))


@pytest.mark.slow
def test_delays_count(graph: OperatorGraph) -> None:
    topology, costs = star(2), RooflineCosts(star(2))
    even = Search(graph, topology, costs, 8, parse("sync")).find()
    uneven = Search(graph, topology, costs, 8, parse("sync"), delays=Delays(1.0)).find(most_plans=0)
    assert uneven.report.samples_per_second < even.report.samples_per_second


def test_servers_that_hold_the_tables(graph: OperatorGraph) -> None:
    """Each machine has room for a little more than half of all, so two must be servers."""
    whole = sum(tensor.bytes for tensor in graph.parameters) * 2

    def limited(share: float) -> Topology:
        return replace(star(3), limits=(int(share * whole),) * 3)

    found = Search(graph, limited(0.7), RooflineCosts(star(3)), 8, parse("async")).find()
    assert len(found.plan.servers) > 1
    with pytest.raises(ElasticError, match=r"have 3200 bytes; no servers among 3 machines hold them: add machines, or memory"):
        Search(graph, limited(0.1), RooflineCosts(star(3)), 8, parse("async")).find()
    with pytest.raises(ElasticError, match="2 tables and 1 machines"):
        Search(graph, star(1), RooflineCosts(star(1)), 8, parse("async")).find()


def test_workers_share_the_samples_of_the_model(graph: OperatorGraph) -> None:
    """Of three workers that would be left two divide its 8 samples, the quicker ones."""
    space = PlanSpace(graph, star([SLOW, CPU, CPU, CPU]), None, parse("async"))
    plans = {choice: space.plan(choice) for choice in space.choices()}
    assert all(plan.batch * len(plan.workers) == 8 for plan in plans.values())
    assert {plan.workers for choice, plan in plans.items() if choice.servers == (0, 1)} == {(2, 3)}
    assert {(plan.servers, plan.workers) for choice, plan in plans.items() if choice.servers is None} == {((0, 1, 2, 3),) * 2}
    said = {(own.workers, own.servers, *((name, cut.axis, cut.servers) for name, cut in own.tables.items())) for own in plans.values()}
    assert len(said) == len(plans)  # none comes twice


@pytest.mark.slow
def test_many_tables_are_searched_without_counting_all_plans() -> None:
    g = GraphBuilder("many")
    found = [g.embedding(g.input(f"ids{i}", 12, 1, dtype="int64"), 6, 4, name=f"table{i}") for i in range(30)]
    graph, topology = g.build(g.mean(g.linear(g.elementwise(*found, name="sum"), 3, name="top"), name="loss")), star(4, 1e7)
    best = Search(graph, topology, RooflineCosts(topology), None, parse("async")).find()
    assert best.possible > 2**30 and not best.proven and best.simulated < 20


def test_machines_that_are_alike() -> None:
    assert kinds(star([CPU, SLOW, CPU])) == [(0, 2), (1,)]
