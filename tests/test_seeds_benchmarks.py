"""The benchmarks that repeat FlexFlow's and Parallax's experiments: their parts, on small nets."""

from __future__ import annotations

import pytest

import soap
from benchmarks import flexflow, parallax
from benchmarks.flexflow import Gain, Mark, Race, at, first_hosts, one_holder, race_lines
from soap import api
from soap.model.sparse_access import Lookup, uniform


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


def test_a_line_says_how_much_is_gained_over_both() -> None:
    cells = Gain("nmt", "k80-16x4", 64, 64, 600.0, 300.0, 200.0, 12.4).cells
    assert cells[4:9] == ("600.0", "300.0", "200.0", "3.00", "1.50")
    assert len(cells) == len(flexflow.GAINS)


def test_the_last_mark_within_a_limit() -> None:
    marks = [Mark(0.0, 0, 30), Mark(0.5, 8, 20), Mark(1.5, 16, 10)]
    assert [at(marks, limit).best_ns for limit in (0.1, 0.5, 1.4, 9)] == [30, 20, 20, 10]


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


@pytest.mark.parametrize("alpha", [1.0, 0.28, 0.04])
def test_each_worker_touches_the_published_share(alpha: float) -> None:
    access = uniform(3200, [Lookup(0, 0, (0,), 48 * 16_000)])
    found = parallax._touched(access, alpha)
    assert found.touched_by(access.weighed // 48) == pytest.approx(alpha * 3200, rel=0.1)
    assert found.touched[0] <= 3200


def test_brute_force_ends_where_it_gets_much_worse() -> None:
    tried: list[int] = []

    def seconds(partitions: int) -> float:
        tried.append(partitions)
        return {4: 1.0, 8: 0.7, 16: 0.72, 32: 0.9}[partitions]

    assert parallax.brute_force(seconds, 4) == 8
    assert tried == [4, 8, 16, 32]
