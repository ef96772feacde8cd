"""Hosts that are servers: in cluster files and names, who computes and who owns parameters then."""

from __future__ import annotations

import pytest

from soap.cluster.presets import preset
from soap.cluster.topology import Topology
from soap.cluster.yaml_file import parse_cluster
from soap.errors import TopologyError
from soap.plan.placement import server_devices
from soap.search.starts import reference_strategies
from soap.simulator.lowering import build_plan
from soap.strategy.classical import CLASSICAL, SYNCHRONIZED, data_parallel
from soap.strategy.config import Strategy
from soap.strategy.sync import parameter_server, partition_counts, usual_server
from tests.cluster_text import dump_cluster
from tests.graph_builder import transformer
from tests.strategies import CPU, GPU, cluster, with_servers

FILE = """
name: workers and a server
hosts:
  - {name: worker, count: 2, devices: {type: v100-16gb, count: 1}, cpu_cores: 8}
  - {name: server, devices: {type: l4, count: 1}, cpu_cores: 8, server: SAID}
network: {bandwidth: 10 Gbit/s, latency: 3 us}
"""


def used(strategy: Strategy) -> set[int]:
    return {device for config in strategy.operators.values() for device in config.devices}


def test_files_say_which_hosts_are_servers() -> None:
    marked, plain = (parse_cluster(FILE.replace("SAID", said)) for said in ("true", "false"))
    assert (marked.workers, marked.servers, plain.workers, plain.servers) == ((0, 1), (2,), (0, 1, 2), ())
    assert marked.hash != plain.hash and parse_cluster(FILE.replace(", server: SAID", "")).hash == plain.hash
    for topology in (marked, plain):
        again = parse_cluster(dump_cluster(topology))
        assert (again.hash, again.servers) == (topology.hash, topology.servers)
    with pytest.raises(TopologyError, match=r"hosts\[1\]\.server: 3; expected true or false"):
        parse_cluster(FILE.replace("SAID", "3"))
    alone = FILE.replace("SAID", "true").replace("cpu_cores: 8}\n  -", "cpu_cores: 8, server: true}\n  -")
    with pytest.raises(TopologyError, match="all of its hosts with devices are servers; expected one at least without 'server'"):
        parse_cluster(alone)


def test_names_of_emulated_clusters_may_have_servers() -> None:
    topology = preset("emulated:3x2+1@200Mbit/s")
    assert (topology.workers, topology.servers, len(topology.hosts)) == (tuple(range(6)), (6, 7), 4)
    assert topology.hash != preset("emulated:4x2@200Mbit/s").hash
    with pytest.raises(TopologyError, match="with at most 1024 devices"):
        preset("emulated:3x1+1022")


@pytest.mark.parametrize("name", [*CLASSICAL, *SYNCHRONIZED])
def test_strategies_by_name_compute_on_workers(name: str) -> None:
    graph = transformer()
    topology = with_servers(cluster([2, 2, 1], GPU), 1)
    strategy = {**CLASSICAL, **SYNCHRONIZED}[name](graph, topology)
    strategy.validate(graph, topology.device_count)
    assert used(strategy) <= set(topology.workers)


def test_fewer_devices_are_fewer_workers() -> None:
    topology = with_servers(cluster([1, 1, 1, 1, 1], CPU), 1)
    found = reference_strategies(transformer(), topology, [])
    assert [used(strategy) for strategy in found] == [{0}, {0, 1}]


def owners(topology: Topology, strategy: Strategy) -> set[int]:
    plan = build_plan(transformer(), strategy, topology)
    return {device for number in plan.on_servers for device in plan.shards[number].devices}


@pytest.mark.parametrize(("servers", "expected"), [(0, {0, 2, 4}), (1, {4}), (2, {2, 4})])
def test_partitions_are_on_server_hosts_alone(servers: int, expected: set[int]) -> None:
    topology = with_servers(cluster([2, 2, 2], CPU), servers)
    graph = transformer()
    strategy = data_parallel(graph, topology)
    syncs = {tensor.name: parameter_server(2) for tensor in graph.parameters if tensor.requires_grad}
    assert owners(topology, strategy.with_changes(parameters=syncs)) == expected == set(server_devices(topology))


def test_partitions_by_default_are_for_the_servers_there_are() -> None:
    assert usual_server(with_servers(cluster([1, 1, 1], CPU), 1)) == parameter_server(1)
    assert partition_counts(with_servers(cluster([2, 2, 2], GPU), 1)) == (1, 2, 4)
    assert usual_server(with_servers(cluster([2, 2, 2], GPU), 1)) == parameter_server(4, "host")
