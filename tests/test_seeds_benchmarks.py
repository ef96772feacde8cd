"""The benchmarks that repeat FlexFlow's and Parallax's experiments: their parts, on small nets."""

from __future__ import annotations

import pytest

import soap
from benchmarks import flexflow
from benchmarks.flexflow import Race, at, first_hosts, one_holder, race_lines
from soap import api


@pytest.mark.parametrize(("name", "hosts"), [("p100-4x4", 1), ("p100-4x4", 2), ("k80-16x4", 4)])
def test_the_first_hosts_of_a_cluster_are_a_cluster(name: str, hosts: int) -> None:
    whole = soap.load_cluster(name)
    part = first_hosts(whole, hosts)
    assert (part.device_count, len(part.hosts)) == (4 * hosts, hosts)
    assert [device.name for device in part.devices] == [device.name for device in whole.devices[: 4 * hosts]]
    assert len(part.links) < len(whole.links)
    simulated = [soap.simulate("zoo:rnnlm:tiny@64", one, "single_device", costs="estimate").makespan_ns for one in (part, whole)]
    assert simulated[0] == simulated[1]
    assert first_hosts(whole, len(whole.hosts)).links == whole.links


def test_one_holder_keeps_every_parameter_whole() -> None:
    graph, topology = api.load("zoo:lm:tiny", plan_only=True).graph, soap.load_cluster("p100-4x4")
    strategy = one_holder(graph, topology)
    trained = {tensor.name for tensor in graph.parameters if tensor.requires_grad}
    assert strategy.parameters.keys() == trained
    assert {(sync.owner, sync.partitions, sync.within) for sync in strategy.parameters.values()} == {("servers", 1, "none")}
    assert strategy.operators == api.classical("data_parallel", graph, topology).operators


@pytest.mark.slow
def test_both_simulations_see_the_same_chain() -> None:
    graph, topology = api.load("zoo:rnnlm:tiny@8", plan_only=True).graph, soap.load_cluster("p100-4x4")
    race = Race(graph, topology)
    full, delta = (list(way(1e9, 40, 7)) for way in (race.full, race.delta))
    assert full[-1][1:] == delta[-1][1:]
    assert [mark.proposals for mark in full] == list(range(41))
    assert all(mark.best_ns == at(full, full[mark.proposals].seconds).best_ns for mark in delta)
    lines = race_lines("rnnlm", "p100-4x4", race, [1e9], 40, 7)
    assert all(len(line) == len(flexflow.RACED) for line in lines)
    assert lines[0][3] == lines[0][5] == "40" and lines[0][7] == "+0.0%"
