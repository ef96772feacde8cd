"""Which samples of a batch each device reads, from the plan alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import soap
from soap.cluster.presets import local_topology
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph, TensorKind
from soap.plan.planning import build_plan
from soap.plan.samples import Samples, divided_inputs, given_bytes, joined, pieces_read, samples_read
from soap.strategy.classical import CLASSICAL
from soap.strategy.config import Strategy
from tests.graph_builder import GraphBuilder, mlp
from tests.runtime.plans import plan_of, split
from tests.strategies import cases


@given(cases(max_devices=3))
def test_each_tile_finds_its_samples_and_nothing_else_is_read(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, strategy = case
    plan = build_plan(graph, strategy, topology)
    divided = divided_inputs(graph)
    wanted: dict[tuple[int, str], set[int]] = {}
    found = [samples_read(plan, device, divided) for device in range(plan.device_count)]
    for tile in plan.tiles:
        for operand, box in zip(plan.operator(tile).inputs, tile.inputs, strict=True):
            if graph.tensors[operand.tensor].kind is TensorKind.INPUT and operand.tensor in divided:
                read, (start, stop) = found[tile.device][operand.tensor], box[divided[operand.tensor]]
                here, there = read.place((start, stop))
                assert read.indices[here:there] == list(range(start, stop))
                wanted.setdefault((tile.device, operand.tensor), set()).update(range(start, stop))
    for device, own in enumerate(found):
        for name, read in own.items():
            assert read.count == len(read.indices)
            if read.dim is not None:
                assert set(read.indices) == wanted.get((device, name), set())


def test_data_parallelism_reads_each_sample_once() -> None:
    eight = local_topology(8)
    graph = mlp(batch=24)
    plan = build_plan(graph, CLASSICAL["data_parallel"](graph, eight), eight)
    for device in range(8):
        own = samples_read(plan, device, divided_inputs(graph))
        assert {name: read.intervals for name, read in own.items()} == dict.fromkeys(("x", "y"), ((3 * device, 3 * device + 3),))


def test_samples_apart_and_inputs_that_are_read_whole() -> None:
    plan = plan_of(mlp(batch=8), split((0, 1, 0, 2), b=4))
    divided = divided_inputs(plan.graph)
    assert samples_read(plan, 0, divided)["x"] == Samples(0, 8, ((0, 2), (4, 6)))
    assert [samples_read(plan, device, divided, ["y"])["y"].intervals for device in range(4)] == [((0, 8),)] * 3 + [()]
    assert samples_read(plan, 1, {})["x"] == Samples(None, 0, ())


def test_an_input_without_samples_is_not_divided() -> None:
    g = GraphBuilder("two lengths")
    x = g.linear(g.input("x", 6, 4), 4)
    y = g.linear(g.input("y", 6, 4), 4)
    z = g.linear(g.input("z", 3, 4), 4)
    graph = g.build(g.sum(g.mean(x), g.mean(y), g.mean(z)))
    assert divided_inputs(graph) == {"x": 0, "y": 0}


def test_labels_that_a_mean_counts_are_shared_out_with_the_samples() -> None:
    """Which is what devices are given only if batches come in parts."""
    graph, topology = soap.load("zoo:gpt:tiny", plan_only=True).graph, local_topology(4)
    strategy = CLASSICAL["data_parallel"](graph, topology)
    words, labels = (graph.tensors[name].bytes for name in ("sequences", "labels"))
    assert divided_inputs(graph) == {"sequences": 0, "labels": 0}
    for given_parts in (True, False):
        plan = build_plan(graph, strategy, replace(topology, own_samples=given_parts))
        for device in range(4):
            own = samples_read(plan, device, divided_inputs(graph))
            assert (own["sequences"].count, own["labels"].count) == (2, 2)
        assert given_bytes(plan) == [words + labels // (4 if given_parts else 1)] * 4  # words name rows of a table


def test_places_and_pieces() -> None:
    read = Samples(0, 12, ((1, 3), (6, 10)))
    assert [read.place(own) for own in ((1, 3), (2, 3), (6, 10), (7, 9), (5, 5))] == [(0, 2), (1, 2), (2, 6), (3, 5), (0, 0)]
    with pytest.raises(ValueError, match="samples 2 to 6: expected some of"):
        read.place((2, 7))
    assert pieces_read([read, Samples(0, 12, ((0, 2), (8, 12)))]) == [(0, 1), (1, 2), (2, 3), (6, 8), (8, 10), (10, 12)]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))))
def test_joined_intervals_have_the_same_numbers(intervals: list[tuple[int, int]]) -> None:
    found = joined(intervals)
    assert [i for a, b in found for i in range(a, b)] == sorted({i for a, b in intervals for i in range(a, b)})
    assert all(stop < start for (_, stop), (start, _) in pairwise(found))
