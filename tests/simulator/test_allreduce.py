"""All-reduces: what each algorithm moves over which links, how long it takes, and which one is taken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.cluster.topology import Topology
from soap.simulator.communication import loads
from soap.simulator.communication.algorithms import Algorithm, AllReduceOption, double_tree, fastest, steps, undominated
from soap.simulator.communication.allreduce import allreduce_bytes, allreduce_options, link_bytes
from soap.simulator.communication.nccl import nccl_algorithms
from soap.simulator.communication.ring_orders import is_gloo, ring_orders
from tests.simulator.examples import pairwise_cluster
from tests.strategies import CPU, cluster, topologies, with_rails

ADDING = 3 / 1e10
"""Seconds to add a byte on a processor of ``cluster``."""

ADDED_BY_DEVICES = (Algorithm.RING, Algorithm.TREE)


def ring_of(topology: Topology, devices: Iterable[int]) -> AllReduceOption:
    """gloo's only way."""
    (only,) = allreduce_options(topology, [*devices])
    return only


def names(topology: Topology, devices: Iterable[int]) -> list[str]:
    return [topology.links[link].name for link in ring_of(topology, devices).links]


def test_a_ring_takes_its_members_in_ascending_order() -> None:
    topology = pairwise_cluster(3)
    assert sorted(names(topology, [2, 0, 1])) == ["d0->d1", "d1->d2", "d2->d0"]
    assert names(topology, [0, 2, 0]) == ["d0->d2", "d2->d0"]


HOSTS = [1, 2, 3, 4, 5, 6, 7, 8, 11, 16]


@pytest.mark.parametrize("algorithm", ADDED_BY_DEVICES)
@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize("count", HOSTS)
def test_everybody_gets_everything(algorithm: Algorithm, each: int, count: int) -> None:
    """Along each ring, and along each chain and tree: what is sent towards a root comes from everybody, and goes back to everybody."""
    devices, hosts = range(count * each), {device: device // each for device in range(count * each)}
    found = steps(algorithm, devices, (), hosts)
    assert sum(Fraction(len(step.hops) * step.repeats, step.parts) for step in found) == allreduce_bytes(1, len(devices))
    inward = {hop for step in found if step.adds for hop in step.hops}
    outward = {hop for step in found if not step.adds for hop in step.hops}
    assert outward == (inward if algorithm is Algorithm.RING else {(b, a) for a, b in inward})
    for root in [device for device in devices if not any(a == device for a, _ in inward)] or devices[:1]:
        assert reached(root, outward) == set(devices) == reached(root, {(b, a) for a, b in inward})


def reached(root: int, hops: set[tuple[int, int]]) -> set[int]:
    found = {root}
    while more := {b for a, b in hops if a in found} - found:
        found |= more
    return found


@pytest.mark.parametrize("algorithm", ADDED_BY_DEVICES)
@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 13])
def test_every_contribution_is_added_once(algorithm: Algorithm, count: int) -> None:
    # Every device but one hands its part of each byte on to be added, so that n-1 additions are made of every byte.
    adding = [step for step in steps(algorithm, range(count)) if step.adds]
    assert sum(Fraction(len(step.hops) * step.repeats, step.parts) for step in adding) == count - 1


@pytest.mark.parametrize("count", HOSTS)
def test_two_trees_span_all_hosts_and_share_their_work(count: int) -> None:
    trees = double_tree(count)
    children = [[sum(parent == host for parent in tree) for host in range(count)] for tree in trees]
    for tree in trees:
        (root,) = [host for host, parent in enumerate(tree) if parent is None]
        below = {(parent, host) for host, parent in enumerate(tree) if parent is not None}
        assert reached(root, below) == set(range(count))
        depth = {root: 0}
        while len(depth) < count:
            depth |= {host: depth[parent] + 1 for parent, host in below if parent in depth and host not in depth}
        assert max(depth.values()) <= max(1, count.bit_length())
    assert all(most <= 2 for own in children for most in own)
    both = sum(1 for first, second in zip(*children, strict=True) if first and second)
    assert both == 0 if count % 2 == 0 or count == 1 else both <= 1  # an odd host more has work in both


def test_one_device_needs_no_links_and_no_time() -> None:
    for kind in ({}, {"kind": CPU}):
        for found in allreduce_options(cluster([2], **kind), [1, 1]):
            assert (found.links, found.latency_seconds, found.seconds_per_byte, found.duration_ns(1000)) == ((), 0.0, 0.0, 1)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_closed_form_on_one_switch(count: int) -> None:
    # Hops of two links of 10 us; every link carries one hop.
    ring, share = ring_of(cluster([count], kind=CPU), range(count)), (count - 1) / count
    assert ring.latency_seconds == pytest.approx(2 * (count - 1) * 20e-6)
    assert ring.seconds_per_byte == pytest.approx(2 * share / 1e9 + share * ADDING)
    assert ring.links == tuple(range(2 * count))


def test_hops_on_one_link_share_its_bandwidth() -> None:
    # Two hosts of two; links between them are ten times slower, and a hop between them crosses four links.
    ring = ring_of(cluster([2, 2], kind=CPU), range(4))
    assert ring.latency_seconds == pytest.approx(6 * 40e-6)
    assert ring.seconds_per_byte == pytest.approx(6 / 4 / 1e8 + 3 / 4 * ADDING)  # one hop in each direction


def test_the_fastest_is_taken_and_of_equals_the_first() -> None:
    far, near = AllReduceOption(Algorithm.RING, 1e-3, 1e-9, ()), AllReduceOption(Algorithm.TREE, 0.0, 2e-9, ())
    assert [fastest((far, near), size) for size in (10**6 - 1, 10**6, 10**6 + 1)] == [near, far, far]


LINES = st.lists(st.tuples(st.sampled_from([0.0, 1e-6, 2e-6, 5e-6]), st.sampled_from([0.0, 1e-10, 3e-10, 1e-9])), min_size=1, max_size=8)


@given(LINES, st.lists(st.integers(0, 10**6), min_size=1))
def test_what_is_never_the_fastest_is_left_out(lines: list[tuple[float, float]], sizes: list[int]) -> None:
    options = [AllReduceOption(Algorithm.RING, *line, (number,)) for number, line in enumerate(lines)]
    kept = undominated(options)
    assert kept == tuple(option for option in options if option in kept)
    assert len({(option.latency_seconds, option.seconds_per_byte) for option in kept}) == len(kept)
    for size in sizes:
        assert fastest(kept, size).duration_ns(size) == fastest(options, size).duration_ns(size)
    for option in kept:  # each is the only one that is so fast somewhere, between where it meets the others
        rest = [other for other in kept if other is not option]
        meets = [one for other in rest if (one := crossing(option, other)) is not None and one >= 0]
        places = [0.0, *meets, *((a + b) / 2 for a in [0.0, *meets] for b in [*meets, 4 * max(meets, default=1.0)])]
        at = lambda which, place: which.latency_seconds + which.seconds_per_byte * place  # noqa: E731
        assert any(all(at(option, place) <= at(other, place) + 1e-15 for other in rest) for place in places)


def crossing(one: AllReduceOption, other: AllReduceOption) -> float | None:
    if one.seconds_per_byte == other.seconds_per_byte:
        return None
    return (other.latency_seconds - one.latency_seconds) / (one.seconds_per_byte - other.seconds_per_byte)


def test_processors_have_the_ring_alone() -> None:
    slow = cluster([2, 2], kind=CPU, latency_seconds=1e-3)
    assert [found.algorithm for found in allreduce_options(slow, range(4))] == [Algorithm.RING]
    assert nccl_algorithms(cluster([4]), range(4)) == (Algorithm.RING, Algorithm.TREE)


def test_bytes_on_links() -> None:
    topology = pairwise_cluster(3)
    ring = link_bytes(topology, Algorithm.RING, [0, 1, 2], 24)
    assert {topology.links[link].name: size for link, size in ring.items()} == {"d0->d1": 32, "d1->d2": 32, "d2->d0": 32}
    tree = link_bytes(topology, Algorithm.TREE, [0, 1, 2], 24)
    assert {topology.links[link].name: size for link, size in tree.items()} == {"d0->d1": 24, "d1->d0": 24, "d1->d2": 24, "d2->d1": 24}
    assert sum(link_bytes(topology, Algorithm.RING, [0, 1, 2], 4).values()) == 3 * 6  # 16/3 on each, rounded up


@given(topologies(max_devices=6), st.integers(0, 10**8))
def test_what_holds_on_every_topology(topology: Topology, size: int) -> None:
    devices = range(topology.device_count)
    options = allreduce_options(topology, devices)
    available = [Algorithm.RING] if is_gloo(topology, devices) else nccl_algorithms(topology, devices)
    assert {found.algorithm for found in options} <= {*available}
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
        patch.setattr(loads, "MANY_HOPS", 1)
        assert allreduce_options(topology, devices) == singly
    pairs = pairwise_cluster(topology.device_count)
    singly = allreduce_options(pairs, devices)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loads, "MANY_HOPS", 1)
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
    plain = cluster([4, 4, 4, 4])
    one, several = (min(option.seconds_per_byte for option in allreduce_options(own, range(16))) for own in (plain, with_rails(plain)))
    assert (one, several) == (pytest.approx(30 / 16 / 1e8), pytest.approx(30 / 16 / 4 / 1e8))
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
