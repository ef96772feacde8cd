"""The arrays of a cluster beside the topology's own answers."""

from __future__ import annotations

import pytest
from hypothesis import given

from soap import api
from soap.cluster.topology import Topology
from soap.simulator.communication.prices import Communication
from soap.simulator.compiled.graph_arrays import cluster_tables
from tests.strategies import topologies


def check(topology: Topology) -> None:
    communication, count = Communication(topology), topology.device_count
    tables = cluster_tables(communication)
    assert tables.route_ptr[-1] == len(tables.route)
    for source in range(count):
        for target in range(count):
            first, last = tables.route_ptr[source * count + target : source * count + target + 2]
            assert tuple((tables.route[first:last] - count).tolist()) == topology.route(source, target)
            figures = (float(tables.message_latency_seconds[source, target]), float(tables.seconds_per_byte[source, target]))
            assert figures == communication.route_figures(source, target)
            assert tables.latency_seconds[source, target] == topology.route_latency_seconds(source, target)
            assert tables.distance[source, target] == topology.distance(source, target)


@given(topologies(max_devices=6))
def test_random_trees(topology: Topology) -> None:
    check(topology)


@pytest.mark.parametrize("name", ["p100-4x4", "titanxp-8x6", "v100-2x8", "mi300x-8"])
def test_presets(name: str) -> None:
    check(api.load_cluster(name))
