"""What the benchmarks of servers and workers keep and say, of made-up rounds; and that their parts fit together."""

from __future__ import annotations

import os

import pytest

from benchmarks import bipartite, egress, sparse_designs
from benchmarks.bipartite import DATA_PARALLEL, HOGWILD, MODEL, Round, bench_of, plans
from benchmarks.elastic_work import Measuring
from benchmarks.shared_processor import SharedProcessor
from soap.elastic.leases import Steps
from soap.elastic.simulation.design import design_of, three_designs
from soap.strategy.consistency import parse
from soap.tracing.load import load_model
from tests.elastic.test_owners import ADAGRAD, SOURCE, layout_of, samples

NAMES = ("1 server, 1 workers", "2 servers, 4 workers")
PLANS = ("bipartite, rows", "bipartite, columns", "fully connected, rows")
ROUND = Round(
    0,
    {name: 110.0 for name in NAMES},
    {**{name: 100.0 for name in NAMES}, HOGWILD: 300.0, DATA_PARALLEL: 50.0},
    {name: 0.5 for name in NAMES},
    {name: 0.25 for name in NAMES},
    "a box",
    0.03,
)


def test_plans_fit_the_model_and_the_hosts() -> None:
    graph = load_model(MODEL, plan_only=True).graph
    found = {name: design_of(plan, graph) for name, plan in plans(graph).items()}
    assert len(found) == 11
    assert max(max(design.roles) for design in found.values()) == bipartite.HOSTS - 1
    columns = {graph.tensors[name].shape[1] for name in graph.sparse}
    entries = sum(access.indices for access in graph.sparse.values()) // 2048
    assert (len(graph.sparse) * columns.pop(), entries) == (egress.COLUMNS, egress.ENTRIES)


def test_all_parts_of_a_lease_are_measured() -> None:
    device = SharedProcessor(1.0)
    found = Measuring(device, SOURCE, samples(16), layout_of(1, 2, 0), ADAGRAD).all(8)
    tabled = {(kind, place) for kind in ("look up", "gradient", "count") for place in range(4)}
    assert {*found} == {("front", 0), ("rest", 0), ("pull", 4), ("count", 4), *tabled}
    assert min(found.values()) > 0
    together = Measuring(device, SOURCE, samples(16), layout_of(1, 2, 0), ADAGRAD, Steps(2**40, 2)).all(8)
    assert {*together} == {*found, *(("update", place) for place in range(5))} and min(together.values()) > 0


def test_designs_of_the_publication() -> None:
    graph = load_model(sparse_designs.MODEL, plan_only=True).graph
    assert sparse_designs.one_pipeline(graph) == pytest.approx(14.53, abs=0.01)
    found = three_designs(graph, range(4), parse("async"), sparse_designs.BATCH)
    assert {name: len(design.stateful) for name, design in found.items()} == {"naive": 2, "fully connected": 4, "bipartite": 1}


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="emulated hosts need root")
@pytest.mark.timeout(900)
def test_network_cards_count_what_the_formulas_say() -> None:
    """One, two and four servers, by rows and by columns, and fully connected."""
    with bench_of(egress.HOSTS, egress.RATE) as bench:
        found = [one for (plan, servers), design in egress.designs(bench).items() for one in egress.nodes(plan, servers, design, bench)]
    assert len(found) == 3 * 2 * 2 + 2
    for own in found:
        least = -1e-3 if own.plan.startswith("bipartite") else -0.02  # of whichever batches a worker had
        assert least < own.off < 0.05, own  # what was lost is sent again
