"""The table of what a lower precision is worth."""

from __future__ import annotations

import pytest

from benchmarks.precision import READINGS, one_device, page, predicted
from soap.cluster.presets import device_types
from soap.model.graph import OperatorGraph
from tests.graph_builder import GraphBuilder

H200 = one_device(device_types()["h200"])


def layer(width: int) -> OperatorGraph:
    """One product of ``width`` x ``width`` matrices."""
    g = GraphBuilder()
    return g.build(g.mean(g.linear(g.input("x", width, width), width, bias=False)))


def test_large_products_are_bound_by_arithmetic_and_small_ones_by_memory() -> None:
    large, small = predicted(layer(16384), H200), predicted(layer(64), H200)
    assert large[1] < 0.01 < 0.99 < small[1] and large[0] > small[0]


@pytest.mark.long
def test_the_table_has_a_column_for_each_precision() -> None:
    lines = page("h200", ["zoo:gpt:tiny"]).splitlines()
    (row,) = [line for line in lines if line.startswith("| gpt:tiny |")]
    assert row.count("%") == len(READINGS) and row.count(" ms") == len(READINGS)
