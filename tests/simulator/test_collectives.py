"""The ring: which links it uses, how often, and how long an all-reduce takes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from soap.simulator.collectives import ring, ring_allreduce_seconds, ring_links
from soap.topology import Topology
from tests.simulator.examples import pairwise_cluster
from tests.strategies import cluster, topologies


def names(topology: Topology, devices: list[int]) -> list[str]:
    return [topology.links[link].name for link in ring_links(topology, devices)]


def test_a_ring_takes_its_members_in_ascending_order() -> None:
    topology = pairwise_cluster(3)
    assert sorted(names(topology, [2, 0, 1])) == ["d0->d1", "d1->d2", "d2->d0"]
    assert names(topology, [0, 2, 0]) == ["d0->d2", "d2->d0"]


def test_one_device_needs_no_links_and_no_time() -> None:
    topology = cluster([2])
    assert ring_links(topology, [1]) == ()
    assert ring_allreduce_seconds(topology, [1, 1], 1000) == 0.0


def test_closed_form_on_one_switch() -> None:
    # 4 devices, hops of two links of 10 us; every link carries one hop; memory of 1e11 bytes/s adds a third of that.
    seconds = ring_allreduce_seconds(cluster([4]), [0, 1, 2, 3], 4_000_000)
    assert seconds == pytest.approx(6 * 20e-6 + 2 * 3 * 1_000_000 / 1e9 + 3 * 1_000_000 / (1e11 / 3))


def test_slowest_hop_and_narrowest_link_decide() -> None:
    # Between hosts: four links, of which the middle two have a tenth of the bandwidth.
    made = ring(cluster([2, 2]), [0, 1, 2, 3])
    assert made.latency_seconds == pytest.approx(40e-6)
    assert made.bandwidth_bytes_per_second == pytest.approx(1e8)


def test_hops_on_one_link_share_its_bandwidth() -> None:
    # Devices 0 and 2 on host 0, 1 and 3 on host 1: in ascending order every hop goes between the hosts.
    topology = cluster([2, 2])
    swapped = Topology(
        "swapped",
        tuple(
            type(device)(i, device.name, device.host, device.type) for i, device in enumerate([topology.devices[k] for k in (0, 2, 1, 3)])
        ),
        topology.hosts,
        topology.links,
    )
    made = ring(swapped, [0, 1, 2, 3])
    assert made.bandwidth_bytes_per_second == pytest.approx(1e8 / 2)
    between = {topology.links[link].name: uses for link, uses in made.uses if "network" in topology.links[link].name}
    assert set(between.values()) == {2}


@given(topologies())
@settings(max_examples=25, deadline=None)
def test_uses_are_the_routes_of_the_hops(topology: Topology) -> None:
    made = ring(topology, range(topology.device_count))
    n = topology.device_count
    crossed = [link for i in range(n) if n > 1 for link in topology.route(i, (i + 1) % n)]
    assert dict(made.uses) == {link: crossed.count(link) for link in crossed}
    assert list(made.links) == sorted(set(crossed))
    assert made.seconds(2_000_000) >= made.seconds(1_000_000) >= 0
