"""What the benchmarks of servers and workers keep and say, of made-up rounds; and that their parts fit together."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import bipartite, kept, sparse_designs
from benchmarks.bipartite import DATA_PARALLEL, EGRESS, HOGWILD, MODEL, Round, bench_of, page, plans
from benchmarks.elastic_work import Measuring
from soap.elastic.simulation.design import design_of, three_designs
from soap.elastic.steps import Steps
from soap.emulation.shared_processor import SharedProcessor
from soap.errors import SoapError
from soap.strategy.consistency import parse
from soap.tracing.load import load_model
from tests.elastic.test_owners import ADAGRAD, SOURCE, layout_of, samples

NAMES = ("1 server, 1 workers", "2 servers, 4 workers")
ROUND = Round(
    0,
    {name: 110.0 for name in NAMES},
    {**{name: 100.0 for name in NAMES}, HOGWILD: 300.0, DATA_PARALLEL: 50.0},
    {name: 0.5 for name in NAMES},
    {name: 0.25 for name in NAMES},
    [[servers, 1600, 1600, 800, 800] for servers in EGRESS],
    "a box",
    0.03,
)


def test_the_page_has_medians_errors_and_counted_bytes() -> None:
    slower = replace(ROUND, number=1, measured={**ROUND.measured, NAMES[0]: 80.0})
    text = page([ROUND, slower, replace(ROUND, number=2)])
    assert f"| {NAMES[0]} | 110 | 100 | +10.0% | 50% | 25% |" in text
    assert f"| {HOGWILD} | | 300 | | | |" in text
    assert "2 plans: median error 10.0%, most 10.0% (aim 15%)." in text
    assert "3 rounds; others used 3% at most." in text
    assert "| 2 | 100 | 100 | 1966080 | 50 | 50 | 393216 |" in text  # of 16 leases


def test_rounds_are_kept_and_anything_else_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rounds.json"
    kept.write(path, [asdict(ROUND)], bipartite.VERSION)
    assert bipartite.read(path) == [ROUND]
    path.write_text('{"version": 1, "cells": [{}]}')
    with pytest.raises(SoapError, match=r"expected a file of benchmarks\.bipartite"):
        bipartite.read(path)


def test_plans_fit_the_model_and_the_hosts() -> None:
    graph = load_model(MODEL, plan_only=True).graph
    found = {name: design_of(plan, graph) for name, plan in plans(graph).items()}
    assert len(found) == 11
    assert max(max(design.roles) for design in found.values()) == bipartite.HOSTS - 1
    columns = {graph.tensors[name].shape[1] for name in graph.sparse}
    entries = sum(access.indices for access in graph.sparse.values()) // 2048
    assert (len(graph.sparse) * columns.pop(), entries) == (bipartite.COLUMNS, bipartite.ENTRIES)


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
def test_hosts_train_and_send_what_is_planned() -> None:
    with bench_of(3, "1Gbit/s") as bench:
        _, sent, planned, answered, answers = bench.egress(2)
    for counted, messages in ((sent, planned), (answered, answers)):
        assert messages <= counted <= 1.01 * messages  # what was lost is sent again
