"""What of a topology is emulated, and which are refused."""

from __future__ import annotations

import warnings

import pytest

from soap.cluster.presets import preset
from soap.cluster.topology import Topology
from soap.cluster.yaml_file import parse_cluster
from soap.emulation.hosts import HostLimits, host_limits
from soap.errors import RuntimeFailure, SoapWarning

CORE = "{core: {kind: cpu, flops: {float32: 50 GFLOP/s}, memory_bandwidth: 10 GB/s, memory: 4 GiB, kernel_overhead: 5 us}}"


def described(hosts: str, rest: str) -> Topology:
    return parse_cluster(f"name: boxes\ndevice_types: {CORE}\nhosts:\n{hosts}\n{rest}\n")


def boxes(count: int = 3, devices: int = 2, intra: str = "4 GB/s", network: str = "800 Mbit/s", latency: str = "50 us") -> Topology:
    links = f"links: {{intra: {{bandwidth: {intra}, latency: 10 us}}}}"
    host = f"  - {{name: box, count: {count}, devices: {{type: core, count: {devices}}}, cpu_cores: 2, memory: 8 GiB, {links}}}"
    return described(host, f"network: {{bandwidth: {network}, latency: {latency}}}")


def quietly(topology: Topology, scale: float = 1.0, cores: int = 64) -> tuple[HostLimits, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return host_limits(topology, scale, cores)


@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_cards_of_a_network(scale: float) -> None:
    topology = boxes()
    hosts = quietly(topology, scale)
    assert [(host.name, host.ranks) for host in hosts] == [("box0", (0, 1)), ("box1", (2, 3)), ("box2", (4, 5))]
    for host in hosts:
        assert host.sending is not None and host.receiving is not None
        assert topology.links[host.sending.link].name == f"{host.name}/switch->network"
        assert topology.links[host.receiving.link].name == f"network->{host.name}/switch"
        assert host.sending.bytes_per_second == host.receiving.bytes_per_second == 100e6 * scale
        assert host.cores == 2 * scale
        assert host.local_bytes_per_second == (None if scale == 1 else 1e9)  # two ranks at 4 GB/s, if that is below loopback's


def test_slow_links_within_a_host_are_limited_once_for_all_its_ranks() -> None:
    assert [host.local_bytes_per_second for host in quietly(boxes(2, 3, intra="200 MB/s"))] == [600e6, 600e6]


def test_two_hosts_share_what_lies_between_them_and_count_at_their_own_end() -> None:
    topology = boxes(2, 1)
    names = [
        (topology.links[h.sending.link].name, topology.links[h.receiving.link].name) for h in quietly(topology) if h.sending and h.receiving
    ]
    assert [(sent.split("->")[0], received.split("->")[1]) for sent, received in names] == [
        ("box0/cpu0", "box0/cpu0"),
        ("box1/cpu0", "box1/cpu0"),
    ]


def test_ways_of_unequal_rates_in_both_directions() -> None:
    hosts = "\n".join(f"  - {{name: {name}, devices: {{type: core}}, cpu_cores: 1, memory: 1 GiB}}" for name in "abc")
    up = [
        f"  - {{from: {n}/cpu0, to: hub, bandwidth: {rate} MB/s, latency: 1 us, duplex: false}}"
        for n, rate in zip("abc", (30, 40, 50), strict=True)
    ]
    down = [f"  - {{from: hub, to: {n}/cpu0, bandwidth: 60 MB/s, latency: 1 us, duplex: false}}" for n in "abc"]
    found = quietly(described(hosts, "\n".join(["switches: [hub]", "links:", *up, *down])))
    assert [h.sending.bytes_per_second for h in found if h.sending] == [30e6, 40e6, 50e6]
    assert [h.receiving.bytes_per_second for h in found if h.receiving] == [60e6] * 3


@pytest.mark.parametrize(("name", "shares"), [("emulated:4x1", [0.375] * 4), ("emulated:2x2@5Mbit/s", [0.75] * 2), ("local:4", [2.0])])
def test_devices_measured_here_have_the_cores_among_themselves(name: str, shares: list[float]) -> None:
    hosts = quietly(preset(name), cores=2)
    assert [host.cores for host in hosts] == shares
    assert all(host.local_bytes_per_second is None for host in hosts)
    assert [host.sending is None for host in hosts] == [len(shares) == 1] * len(shares)


def test_more_cores_than_the_machine_has() -> None:
    with pytest.raises(RuntimeFailure, match=r"have 6 CPU cores in all, times 1; this machine has 4: use --emulate-scale 0\.666 or less"):
        host_limits(boxes(), 1.0, 4)
    assert [host.cores for host in quietly(boxes(), 0.666, 4)] == [1.332] * 3


def test_hosts_with_several_links_are_refused() -> None:
    hosts = "\n".join(f"  - {{name: {name}, devices: {{type: core}}, cpu_cores: 1, memory: 1 GiB}}" for name in "abc")
    ring = [f"  - {{from: {a}/cpu0, to: {b}/cpu0, bandwidth: 1 MB/s, latency: 1 us}}" for a, b in ("ab", "bc", "ca")]
    with pytest.raises(RuntimeFailure, match="host 'a' of cluster 'boxes' reaches the others by several links; expected one network card"):
        host_limits(described(hosts, "\n".join(["links:", *ring])), 1.0, 64)


def test_a_narrow_place_between_cards_is_refused() -> None:
    hosts = "\n".join(f"  - {{name: {name}, devices: {{type: core}}, cpu_cores: 1, memory: 1 GiB}}" for name in "abcd")
    links = [
        f"  - {{from: {n}/cpu0, to: {hub}, bandwidth: 10 MB/s, latency: 1 us}}" for n, hub in zip("abcd", ("x", "x", "y", "y"), strict=True)
    ]
    links.append("  - {from: x, to: y, bandwidth: 5 MB/s, latency: 1 us}")
    with pytest.raises(RuntimeFailure, match=r"'a/cpu0' to 'c/cpu0' on cluster 'boxes': 5.00 MB/s, but the hosts' cards have 10.0 MB/s"):
        host_limits(described(hosts, "\n".join(["switches: [x, y]", "links:", *links])), 1.0, 64)


def test_too_many_hosts() -> None:
    with pytest.raises(RuntimeFailure, match="has 251 hosts; expected at most 250"):
        host_limits(preset("emulated:251x1"), 1.0, 2)


def test_says_what_will_be_otherwise() -> None:
    with pytest.warns(SoapWarning, match=r"a latency of 20.0 ms between hosts is not emulated"):
        host_limits(boxes(latency="20 ms"), 1.0, 64)
    with pytest.warns(SoapWarning, match=r"links of 12.5 GB/s are more than processes of one machine reach, about 1.00 GB/s"):
        host_limits(boxes(intra="20 GB/s", network="100 Gbit/s"), 1.0, 64)
    assert len(quietly(boxes(intra="20 GB/s", network="100 Gbit/s"), 0.05)) == 3
