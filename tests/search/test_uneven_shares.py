"""Devices of different speed: what shares a start gives them, and that shifting samples ends at the best ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.search.chains import search
from soap.search.options import SearchOptions
from soap.search.shares import divisions, shifted, shifts
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.simulate import Simulator
from soap.strategy.classical import data_parallel, megatron
from soap.strategy.named import named
from soap.strategy.uneven import with_sample_weights
from tests.graph_builder import mlp, transformer
from tests.strategies import CPU, cluster

SLOW = replace(CPU, name="slow-cpu", flops_per_second={"float32": 5e9}, memory_bandwidth_bytes_per_second=5e9)


def mixed(*fast: bool) -> Topology:
    """A host with one device each, which is fast or half as fast."""
    made = cluster([1] * len(fast), CPU, 1e10)
    devices = tuple(device if quick else replace(device, type=SLOW) for device, quick in zip(made.devices, fast, strict=True))
    return replace(made, devices=devices)


def simulator(graph: OperatorGraph, topology: Topology) -> Simulator:
    return Simulator(graph, topology, RooflineCosts(topology, 0), 0)


def test_the_name_divides_samples_alone_and_only_where_devices_differ() -> None:
    graph, topology = mlp(batch=12), mixed(True, False)
    strategy = named("data_parallel+uneven", graph, topology)
    assert strategy.operators[graph.operators[0].name].shares == ((2, 1),)
    assert {counts for _, counts in divisions(graph, strategy)} == {(8, 4)}
    plain = data_parallel(graph, topology)
    assert {name: replace(config, shares=()) for name, config in strategy.operators.items()} == {**plain.operators}
    assert named("data_parallel+uneven", graph, cluster([1, 1], CPU)) == data_parallel(graph, cluster([1, 1], CPU))


def test_a_group_of_devices_is_as_fast_as_its_slowest() -> None:
    graph = transformer()
    topology = cluster([2, 2], CPU)
    topology = replace(topology, devices=tuple([replace(own, type=SLOW) if own.index == 2 else own for own in topology.devices]))
    strategy = named("megatron+uneven", graph, topology)
    assert strategy != megatron(graph, topology)
    found = list(divisions(graph, strategy))
    assert {len(counts) for _, counts in found} == {2, 4}  # samples over groups, and over all devices
    for devices, counts in found:
        assert next(own for part, own in zip(devices, counts, strict=True) if 2 in part) == min(counts) < max(counts)
    strategy.validate(graph, 4)


@pytest.mark.parametrize("fast", [(True, False), (False, True)])
def test_shifting_ends_at_the_best_shares(fast: tuple[bool, ...]) -> None:
    graph, topology = mlp(batch=24, widths=(256, 512, 256)), mixed(*fast)
    own = simulator(graph, topology)
    evaluator = IncrementalSimulator(own)
    start = named("data_parallel+uneven", graph, topology)
    (names,) = divisions(graph, start).values()
    ops = [graph.operators[graph.index[name]] for name in names]
    every = {
        count: own.run(
            start.with_changes({op.name: with_sample_weights(op, start.operators[op.name], (count, 24 - count)) for op in ops})
        ).makespan_ns
        for count in range(1, 24)
    }
    found = shifted(graph, evaluator, start)
    assert evaluator.makespan_ns(found) == min(every.values()) < own.run(data_parallel(graph, topology)).makespan_ns
    bad = start.with_changes({op.name: with_sample_weights(op, start.operators[op.name], (1, 23)) for op in ops})
    assert evaluator.makespan_ns(shifted(graph, evaluator, bad)) == min(every.values())
    assert all(own.run(other).makespan_ns >= min(every.values()) for other in shifts(graph, found, 1))


def test_searches_begin_with_it_where_devices_differ() -> None:
    graph, topology = mlp(batch=24, widths=(256, 512, 256)), mixed(True, False)
    result = search(graph, topology, IncrementalSimulator(simulator(graph, topology)), SearchOptions(budget=1), polish_up_to=0)
    starts = {start.name: start.cost_ns for start in result.starts}
    assert starts["uneven"] < starts["data_parallel"]
    alike = cluster([1, 1], CPU)
    result = search(graph, alike, IncrementalSimulator(simulator(graph, alike)), SearchOptions(budget=1), polish_up_to=0)
    assert "uneven" not in {start.name for start in result.starts}
