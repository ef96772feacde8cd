"""The search of servers and workers: the best of all plans where all can be looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soap.cluster.topology import Topology
from soap.elastic import searching
from soap.elastic.faults import ElasticError
from soap.elastic.searching import Search, find, kinds
from soap.elastic.simulation.delays import Delays
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.strategy.consistency import parse
from soap.tracing.load import load_model
from tests.elastic.stars import star
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
    best = max(search.rate(choice) for choice in search.choices())
    assert search.count == len(search.rates)
    found = find(graph, topology, RooflineCosts(topology), 8, parse(word))
    assert search.rates[next(choice for choice in search.choices() if search.plan(choice) == found.plan)] == best
    assert found.possible == search.count >= found.simulated
    assert found.report.samples_per_second == pytest.approx(best, rel=0.02)
    assert found.plan.consistency == parse(word)


def test_bound_leaves_plans_out(graph: OperatorGraph) -> None:
    found = find(graph, CLUSTERS["narrow"], RooflineCosts(CLUSTERS["narrow"]), 8, parse("async"))
    assert found.simulated < found.possible


def test_descent_ends_where_no_change_is_better(graph: OperatorGraph) -> None:
    topology = CLUSTERS["mixed"]
    search = Search(graph, topology, RooflineCosts(topology), 8, parse("async"))
    possible = {*search.choices()}
    best = search.descent()
    simulated = len(search.rates)
    assert simulated < search.count
    assert all(search.rate(other) <= search.rate(best) for other in search._neighbours(best) if other in possible)
    assert len(search.rates) == simulated
    alike = [choice for choice in search.choices() if len({*choice.axes}) == 1]
    assert search.rate(best) >= max(map(search.rate, alike))


def test_delays_count(graph: OperatorGraph) -> None:
    topology, costs = star(2), RooflineCosts(star(2))
    even = find(graph, topology, costs, 8, parse("sync"))
    uneven = find(graph, topology, costs, 8, parse("sync"), delays=Delays(1.0), most_plans=0)
    assert uneven.report.samples_per_second < even.report.samples_per_second


def test_servers_that_hold_the_tables(graph: OperatorGraph) -> None:
    """Each machine has room for a little more than half of all, so two must be servers."""
    whole = sum(tensor.bytes for tensor in graph.parameters) * 2

    def limited(share: float) -> Topology:
        return replace(star(3), limits=(int(share * whole),) * 3)

    found = find(graph, limited(0.7), RooflineCosts(star(3)), 8, parse("async"))
    assert len(found.plan.servers) > 1
    with pytest.raises(ElasticError, match=r"have 3200 bytes; no servers among 3 machines hold them: add machines, or memory"):
        find(graph, limited(0.1), RooflineCosts(star(3)), 8, parse("async"))
    with pytest.raises(ElasticError, match="2 tables and 1 machines"):
        find(graph, star(1), RooflineCosts(star(1)), 8, parse("async"))


def test_machines_that_are_alike() -> None:
    assert kinds(star([CPU, SLOW, CPU])) == [(0, 2), (1,)]
    assert searching._apart((1, 0), (0, 1)) == 2
