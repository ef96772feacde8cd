"""What the benchmarks of servers and workers keep and say, of made-up rounds; and that their parts fit together."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import bipartite, egress, kept, sparse_designs
from benchmarks.bipartite import DATA_PARALLEL, HOGWILD, MODEL, Round, bench_of, page, plans
from benchmarks.elastic_work import Measuring
from benchmarks.shared_processor import SharedProcessor
from soap.elastic.leases import Steps
from soap.elastic.simulation.design import design_of, three_designs
from soap.errors import SoapError
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


def test_the_page_has_medians_and_errors() -> None:
    slower = replace(ROUND, number=1, measured={**ROUND.measured, NAMES[0]: 80.0})
    text = page([ROUND, slower, replace(ROUND, number=2)])
    assert f"| {NAMES[0]} | 110 | 100 | +10.0% | 50% | 25% |" in text
    assert f"| {HOGWILD} | | 300 | | | |" in text
    assert "2 plans: median error 10.0%, most 10.0% (aim 15%)." in text
    assert "3 rounds; others used 3% at most." in text


def test_rounds_are_kept_and_anything_else_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rounds.json"
    kept.write(path, [asdict(ROUND)], bipartite.VERSION)
    assert bipartite.read(path) == [ROUND]
    path.write_text('{"version": 2, "cells": [{}]}')
    with pytest.raises(SoapError, match=r"expected a file of benchmarks\.bipartite"):
        bipartite.read(path)


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


def test_formulas_of_egress() -> None:
    """The published ones, with S of our bytes, at full_sparse's size: 512 samples of 192 entries, 96 columns."""
    entries, sums = 16 * 192 * 512, 4 * 512 * 96
    found = {(plan, servers, name): value for plan in PLANS for servers in (2, 4) for name, _, (_, value) in egress.kinds(plan, servers)}
    assert found == {
        ("bipartite, rows", 2, "worker"): entries + 2 * sums,
        ("bipartite, rows", 2, "servers"): sums,
        ("bipartite, rows", 4, "worker"): entries + 4 * sums,
        ("bipartite, rows", 4, "servers"): sums,
        ("bipartite, columns", 2, "worker"): 2 * entries + sums,
        ("bipartite, columns", 2, "servers"): sums / 2,
        ("bipartite, columns", 4, "worker"): 4 * entries + sums,
        ("bipartite, columns", 4, "servers"): sums / 4,
        ("fully connected, rows", 2, "each"): entries / 2 + 2 * sums,
        ("fully connected, rows", 4, "each"): 3 * entries / 4 + 6 * sums,
    }
    own = egress.Node("bipartite, rows", 2, "worker", "S + 4 P B out", 900.0, 100.0, 1010.0)
    assert own.off == pytest.approx(0.01)
    assert "| bipartite, rows | 2 | worker | S + 4 P B out | 900 | 100 | 1,000 | 1,010 | +1.00% |" in egress.page([own])


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
