"""Strategies that split sequences: who computes what, what travels, and that no operator is computed twice."""

from __future__ import annotations

import pytest
from hypothesis import given

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.planning import build_plan
from soap.strategy.classical import LONG_CONTEXT, context_parallel, data_parallel, megatron, sequence_parallel, single_device
from tests.graph_builder import mlp, transformer
from tests.strategies import cluster, graphs, topologies
from tests.test_strategies import moved, shared_parameters, split

GROUP = (0, 1, 2, 3)


@given(graphs(), topologies(max_devices=6))
def test_they_are_legal_and_can_be_planned(graph: OperatorGraph, topology: Topology) -> None:
    for strategy in LONG_CONTEXT.values():
        build_plan(graph, strategy(graph, topology), topology)


@pytest.mark.parametrize("name", LONG_CONTEXT)
def test_on_one_device_they_are_the_same(name: str) -> None:
    graph, topology = transformer(), cluster([1])
    assert LONG_CONTEXT[name](graph, topology) == single_device(graph, topology)


def test_models_without_sequences() -> None:
    graph, topology = mlp(), cluster([4])
    assert context_parallel(graph, topology) == data_parallel(graph, topology)
    assert sequence_parallel(graph, topology) == megatron(graph, topology)


@pytest.mark.parametrize("joint", [False, True])
def test_sequence_parallel_scatters_sums_between_split_parts(joint: bool) -> None:
    graph, topology = transformer(length=8, joint=joint), cluster([4])
    strategy, before = sequence_parallel(graph, topology), megatron(graph, topology)
    found, usual = split(graph, strategy), split(graph, before)
    between = [name for name, (degrees, _) in usual.items() if degrees == {"replicas": 4} and name != "copy1"]  # it has no samples
    assert {"0.norm1", "0.add1", "0.norm2", "0.add2", "norm"} <= set(between)
    for name in between:
        degrees, devices = found[name]
        assert devices == GROUP
        assert len(degrees) == 1 and "replicas" not in degrees and set(degrees.values()) == {4}, name
    assert {name: own for name, own in found.items() if name not in between} == {n: own for n, own in usual.items() if n not in between}
    plan = build_plan(graph, strategy, topology)
    scattered = [graph.operators[r.operator].name for r in plan.reductions if r.cells]
    assert scattered == ["embedding", "0.proj", "0.fc2", "1.proj", "1.fc2"]
    gathered = moved(graph, topology, strategy)  # each device gets the other three quarters of 8 samples of 8 positions of 16 features
    assert gathered["0.fc1"] == gathered["head"] == 4 * 8 * 8 * 16 * 3 // 4
    assert not {"0.norm1", "0.add1", "0.norm2", "0.gelu", "0.fc2"} & set(gathered)


def test_context_parallel_gathers_keys_and_values_alone() -> None:
    graph, topology = transformer(length=8), cluster([4])
    strategy = context_parallel(graph, topology)
    found = {name: own for name, own in split(graph, strategy).items() if name != "copy1"}  # a copy of a parameter, everywhere
    assert all(devices == GROUP and set(degrees.values()) == {4} for degrees, devices in found.values())
    assert not any("replicas" in degrees for degrees, _ in found.values())
    assert not any("b" in degrees for degrees, _ in found.values())
    assert found["attention7"] == ({"q": 4}, GROUP)
    elements_of_keys = 4 * 8 * 8 * 16 * 3 // 4
    assert moved(graph, topology, strategy) == {name: 2 * elements_of_keys for name in found if name.startswith("attention")}
    shared = shared_parameters(graph, topology, strategy)
    assert shared["0.fc1.weight"] == 16 * 64  # every device has all of a parameter


def test_context_parallel_splits_samples_across_hosts() -> None:
    graph, topology = transformer(length=8), cluster([2, 2])
    found = split(graph, context_parallel(graph, topology))
    assert found["attention7"][0] == {"b": 2, "q": 2}
    assert set(found["0.fc1"][0].values()) == {2} and len(found["0.fc1"][0]) == 2


def test_sequences_that_are_too_short_are_not_split() -> None:
    graph, topology = transformer(length=3), cluster([4])
    assert context_parallel(graph, topology) == data_parallel(graph, topology)
    assert sequence_parallel(graph, topology) == megatron(graph, topology)
