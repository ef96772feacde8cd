"""The ring: which links it uses, how often, and how long an all-reduce takes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from soap.simulator.collectives import exchange_seconds, flow_links, ring, ring_allreduce_seconds, ring_links, tree_rounds
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


def test_a_reduce_scatter_is_half_of_a_rings_all_reduce_on_one_switch() -> None:
    topology, members, cell = cluster([4]), range(4), 1_000_000
    flows = [(a, b, cell) for a in members for b in members if a != b]
    scattered = exchange_seconds(topology, flows, 3 * cell)
    assert scattered == pytest.approx(3 * 20e-6 + 3 * cell / 1e9 + 3 * cell / (1e11 / 3))
    gathered = exchange_seconds(topology, flows)
    assert scattered + gathered == pytest.approx(ring_allreduce_seconds(topology, members, 4 * cell))


def test_uneven_flows_wait_for_the_fullest_link() -> None:
    topology = cluster([2, 1])  # the network has a tenth of the bandwidth
    flows = [(0, 1, 5000), (0, 2, 3000), (1, 2, 1000)]
    assert exchange_seconds(topology, flows) == pytest.approx(2 * 40e-6 + 4000 / 1e8)
    carried = {topology.links[link].name: size for link, size in flow_links(topology, flows).items()}
    assert carried["host0/device0>host0/switch"] == 8000
    assert carried["host0/switch>network"] == carried["host1/switch>host1/device0"] == 4000
    assert exchange_seconds(topology, []) == 0.0


@pytest.mark.parametrize(("count", "expected"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)])
def test_a_tree_reaches_everybody_once(count: int, expected: int) -> None:
    rounds = tree_rounds([7, *range(count - 1)], 10)
    assert len(rounds) == expected
    have = {7}
    for flows in rounds:
        assert {source for source, _, _ in flows} <= have and len({source for source, _, _ in flows}) == len(flows)
        have |= {target for _, target, _ in flows}
    assert sorted(target for flows in rounds for _, target, _ in flows) == list(range(count - 1))
