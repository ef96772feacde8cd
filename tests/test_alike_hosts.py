"""Routes that are found for a few of many alike hosts are those that the whole cluster's network has."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import event, given
from hypothesis import strategies as st

from soap import api
from soap.cluster.alike_hosts import AlikeHosts
from soap.cluster.build import build_cluster
from soap.cluster.presets import device_types
from soap.cluster.routes import Router
from soap.cluster.topology import Topology
from soap.simulator.communication.allreduce import allreduce_options, parted_options
from tests.extent import USUAL


@st.composite
def clusters(draw: st.DrawFn) -> Topology:
    """Hosts with one or two switches between them, reached in drawn ways and times; some links are equally fast."""
    devices, figures = draw(st.sampled_from([2, 4])), st.sampled_from([("25 GB/s", "1 us"), ("50 GB/s", "1 us"), ("50 GB/s", "2 us")])

    def way() -> dict[str, str]:
        bandwidth, latency = draw(figures)
        return {"bandwidth": bandwidth, "latency": latency}

    kind = draw(st.sampled_from(["switch", "full", "ring"]))
    host = {"count": 14, "cpu_cores": 8, "devices": {"type": "h100", "count": devices}, "links": {"intra": {"kind": kind, **way()}}}
    host["nics"] = draw(st.sampled_from([2, [{"devices": list(range(devices // 2))}, {"devices": list(range(devices // 2, devices))}]]))
    if host["nics"] == 2 and devices == 4:
        host["nics"] = [{"devices": [0, 2]}, {"devices": [1, 3]}]
    network = {"rails": 2, **way(), **({"spine": way()} if draw(st.booleans()) else {})}
    return build_cluster({"name": "drawn", "hosts": [host], "network": network}, device_types(), "drawn")


def check(topology: Topology) -> bool:
    """Whether all routes of alike hosts are the network's, and there are some."""
    alike = AlikeHosts.find(topology.devices, topology.links)
    if alike is None:
        return False
    router, names = Router(topology.links), [device.name for device in topology.devices]
    pairs = [(a, b) for a in range(topology.device_count) for b in range(topology.device_count)]
    expected = [router.path(names[a], names[b]) for a, b in pairs]
    found = [alike.route(a, b) for a, b in pairs]
    assert all(own in (None, path) for own, path in zip(found, expected, strict=True))
    together = alike.routes([a for a, _ in pairs], [b for _, b in pairs])
    if None in found:
        assert together is None
    else:
        assert [tuple(row[row >= 0].tolist()) for row in together] == expected
    return None not in found


@USUAL
@given(clusters())
def test_routes_are_those_of_the_whole_network(topology: Topology) -> None:
    event(f"all routes are the same for all hosts: {check(topology)}")


@USUAL
@given(clusters(), st.data())
def test_sums_over_devices_that_lie_alike_hold_corresponding_links(topology: Topology, data: st.DataObject) -> None:
    """What is found for devices of some hosts is, on others, what these have by themselves."""
    alike = topology.alike_hosts
    if alike is None:
        return
    hosts, each = len(topology.hosts), topology.device_count // len(topology.hosts)
    count = data.draw(st.integers(1, 4))
    places = [(k, place) for k in range(count) for place in sorted(data.draw(st.sets(st.integers(0, each - 1), min_size=1)))]
    one, other = (sorted(data.draw(st.sets(st.integers(0, hosts - 1), min_size=count, max_size=count))) for _ in range(2))
    first, second = (tuple(each * own[k] + place for k, place in places) for own in (one, other))
    found, moved = alike.form(first), alike.form(second)
    if len(places) == 1 or found is None or moved is None:
        return
    assert found[0] == moved[0]
    for of in (allreduce_options, parted_options):
        for own, theirs in zip(of(topology, second), of(topology, first), strict=True):
            assert own == replace(theirs, links=alike.moved(theirs.links, found[1], moved[1]))


def test_all_routes_of_a_preset_are_the_same_for_all_hosts() -> None:
    assert check(api.load_cluster("h100-26x2"))


def test_hosts_that_are_not_alike() -> None:
    """One link of one host is slower; or hosts are few."""
    topology = api.load_cluster("h100-26x2")
    slower = replace(topology.links[5], bandwidth_bytes_per_second=1e9)
    links = tuple(slower if link.index == 5 else link for link in topology.links)
    assert AlikeHosts.find(topology.devices, links) is None
    few = api.load_cluster("h100-4x2")
    assert AlikeHosts.find(few.devices, few.links) is None
