"""All-reduces of GPUs: latencies by hand from NCCL's figures, bus bandwidths of whole machines, and what measurements replace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soap.cluster.interconnects import interconnects, library
from soap.cluster.overheads import CollectiveLatencyFactor
from soap.cluster.presets import preset
from soap.cluster.topology import Topology
from soap.plan.collectives import exchange_seconds
from soap.simulator.communication.algorithms import Algorithm, AllReduceOption, fastest
from soap.simulator.communication.allreduce import allreduce_options, link_bytes
from soap.simulator.communication.nccl import nccl_algorithms
from soap.simulator.communication.prices import Communication
from soap.simulator.communication.ring_orders import ring_orders
from tests.strategies import CPU, GPU, cluster


def ways(name: str, count: int | None = None) -> dict[tuple[Algorithm, str], AllReduceOption]:
    topology = preset(name)
    return {(one.algorithm, one.protocol): one for one in allreduce_options(topology, range(count or topology.device_count))}


def bus_bandwidth(topology: Topology, size: int) -> float:
    """Of a sum over all devices, in GB/s."""
    count = topology.device_count
    return 2 * (count - 1) / count * size / Communication(topology).allreduce(size, tuple(range(count)))[0]


def test_latencies_on_one_host_by_hand() -> None:
    a100 = ways("a100-40gb-8")
    assert a100[Algorithm.RING, "LL"].latency_seconds == pytest.approx(1e-6 * (6.6 + 14 * 0.6))
    assert a100[Algorithm.RING, "LL128"].latency_seconds == pytest.approx(1e-6 * (14.0 + 14 * 1.9))
    assert a100[Algorithm.RING, "Simple"].latency_seconds == pytest.approx(1e-6 * (8.4 + 14 * 3.4))
    assert a100[Algorithm.TREE, "LL128"].latency_seconds == pytest.approx(1e-6 * (14.0 + 2 * 7 * 1.25))
    assert ways("h100-8")[Algorithm.NVLS, "Simple"].latency_seconds == pytest.approx(25e-6)
    assert ways("l4-4")[Algorithm.RING, "Simple"].latency_seconds == pytest.approx(1e-6 * (8.4 + 6 * 5.7))


def test_through_a_switch_that_adds_each_device_still_sends_what_it_holds_and_what_it_added_up() -> None:
    """Of two devices that is half as much again, and a ring is faster at any size; of eight the switch decides."""
    rate = preset("h100-8").links[0].bandwidth_bytes_per_second
    assert all(algorithm is not Algorithm.NVLS for algorithm, _ in ways("h100-8", 2))
    assert ways("h100-8")[Algorithm.NVLS, "Simple"].seconds_per_byte > 1.125 / rate


def test_latencies_over_several_hosts_by_hand() -> None:
    one, two, four = ways("piz-daint-2"), ways("a100-40gb-2x8"), ways("h100-4x8")
    assert one[Algorithm.RING, "LL"].latency_seconds == pytest.approx(1e-6 * (6.6 + 2 * 5.0))  # a device per host: the tree's latency
    assert two[Algorithm.TREE, "LL"].latency_seconds == pytest.approx(1e-6 * (6.8 + 2 * (7 * 0.6 + 5.0)))
    assert two[Algorithm.TREE, "Simple"].latency_seconds == pytest.approx(1e-6 * (8.4 + 2 * (7 * 4.0 + 14.0)))
    assert four[Algorithm.NVLS_TREE, "Simple"].latency_seconds == pytest.approx(1e-6 * (25 + 2 * 2 * 20.9))
    ring = ways("v100-2x8").get((Algorithm.RING, "Simple"))
    assert ring is None or ring.latency_seconds == pytest.approx(1.9e-6 * (8.4 + 28 * 3.4 + 2 * 14.0))


def test_what_a_network_has_above_nccls_assumption_is_added_to_each_of_its_hops() -> None:
    near, far = (cluster([1] * 4, latency_seconds=one) for one in (0.5e-6, 10e-6))  # 2 and 40 us from end to end
    known, slow = (min(one.latency_seconds for one in allreduce_options(own, range(4))) for own in (near, far))
    assert slow - known == pytest.approx(2 * 2 * 38e-6)  # twice up a tree of height two


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v100-8", 120), ("a100-40gb-8", 240), ("h100-8", 480), ("b200-8", 814), ("mi300x-8", 336), ("l4-4", 24), ("rtx4090-2", 24),
        ("a100-40gb-2x8", 237), ("a100-40gb-4x8", 192), ("h100-2x8", 480), ("h100-4x8", 384), ("mi300x-2x8", 336), ("v100-4x8", 48),
    ],
)  # fmt: skip
def test_bus_bandwidths_of_whole_machines(name: str, expected: float) -> None:
    """Two hosts may exceed their NICs' bandwidth (192 GB/s of A100 hosts): a tree sends the buffer once each way, a ring nearly twice."""
    found = bus_bandwidth(preset(name), 2**34)
    assert expected * 0.96 <= found <= expected * 1.01


def test_more_bytes_take_protocols_of_more_bandwidth() -> None:
    options = allreduce_options(preset("a100-40gb-8"), range(8))
    chosen = [fastest(options, 2**power) for power in range(3, 31, 3)]
    assert chosen[0].protocol == "LL" and (chosen[-1].algorithm, chosen[-1].protocol) == (Algorithm.RING, "Simple")
    assert [one.seconds_per_byte for one in chosen] == sorted((one.seconds_per_byte for one in chosen), reverse=True)


def test_a_sum_inside_a_host_comes_before_the_one_between_hosts() -> None:
    """Bytes on NICs are those of a sum over hosts, not over devices."""
    topology = preset("a100-40gb-4x8")
    carried = link_bytes(topology, Algorithm.TREE, range(32), 8_000_000)
    leaving = {name: 0 for name in (device.name for device in topology.devices)}
    for link, size in carried.items():
        if "rail" in topology.links[link].target:
            leaving[topology.links[link].source] += size
    assert max(leaving.values()) == 2 * 1_000_000 and min(leaving.values()) > 0


def test_rings_over_a_mesh_use_all_of_its_links() -> None:
    for name, rings in (("mi300x-8", 7), ("v100-8", 6)):
        topology = preset(name)
        assert len(ring_orders(topology, range(8))) == rings
        carried = link_bytes(topology, Algorithm.RING, range(8), 10**9)
        assert len(carried) == len(topology.links)
        assert len({size / topology.links[link].bandwidth_bytes_per_second for link, size in carried.items()}) == 1


def test_a_mesh_of_a_part_of_the_host() -> None:
    topology = preset("mi300x-8")
    assert [len(ring_orders(topology, range(count))) for count in (2, 3, 4, 5)] == [1, 2, 6, 4]


def test_switches_add_where_they_can_and_links_are_named() -> None:
    assert nccl_algorithms(preset("h100-8"), range(8)) == (Algorithm.RING, Algorithm.TREE, Algorithm.NVLS)
    assert nccl_algorithms(preset("h100-2x8"), range(16))[-1] is Algorithm.NVLS_TREE
    for name, devices in (("a100-80gb-8", range(8)), ("mi300x-8", range(8)), ("h100-2x8", [0, 8]), ("h100-2x8", [0, 1, 8])):
        assert nccl_algorithms(preset(name), devices) == (Algorithm.RING, Algorithm.TREE)
    plain = preset("h100-8")
    plain = replace(plain, links=tuple(replace(link, interconnect="") for link in plain.links))
    assert nccl_algorithms(plain, range(8)) == (Algorithm.RING, Algorithm.TREE)
    assert bus_bandwidth(plain, 2**34) == pytest.approx(450, rel=0.01)  # what messages reach, as stated


def test_amd_has_the_figures_of_rccl() -> None:
    assert ways("mi300x-8")[Algorithm.RING, "LL"].latency_seconds == pytest.approx(1e-6 * (12 + 14 * 0.8))
    assert ways("mi300x-2x8")[Algorithm.TREE, "Simple"].latency_seconds == pytest.approx(1e-6 * (17 + 2 * (7 * 2.3 + 25)))


def measured(topology: Topology, **changes: object) -> Topology:
    return replace(topology, described=topology.links, **changes)  # type: ignore[arg-type]


def test_measured_links_replace_all_of_it() -> None:
    factor = CollectiveLatencyFactor(all_reduce=((2, 3.0),))
    two, hosts = measured(cluster([2]), latency_factor=factor), measured(preset("h100-2x8"))
    (ring,) = allreduce_options(two, [0, 1])
    assert (ring.protocol, ring.latency_seconds, ring.seconds_per_byte) == ("", pytest.approx(3 * 2 * 20e-6), pytest.approx(1e-9))
    assert {one.algorithm for one in allreduce_options(hosts, range(16))} <= {Algorithm.RING, Algorithm.TREE}
    assert hosts.effective_bandwidths == tuple(link.bandwidth_bytes_per_second for link in hosts.links) and hosts.call_seconds == 0
    assert 400 < bus_bandwidth(hosts, 2**34) < 490  # eight NICs of 50 GB/s, or trees between hosts of 450 GB/s


def test_messages_reach_nccls_share_and_are_calls() -> None:
    topology, made = preset("a100-40gb-2x8"), Communication(preset("a100-40gb-2x8"))
    assert made.route_figures(0, 1) == (pytest.approx(5e-6 + 6.6e-6), pytest.approx(1 / 240e9))
    assert made.route_figures(0, 8) == (pytest.approx(2e-6 + 6.6e-6), pytest.approx(1 / 24e9))
    assert made.route_figures(3, 3) == (0.0, 0.0)
    assert exchange_seconds(topology, [(0, 1, 0), (1, 0, 0)]) == pytest.approx(5e-6 + 6.6e-6)
    assert preset("mi300x-8").call_seconds == pytest.approx(12e-6)
    for stated in (cluster([2, 2], GPU), cluster([2, 2], CPU), preset("piz-daint-2")):
        assert stated.call_seconds == 0
        assert stated.effective_bandwidths == tuple(link.bandwidth_bytes_per_second for link in stated.links)


def test_processors_take_no_notice_of_what_links_are_made_of() -> None:
    plain = cluster([2, 2], CPU)
    named = replace(plain, links=tuple(replace(link, interconnect="pcie") for link in plain.links))
    assert allreduce_options(plain, range(4)) == allreduce_options(named, range(4))
    assert [Communication(plain).route_figures(0, b) for b in range(4)] == [Communication(named).route_figures(0, b) for b in range(4)]


def test_prices_are_named_by_the_figures_that_enter_them() -> None:
    topology = preset("h100-8")
    unnamed = replace(topology, links=tuple(replace(link, interconnect="") for link in topology.links))
    assert len({Communication(own).hash for own in (topology, unnamed, measured(topology))}) == 3


def test_every_figure_is_within_reason() -> None:
    for kind in interconnects().values():
        assert 0.5 < kind.share <= 1 and 0 < kind.latency_seconds < 1e-4 and kind.ll_bytes_per_second > 1e9
        assert kind.nvls_share is None or kind.share < kind.nvls_share < 2
    for name in ("NCCL", "RCCL"):
        known = library(name)
        for medium in ("nvlink", "pcie", "network"):
            for algorithm in ("ring", "tree"):
                for protocol in known.share["several hosts"][algorithm]:
                    assert 0 < known.hop[medium][algorithm][protocol] < 1e-3 and known.base[algorithm][protocol] > 0
