"""NICs of devices and rails between hosts: which way messages go, who shares what, and one line for each mistake."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from soap.cluster import yaml_file
from soap.cluster.topology import Topology
from soap.cluster.yaml_file import parse_cluster
from soap.errors import TopologyError
from soap.simulator.communication.allreduce import allreduce_options
from tests.cluster_text import dump_cluster

NETWORK = {"bandwidth": "50 GB/s", "latency": "2 us"}
SPINE = {"bandwidth": "400 GB/s", "latency": "1 us"}


def described(hosts: list[dict[str, Any]], network: dict[str, Any] | None) -> str:
    made: dict[str, Any] = {"name": "small", "hosts": hosts}
    return yaml.safe_dump(made if network is None else {**made, "network": network}, sort_keys=False)


def host(name: str = "a", count: int | None = 2, devices: int = 4, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": name,
        "devices": {"type": "h100", "count": devices},
        "cpu_cores": 4,
        "memory": "8 GiB",
        "links": {"intra": {"bandwidth": "450 GB/s", "latency": "5 us"}},
    }
    base = base if count is None else {**base, "count": count}
    return {key: value for key, value in {**base, **changes}.items() if value is not None}


def read(hosts: list[dict[str, Any]], network: dict[str, Any] | None = NETWORK) -> Topology:
    return parse_cluster(described(hosts, network))


def names(topology: Topology, source: int, target: int) -> list[str]:
    return [topology.links[i].name for i in topology.route(source, target)]


def bottleneck(topology: Topology, source: int, target: int) -> float:
    return min(topology.links[i].bandwidth_bytes_per_second for i in topology.route(source, target))


def test_each_device_takes_its_own_rail():
    t = read([host(nics=4)], {**NETWORK, "rails": 4})
    for i in range(4):
        assert names(t, i, i + 4) == [f"a0/gpu{i}->network/rail{i}", f"network/rail{i}->a1/gpu{i}"]
        assert bottleneck(t, i, i + 4) == 50e9
        assert t.route_latency_seconds(i, i + 4) == pytest.approx(2e-6)
    assert not any(set(t.route(i, i + 4)) & set(t.route(j, j + 4)) for i in range(4) for j in range(i))
    assert names(t, 0, 3) == ["a0/gpu0->a0/switch", "a0/switch->a0/gpu3"]


def test_another_rail_is_reached_by_the_neighbour_on_it():
    """As NCCL's PXN: a hop inside the sender's host, then the receiver's rail."""
    t = read([host(nics=4, count=3)], {**NETWORK, "rails": 4})
    for source, target in ((1, 7), (7, 1), (8, 3)):
        sender, rail = f"a{source // 4}", target % 4
        assert names(t, source, target) == [
            f"{sender}/gpu{source % 4}->{sender}/switch",
            f"{sender}/switch->{sender}/gpu{rail}",
            f"{sender}/gpu{rail}->network/rail{rail}",
            f"network/rail{rail}->a{target // 4}/gpu{rail}",
        ]


def test_a_spine_joins_rails_where_it_is_faster():
    by_spine = ["a0/gpu1->network/rail1", "network/rail1->network/spine", "network/spine->network/rail3", "network/rail3->a1/gpu3"]
    with_spine = {**NETWORK, "rails": 4, "spine": SPINE}
    assert names(read([host(nics=4)], with_spine), 1, 7) == by_spine
    slow = {**with_spine, "spine": {**SPINE, "latency": "9 us"}}
    assert names(read([host(nics=4)], slow), 1, 7)[0] == "a0/gpu1->a0/switch"
    assert names(read([host(nics=4, links=None)], slow), 1, 7) == by_spine
    assert names(read([host(nics=4, links=None)], slow), 1, 3) == ["a0/gpu1->network/rail1", *by_spine[1:3], "network/rail3->a0/gpu3"]


def test_devices_share_the_nic_that_serves_them():
    t = read([host(nics=2)], {**NETWORK, "rails": 2})
    assert names(t, 1, 5) == ["a0/gpu1->a0/nic0", "a0/nic0->network/rail0", "network/rail0->a1/nic0", "a1/nic0->a1/gpu1"]
    assert names(t, 0, 5)[1:3] == names(t, 1, 5)[1:3]
    assert not set(t.route(1, 5)) & set(t.route(2, 6))
    assert t.route_latency_seconds(1, 5) == pytest.approx(2e-6)


def test_nics_without_rails_share_one_switch():
    t = read([host(nics={"bandwidth": "25 GB/s", "latency": "4 us"})])
    assert names(t, 1, 6) == ["a0/gpu1->network", "network->a1/gpu2"]
    assert bottleneck(t, 1, 6) == 25e9 and t.route_latency_seconds(1, 6) == pytest.approx(4e-6)


def test_nics_one_by_one():
    nics = [{"devices": [2, 0], "rail": 1, "bandwidth": "40 GB/s"}, {"devices": [3], "rail": 0, "latency": "8 us"}]
    t = read([host(nics=nics)], {**NETWORK, "rails": 2})
    assert names(t, 0, 6) == ["a0/gpu0->a0/nic0", "a0/nic0->network/rail1", "network/rail1->a1/nic0", "a1/nic0->a1/gpu2"]
    assert names(t, 3, 7) == ["a0/gpu3->network/rail0", "network/rail0->a1/gpu3"]
    assert bottleneck(t, 0, 6) == 40e9 and bottleneck(t, 3, 7) == 50e9
    assert t.route_latency_seconds(3, 7) == pytest.approx(8e-6)
    assert names(t, 1, 3)[0] == "a0/gpu1->a0/switch" and names(t, 1, 7)[2] == "a0/gpu3->network/rail0"  # gpu1 has no NIC


@pytest.mark.parametrize("kind", ["switch", "full", "ring", "pairs"])
def test_any_wiring_inside_a_host_goes_with_nics(kind):
    links = {"intra": {"bandwidth": "450 GB/s", "latency": "5 us", "kind": kind}}
    t = read([host(nics=4, links=links)], {**NETWORK, "rails": 4})
    plain = read([host(count=None, links=links)], None)
    assert len(t.links) == 2 * (len(plain.links) + 8)
    assert names(t, 2, 6) == ["a0/gpu2->network/rail2", "network/rail2->a1/gpu2"]
    assert names(t, 0, 5)[-1] == "network/rail1->a1/gpu1"


def test_a_single_device_with_a_nic():
    t = read([host(devices=1, nics=1, links=None)], {**NETWORK, "rails": 1})
    assert names(t, 0, 1) == ["a0/gpu0->network/rail0", "network/rail0->a1/gpu0"]


def test_hosts_of_different_size_meet_on_the_rails_they_have():
    t = read([host("a", 1, nics=4), host("b", 2, 2, nics=2), host("c", 1, nics=4)], {**NETWORK, "rails": 4})
    assert names(t, 3, 4) == ["a0/gpu3->a0/switch", "a0/switch->a0/gpu0", "a0/gpu0->network/rail0", "network/rail0->b0/gpu0"]
    assert names(t, 3, 11) == ["a0/gpu3->network/rail3", "network/rail3->c0/gpu3"]


def test_listed_links_may_name_nics_and_rails():
    made = yaml.safe_load(described([host(nics=2)], {**NETWORK, "rails": 2}))
    made |= {"links": [{"from": "network/rail0", "to": "network/rail1", "bandwidth": "1 TB/s", "latency": "0 us"},
                       {"from": "a0/nic0", "to": "a0/nic1", "bandwidth": "1 TB/s", "latency": "9 us"}]}  # fmt: skip
    t = parse_cluster(yaml.safe_dump(made))
    assert names(t, 1, 6)[1:3] == ["a0/nic0->network/rail0", "network/rail0->network/rail1"]


def test_searches_of_routes_stay_near():
    """A route inside a host does not look at other hosts, and one along a rail not at other rails."""
    t = read([host(devices=8, nics=8, count=64)], {**NETWORK, "rails": 8})
    looked_at = lambda: sum(len(done) for done, _ in t._router._inside.values())  # noqa: E731
    assert len(t.route(0, 5)) == 2 and looked_at() <= 9
    assert len(t.route(0, 8)) == 2 and looked_at() <= 9 + 9 + 66
    for i in range(504):
        t.route(i, i + 8)
    assert looked_at() < 504 * 90


def test_written_down_it_is_the_same_cluster():
    t = read([host(nics=2, count=3)], {**NETWORK, "rails": 2, "spine": SPINE})
    back = parse_cluster(dump_cluster(t))
    assert back == t and back.hash == t.hash


def test_one_nic_for_all_is_what_hosts_have_without():
    """But for the links between devices and NIC, which are no bottleneck."""
    plain, one = read([host()]), read([host(nics=1)])
    for source, target in ((0, 4), (3, 5)):
        assert bottleneck(plain, source, target) == bottleneck(one, source, target) == 50e9
    assert len({*one.route(0, 4)} & {*one.route(3, 5)}) == 2 == len({*plain.route(0, 4)} & {*plain.route(3, 5)})


def test_a_sum_over_rails_uses_all_nics():
    """There is a ring for each NIC, and a host's bandwidth is that of all of them."""
    by_rail, one = (
        min(option.seconds_per_byte for option in allreduce_options(topology, range(32)))
        for topology in (read([host(devices=8, count=4, nics=8)], {**NETWORK, "rails": 8}), read([host(devices=8, count=4)]))
    )
    assert one == pytest.approx(2 * 31 / 32 / 50e9)
    assert by_rail == pytest.approx(2 * 31 / 32 / 400e9)


@given(st.integers(1, 4), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_every_device_reaches_every_other_by_its_nic(more, devices, nics, spine):
    if devices % nics:
        return
    t = read([host(count=1 + more, devices=devices, nics=nics)], {**NETWORK, "rails": nics, **({"spine": SPINE} if spine else {})})
    for source in range(devices):
        for target in range(devices, t.device_count):
            found = [t.links[i] for i in t.route(source, target)]
            assert bottleneck(t, source, target) == 50e9
            if source * nics // devices == target % devices * nics // devices:
                assert all("switch" not in link.name for link in found)


def test_the_documented_example():
    text = textwrap.dedent((yaml_file.__doc__ or "").split("code-block:: yaml", 2)[2].split("One by one", 1)[0])
    t = parse_cluster(text)
    assert (len(t.hosts), t.device_count) == (4, 32)
    assert names(t, 3, 11) == ["dgx0/gpu3->network/rail3", "network/rail3->dgx1/gpu3"]
    assert names(t, 3, 12)[1:3] == ["network/rail3->network/spine", "network/spine->network/rail4"]


def nics(*listed: dict[str, Any]) -> dict[str, Any]:
    return host(nics=list(listed))


RAILS = {**NETWORK, "rails": 4}
MISTAKES: list[tuple[list[dict[str, Any]], dict[str, Any] | None, str]] = [
    ([nics({"devices": [0], "rail": 7})], RAILS,
     "hosts[0].nics[0].rail: there is no rail 7; expected 0 to 3: raise network.rails, or lead the NIC elsewhere"),
    ([nics({"devices": [0], "rail": -1})], RAILS,
     "hosts[0].nics[0].rail: there is no rail -1; expected 0 to 3: raise network.rails, or lead the NIC elsewhere"),
    ([nics({"devices": [0], "rail": "left"})], RAILS,
     "hosts[0].nics[0].rail: there is no rail 'left'; expected 0 to 3: raise network.rails, or lead the NIC elsewhere"),
    ([host(devices=8, nics=8)], RAILS,
     "hosts[0].nics: there is no rail 4; expected 0 to 3: raise network.rails, or lead the NIC elsewhere"),
    ([nics({"devices": [0]}, {"devices": [4]})], RAILS,
     "hosts[0].nics[1].devices[0]: 4; expected the place of a device in its host, from 0 to 3"),
    ([nics({"devices": ["gpu0"]})], RAILS, "hosts[0].nics[0].devices[0]: 'gpu0'; expected the place of a device in its host, from 0 to 3"),
    ([nics({"devices": [True]})], RAILS, "hosts[0].nics[0].devices[0]: True; expected the place of a device in its host, from 0 to 3"),
    ([nics({"devices": [0, 1]}, {"devices": [1]})], RAILS,
     "hosts[0].nics[1].devices: device 1 is served by nics[0] already; expected one NIC per device"),
    ([nics({"devices": [2, 2]})], RAILS, "hosts[0].nics[0].devices: device 2 is served by nics[0] already; expected one NIC per device"),
    ([nics({"devices": []})], RAILS, "hosts[0].nics[0].devices: a list of 0 elements; expected a list with at least one element"),
    ([nics({"rail": 0})], RAILS, "hosts[0].nics[0].devices: missing; expected a value: add 'devices'"),
    ([nics({"device": [0]})], RAILS,
     "hosts[0].nics[0].device: unknown key; expected one of devices, rail, bandwidth, latency: did you mean 'devices'?"),
    ([nics()], RAILS, "hosts[0].nics: a list of 0 elements; expected a list with at least one element"),
    ([host()], RAILS, "hosts[0].nics: missing; expected the host's NICs, which network.rails joins: write such as 'nics: 8'"),
    ([host(nics=4), host("b")], RAILS,
     "hosts[1].nics: missing; expected the host's NICs, which network.rails joins: write such as 'nics: 8'"),
    ([host(nics=4)], None, "hosts[0].nics: not used without a network; remove it or add network"),
    ([nics({"devices": [0], "rail": 0})], NETWORK,
     "hosts[0].nics[0].rail: not used on a network without rails; remove it or add network.rails"),
    ([host(nics=3)], RAILS, "hosts[0].nics: 3 NICs for 4 devices; expected equal parts: list the NICs with their devices"),
    ([host(nics={"count": 8})], RAILS, "hosts[0].nics.count: 8 NICs for 4 devices; expected equal parts: list the NICs with their devices"),
    ([host(nics=0)], RAILS, "hosts[0].nics: 0; expected a whole number from 1 to 2147483648"),
    ([host(nics="many")], RAILS, "hosts[0].nics: 'many'; expected a whole number from 1 to 2147483648"),
    ([host(nics={"bandwidth": "50 GB"})], RAILS,
     "hosts[0].nics.bandwidth: '50 GB' has unit 'GB'; expected a bandwidth such as '100 Gbit/s' or '900 GB/s': "
     "use one of B/s, kB/s, MB/s, GB/s, TB/s, PB/s, KiB/s, MiB/s, GiB/s, TiB/s, PiB/s, bit/s"),
    ([host(nics=4, links={"intra": {"bandwidth": "1 GB/s", "latency": "1 us", "kind": "full"}, "host": {}})], RAILS,
     "hosts[0].links.host: not used with nics, at which the devices sit; remove it"),
    ([host(nics=4)], {**NETWORK, "rails": 0}, "network.rails: 0; expected a whole number from 1 to 1024"),
    ([host(nics=4)], {**NETWORK, "rails": 5},
     "network.rails: rail 4 joins no host; expected a NIC on each rail: lower the number of rails"),
    ([host(nics=4, count=None)], RAILS,
     "network.rails: rail 0 leads nowhere, since 'a' alone has a NIC on it; expected two hosts on each rail: correct their nics, or add "
     "network.spine"),
    ([host(nics=2, count=2), host("b", 1, nics=4)], RAILS,
     "network.rails: rail 2 leads nowhere, since 'b0' alone has a NIC on it; expected two hosts on each rail: correct their nics, or add "
     "network.spine"),
    ([host(nics=4)], {**NETWORK, "spine": SPINE}, "network.spine: not used without rails, which it joins; remove it or add network.rails"),
    ([host(nics=4)], {**RAILS, "spine": 3}, "network.spine: 3; expected a mapping with the keys bandwidth, latency"),
    ([host(nics=4)], {"rails": 4}, "network.bandwidth: missing; expected a value: add 'bandwidth'"),
    ([host("a", 2, links=None, nics=[{"devices": [0]}])], {**NETWORK, "rails": 1},
     "no route from 'a0/gpu0' to 'a0/gpu1' on cluster 'small'; add links that connect them"),
]  # fmt: skip


@pytest.mark.parametrize(("hosts", "network", "line"), MISTAKES, ids=[str(i) for i in range(len(MISTAKES))])
def test_each_mistake_gets_one_line(hosts, network, line):
    with pytest.raises(TopologyError) as refused:
        read(hosts, network)
    assert str(refused.value) == f"cluster.yaml: {line}"


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["devices", "rail", "count", "bandwidth", "latency", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(JUNK, JUNK | st.integers(1, 4), JUNK)
def test_junk_is_refused_in_one_line_or_read(nics, rails, spine):
    network = {key: value for key, value in {**NETWORK, "rails": rails, "spine": spine}.items() if value is not None}
    try:
        read([host(nics=nics)], network)
    except TopologyError as refused:
        assert "\n" not in str(refused) and len(str(refused)) < 400
