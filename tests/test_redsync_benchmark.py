"""RedSync's page: what is simulated for it, and what it says."""

from __future__ import annotations

import pytest

from benchmarks import redsync
from benchmarks.redsync import SAMPLES, Cell, cell, graph_of, page
from soap.plan.compression.policy import layer_of


@pytest.mark.slow
def test_nets_are_the_papers() -> None:
    assert sum(tensor.bytes for tensor in graph_of("vgg16", 2).parameters) == 4 * 138_357_544
    lstm = graph_of("lstm", 2)
    assert {tensor.shape for tensor in lstm.parameters} >= {(10_000, 1500), (6000, 1500)}
    assert layer_of(lstm, "head.weight").kind == "output"
    assert SAMPLES.keys() == redsync.PAPER.keys()


def test_the_page_has_a_line_for_each_cell() -> None:
    own = Cell("lstm", 4, 40_000_000, (20_000_000, 25_000_000), (0.25, 0.01, 0.03, 0.06))
    text = page([own], [own])
    assert text.count("| lstm | 4 | 40.0 ms | 20.0 ms | 2.00 | 1.60 | 25% | 1% | 3% | 6% |") == 2
    assert all(len(line) <= 140 for line in text.splitlines())


@pytest.mark.slow
def test_the_lstm_gains_and_its_selection_takes_time() -> None:
    found = cell("lstm", "piz-daint-4")
    rgc, asq = found.rivals
    assert rgc < asq < found.dense_ns and 0.1 < found.shares[0] < 0.5
