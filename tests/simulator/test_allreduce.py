"""All-reduces: what each algorithm moves over which links, how long it takes, and which one is taken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.cluster.topology import Topology
from soap.simulator.communication import allreduce
from soap.simulator.communication.allreduce import (
    Algorithm,
    AllReduceOption,
    allreduce_bytes,
    allreduce_options,
    available,
    fastest,
    link_bytes,
    steps,
)
from soap.simulator.communication.ring_orders import ring_orders
from tests.simulator.examples import pairwise_cluster
from tests.strategies import CPU, cluster, topologies, with_rails

ADDING = 3 / 1e11
"""Seconds to add a byte on the devices of ``cluster``."""


def option(topology: Topology, algorithm: Algorithm, devices: list[int]) -> AllReduceOption:
    return next(option for option in allreduce_options(topology, devices) if option.algorithm is algorithm)


def names(topology: Topology, algorithm: Algorithm, devices: list[int]) -> list[str]:
    return [topology.links[link].name for link in option(topology, algorithm, devices).links]


def test_a_ring_takes_its_members_in_ascending_order() -> None:
    topology = pairwise_cluster(3)
    assert sorted(names(topology, Algorithm.RING, [2, 0, 1])) == ["d0->d1", "d1->d2", "d2->d0"]
    assert names(topology, Algorithm.RING, [0, 2, 0]) == ["d0->d2", "d2->d0"]


def test_partners_of_halving_and_doubling_are_ever_farther_apart() -> None:
    found = steps(Algorithm.HALVING_DOUBLING, [0, 1, 2, 3])
    assert [(step.parts, step.repeats, step.adds) for step in found] == [(2, 1, True), (4, 1, True), (4, 1, False), (2, 1, False)]
    assert set(found[0].hops) == set(found[3].hops) == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert set(found[1].hops) == set(found[2].hops) == {(0, 2), (2, 0), (1, 3), (3, 1)}


def test_devices_beyond_a_power_of_two_are_folded_into_their_neighbours() -> None:
    found = steps(Algorithm.HALVING_DOUBLING, [2, 3, 5, 7, 8, 9])
    assert (found[0].hops, found[0].parts, found[0].adds) == (((2, 3), (5, 7)), 1, True)
    assert (found[-1].hops, found[-1].parts, found[-1].adds) == (((3, 2), (7, 5)), 1, False)
    assert {device for step in found[1:-1] for hop in step.hops for device in hop} == {3, 7, 8, 9}


@pytest.mark.parametrize("algorithm", list(Algorithm))
@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7, 8, 11, 16])
def test_everybody_gets_everything(algorithm: Algorithm, count: int) -> None:
    have = {device: {device} for device in range(count)}
    moved = Fraction(0)
    for step in steps(algorithm, range(count)):
        for _ in range(step.repeats):
            have = {device: own.union(*(have[s] for s, t in step.hops if t == device)) for device, own in have.items()}
        moved += Fraction(len(step.hops) * step.repeats, step.parts)
    assert all(own == set(range(count)) for own in have.values())
    assert moved == allreduce_bytes(1, count) == 2 * (count - 1)


@pytest.mark.parametrize("algorithm", list(Algorithm))
@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 13])
def test_every_contribution_is_added_once(algorithm: Algorithm, count: int) -> None:
    # Every device but one hands its part of each byte on to be added, so that n-1 additions are made of every byte.
    adding = [step for step in steps(algorithm, range(count)) if step.adds]
    assert sum(Fraction(len(step.hops) * step.repeats, step.parts) for step in adding) == count - 1


def test_one_device_needs_no_links_and_no_time() -> None:
    for found in allreduce_options(cluster([2]), [1, 1]):
        assert (found.links, found.latency_seconds, found.seconds_per_byte, found.duration_ns(1000)) == ((), 0.0, 0.0, 1)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_closed_forms_on_one_switch(count: int) -> None:
    # Hops of two links of 10 us; every link carries one hop.
    topology, devices, rounds = cluster([count]), list(range(count)), count.bit_length() - 1
    share = (count - 1) / count
    ring, halving, tree = (option(topology, algorithm, devices) for algorithm in Algorithm)
    assert ring.latency_seconds == pytest.approx(2 * (count - 1) * 20e-6)
    assert halving.latency_seconds == tree.latency_seconds == pytest.approx(2 * rounds * 20e-6)
    assert ring.seconds_per_byte == pytest.approx(2 * share / 1e9 + share * ADDING)
    assert halving.seconds_per_byte == pytest.approx(ring.seconds_per_byte)
    assert tree.seconds_per_byte == pytest.approx(2 * rounds / 1e9 + rounds * ADDING)
    assert ring.links == halving.links == tree.links == tuple(range(2 * count))


def test_three_devices_fold_one_on_a_switch() -> None:
    halving = option(cluster([3]), Algorithm.HALVING_DOUBLING, [0, 1, 2])
    assert halving.latency_seconds == pytest.approx(4 * 20e-6)
    assert halving.seconds_per_byte == pytest.approx((1 + 1 / 2 + 1 / 2 + 1) / 1e9 + (1 + 1 / 2) * ADDING)


def test_hops_on_one_link_share_its_bandwidth() -> None:
    # Two hosts of two; links between them are ten times slower, and a hop between them crosses four links.
    topology = cluster([2, 2])
    ring, halving, tree = (option(topology, algorithm, [0, 1, 2, 3]) for algorithm in Algorithm)
    assert ring.latency_seconds == pytest.approx(6 * 40e-6)
    assert ring.seconds_per_byte == pytest.approx(6 / 4 / 1e8 + 3 / 4 * ADDING)  # one hop in each direction
    assert halving.latency_seconds == pytest.approx(2 * (20e-6 + 40e-6))
    assert halving.seconds_per_byte == pytest.approx(2 * (1 / 2 / 1e9 + 2 / 4 / 1e8) + 3 / 4 * ADDING)  # two hops at distance 2
    assert tree.seconds_per_byte == pytest.approx(2 * (1 / 1e9 + 2 / 1e8) + 2 * ADDING)


def test_the_fastest_is_taken_and_of_equals_the_first() -> None:
    four = allreduce_options(cluster([4], latency_seconds=1e-3), [0, 1, 2, 3])
    assert fastest(four, 4).algorithm is Algorithm.HALVING_DOUBLING  # fewer latencies than the ring
    assert fastest(allreduce_options(cluster([3]), [0, 1, 2]), 10**8).algorithm is Algorithm.RING  # nothing is folded
    assert fastest(allreduce_options(cluster([2]), [0, 1]), 10**6).algorithm is Algorithm.RING  # halving and doubling is the same
    far, near = AllReduceOption(Algorithm.RING, 1e-3, 1e-9, ()), AllReduceOption(Algorithm.TREE, 0.0, 2e-9, ())
    assert [fastest((far, near), size) for size in (10**6 - 1, 10**6, 10**6 + 1)] == [near, far, far]


def test_processors_have_the_ring_alone() -> None:
    slow = cluster([2, 2], kind=CPU, latency_seconds=1e-3)
    assert [found.algorithm for found in allreduce_options(slow, range(4))] == [Algorithm.RING]
    assert available(cluster([4]), range(4)) == tuple(Algorithm)


def test_bytes_on_links() -> None:
    topology = pairwise_cluster(3)
    ring = link_bytes(topology, Algorithm.RING, [0, 1, 2], 24)
    assert {topology.links[link].name: size for link, size in ring.items()} == {"d0->d1": 32, "d1->d2": 32, "d2->d0": 32}
    folded = link_bytes(topology, Algorithm.HALVING_DOUBLING, [0, 1, 2], 24)
    assert {topology.links[link].name: size for link, size in folded.items()} == {"d0->d1": 24, "d1->d0": 24, "d1->d2": 24, "d2->d1": 24}
    assert sum(link_bytes(topology, Algorithm.RING, [0, 1, 2], 4).values()) == 3 * 6  # 16/3 on each, rounded up


@given(topologies(max_devices=6), st.integers(0, 10**8))
def test_what_holds_on_every_topology(topology: Topology, size: int) -> None:
    devices = range(topology.device_count)
    options = allreduce_options(topology, devices)
    assert tuple(found.algorithm for found in options) == available(topology, devices)
    chosen = fastest(options, size)
    assert chosen.duration_ns(size) == min(found.duration_ns(size) for found in options)
    assert all(found.duration_ns(size) > chosen.duration_ns(size) for found in options[: options.index(chosen)])
    for found in options:
        assert found.duration_ns(2 * size) >= found.duration_ns(size) >= 1
        carried = link_bytes(topology, found.algorithm, devices, size)
        assert tuple(carried) == found.links
        # No algorithm is faster than its fullest link (whose bytes were rounded up).
        least = max(((count - 1) / topology.links[link].bandwidth_bytes_per_second for link, count in carried.items()), default=0.0)
        assert found.duration_ns(size) >= least * 1e9 * (1 - 1e-9)


@given(topologies(max_devices=9), st.data())
def test_many_hops_at_once_are_the_same_hops(topology: Topology, data: st.DataObject) -> None:
    devices = sorted(data.draw(st.sets(st.integers(0, topology.device_count - 1), min_size=1)))
    singly = allreduce_options(topology, devices)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allreduce, "MANY_HOPS", 1)
        assert allreduce_options(topology, devices) == singly
    pairs = pairwise_cluster(topology.device_count)
    singly = allreduce_options(pairs, devices)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allreduce, "MANY_HOPS", 1)
        assert allreduce_options(pairs, devices) == singly


RAILS = with_rails(cluster([4, 4, 4]))


def test_between_hosts_with_several_nics_there_is_a_ring_for_each() -> None:
    orders = ring_orders(RAILS, range(12))
    assert orders[0] == tuple(range(12))
    assert orders[1] == (1, 2, 3, 0, 5, 6, 7, 4, 9, 10, 11, 8)
    assert [sorted(order) for order in orders] == [list(range(12))] * 4
    for ring, order in enumerate(orders):  # each stays on its rail
        crossed = {RAILS.links[i].name for a, b in pairs_around(order) if a // 4 != b // 4 for i in RAILS.route(a, b)}
        assert {name.partition("rail")[2][:1] for name in crossed if "rail" in name} == {str(ring)}


def test_rings_of_several_nics_share_the_bytes() -> None:
    one, several = option(cluster([4, 4, 4]), Algorithm.RING, [*range(12)]), option(RAILS, Algorithm.RING, [*range(12)])
    assert one.seconds_per_byte == pytest.approx(22 / 12 / 1e8 + 11 / 12 * ADDING)
    assert several.seconds_per_byte == pytest.approx(22 / 12 / 4 / 1e8 + 11 / 12 * ADDING)
    moved = link_bytes(RAILS, Algorithm.RING, range(12), 4800)
    on_rails = {RAILS.links[link].name: size for link, size in moved.items() if "rail" in RAILS.links[link].name}
    assert len(on_rails) == 24 and set(on_rails.values()) == {2200}
    assert not any("network" in RAILS.links[link].name for link in moved)


@pytest.mark.parametrize(
    ("topology", "devices"),
    [
        (cluster([4, 4]), range(8)),  # one NIC for all
        (RAILS, [0, 4, 8]),  # one device of each host: its own rail
        (RAILS, [1, 2, 3]),  # one host
        (RAILS, [0, 1, 2, 3, 8]),  # as many rings as the smallest host has devices
        (with_rails(cluster([2, 2], CPU)), range(4)),  # gloo
    ],
)
def test_otherwise_there_is_one_ring_in_ascending_order(topology: Topology, devices: Iterable[int]) -> None:
    assert ring_orders(topology, [*devices][::-1]) == (tuple(devices),)


def test_hosts_of_different_size_have_the_rings_of_the_smallest() -> None:
    topology = with_rails(cluster([4, 2]))
    assert ring_orders(topology, range(6)) == ((0, 1, 2, 3, 4, 5), (1, 2, 3, 0, 5, 4))
    assert ring_orders(topology, [0, 2, 4, 5]) == ((0, 2, 4, 5), (2, 0, 5, 4))


@given(topologies(max_devices=6, ports=False), st.sets(st.integers(0, 5), min_size=2))
def test_several_rings_carry_what_one_does(topology: Topology, chosen: set[int]) -> None:
    members = sorted(device for device in chosen if device < topology.device_count)
    orders = ring_orders(topology, members)
    assert [sorted(order) for order in orders] == [members] * len(orders)
    for step in steps(Algorithm.RING, members, orders):
        assert step.parts == len(members) * len(orders) and step.repeats == len(members) - 1
        for place in range(len(members)):  # in each ring each device hands its part to the next
            assert sum(source == members[place] for source, _ in step.hops) == len(orders)
            assert sum(target == members[place] for _, target in step.hops) == len(orders)


def pairs_around(order: Sequence[int]) -> list[tuple[int, int]]:
    return [*zip(order, (*order[1:], order[0]), strict=True)]
