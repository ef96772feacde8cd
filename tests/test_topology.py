"""Topologies: what is refused, which routes are taken, and what identifies a cluster."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest

from soap.cluster.topology import CollectiveLatencyFactor, Device, DeviceType, Host, Link, Topology
from soap.errors import TopologyError

CPU = DeviceType("core", "cpu", {"float32": 32e9}, 8e9, 2**32, 5e-6, "a test")
HOST = Host("h", 4, 2**34)


def topology(device_count: int, wires: list[tuple], *, hosts: int = 1, device_type: DeviceType = CPU, name: str = "t") -> Topology:
    """Devices d0, d1, … round robin over hosts; ``wires``: (source, target, bandwidth, latency)."""
    devices = tuple(Device(i, f"d{i}", i % hosts, device_type) for i in range(device_count))
    links = tuple(Link(i, f"{wire[0]}->{wire[1]}", *wire) for i, wire in enumerate(wires))
    return Topology(name, devices, tuple(replace(HOST, name=f"h{i}") for i in range(hosts)), links)


def both(a: str, b: str, bandwidth: float = 1e9, latency: float = 1e-6) -> list[tuple]:
    return [(a, b, bandwidth, latency), (b, a, bandwidth, latency)]


def test_rates_fall_back_to_float32():
    gpu = DeviceType("g", "cuda", {"float32": 10e12, "bfloat16": 80e12}, 1e12, 2**34, 5e-6, "a test")
    assert gpu.flops("float32") == 10e12
    assert gpu.flops("bfloat16") == 80e12
    assert gpu.flops("float16") == 10e12
    assert gpu.flops("int64") == 10e12
    assert gpu.flops("float64") == 5e12


def test_device_types_are_immutable_hashable_and_picklable():
    rates = {"float32": 1e9}
    one = DeviceType("x", "cpu", rates, 1e9, 100, 0.0, "s")
    rates["float32"] = 2e9
    assert one.flops("float32") == 1e9
    with pytest.raises(TypeError):
        one.flops_per_second["float32"] = 3e9  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        one.name = "y"  # type: ignore[misc]
    assert {one: 1}[pickle.loads(pickle.dumps(one))] == 1


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"kind": "tpu"}, "device type 'core': kind 'tpu'; expected one of cpu, cuda"),
        ({"flops_per_second": {}}, "device type 'core': no compute rate for float32; add it: other dtypes fall back to it"),
        ({"flops_per_second": {"float32": 0.0}}, "device type 'core': rate for float32 is 0.0; expected a finite number above 0"),
        ({"memory_bytes": -1}, "device type 'core': memory is -1; expected a finite number above 0"),
        ({"kernel_seconds": float("nan")}, "device type 'core': kernel time is nan; expected a finite number of at least 0"),
    ],
)
def test_impossible_device_types_are_refused(changes, line):
    with pytest.raises(TopologyError) as refused:
        replace(CPU, **changes)
    assert str(refused.value) == line


def test_direct_link_beats_the_way_over_a_switch():
    t = topology(3, both("d0", "s") + both("d1", "s") + both("d2", "s") + both("d0", "d1"))
    assert t.route(0, 1) == (6,)
    assert t.route(1, 0) == (7,)
    assert t.route(0, 2) == (0, 5)
    assert t.route(2, 2) == ()
    assert t.switches == ("s",)


def test_the_narrowest_link_counts_once():
    """Three links of 1 GB/s are faster than one of 0.9 GB/s, though the sum of their bytes/bandwidth is larger."""
    slow = both("d0", "d1", 0.9e9, 0.0)
    t = topology(2, slow + both("d0", "a", 1e9, 1e-6) + both("a", "b", 1e9, 1e-6) + both("b", "d1", 1e9, 1e-6))
    assert t.route(0, 1) == (2, 4, 6)


def test_ties_go_to_fewer_links_and_then_lower_numbers():
    fewer = both("d0", "a", 1e9, 0.0) + both("a", "d1", 1e9, 0.0) + both("d0", "d1", 1e9, 0.0)
    assert topology(2, fewer).route(0, 1) == (4,)
    equal = both("d0", "a") + both("d0", "b") + both("b", "d1") + both("a", "d1")
    assert topology(2, equal).route(0, 1) == (0, 6)
    assert topology(2, equal).route(1, 0) == (5, 3)


def test_directions_are_separate():
    t = topology(2, [("d0", "s", 1e9, 0.0), ("s", "d1", 1e9, 0.0), ("d1", "d0", 1e9, 0.0)])
    assert (t.route(0, 1), t.route(1, 0)) == ((0, 1), (2,))


def test_distance():
    t = topology(4, [wire for i in range(4) for wire in both(f"d{i}", "s")], hosts=2)
    assert [t.distance(0, j) for j in range(4)] == [0, 2, 1, 2]


def test_hash_ignores_names_of_cluster_and_source_but_no_figure():
    wires = both("d0", "d1")
    base = topology(2, wires)
    assert len(base.hash) == 16 and int(base.hash, 16) >= 0
    assert topology(2, wires, name="other").hash == base.hash
    assert topology(2, wires, device_type=replace(CPU, source="elsewhere")).hash == base.hash
    assert topology(2, wires, device_type=replace(CPU, memory_bandwidth_bytes_per_second=int(8e9))).hash == base.hash
    others = [
        topology(2, both("d0", "d1", 2e9)),
        topology(2, both("d0", "d1", 1e9, 2e-6)),
        topology(2, wires, hosts=2),
        topology(2, wires, device_type=replace(CPU, memory_bytes=1)),
        topology(2, wires, device_type=replace(CPU, flops_per_second={"float32": 1.0})),
        topology(2, wires, device_type=replace(CPU, kernel_seconds=0.0)),
    ]
    assert len({base.hash, *(other.hash for other in others)}) == 7


def test_topologies_survive_pickling_with_and_without_routes():
    t = topology(2, both("d0", "d1"))
    copy = pickle.loads(pickle.dumps(t))
    assert copy == t and copy.hash == t.hash and copy.route(0, 1) == t.route(0, 1)


def test_graph_has_devices_switches_and_links():
    t = topology(2, both("d0", "s") + both("s", "d1"))
    assert dict(t.graph.nodes(data="device")) == {"d0": 0, "d1": 1, "s": None}
    assert sorted(t.graph.edges(data="link")) == [("d0", "s", 0), ("d1", "s", 3), ("s", "d0", 1), ("s", "d1", 2)]


def test_devices_by_name():
    t = topology(2, both("d0", "d1"))
    assert t.device("d1").index == 1
    with pytest.raises(TopologyError) as refused:
        t.device("d9")
    assert str(refused.value) == "device 'd9' does not exist on cluster 't'; expected one of d0, d1"


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: topology(0, []), "cluster 't' has no devices; expected at least one"),
        (lambda: topology(2, []), "no route from 'd0' to 'd1' on cluster 't'; add links that connect them"),
        (lambda: topology(2, [("d0", "d1", 1e9, 0.0)]), "no route from 'd1' to 'd0' on cluster 't'; add links that connect them"),
        (lambda: topology(2, both("d0", "d0")), "link 'd0->d0' leads from 'd0' to itself; expected two different nodes"),
        (lambda: topology(2, both("d0", "d1", 0.0)), "link 'd0->d1': bandwidth is 0.0; expected a finite number above 0"),
        (lambda: topology(2, both("d0", "d1", 1e9, -1.0)), "link 'd0->d1': latency is -1.0; expected a finite number of at least 0"),
        (lambda: topology(2, both("d0", "d1") * 2), "link name 'd0->d1' occurs twice; expected unique names"),
        (
            lambda: Topology("t", (Device(0, "d0", 0, CPU), Device(1, "d0", 0, CPU)), (HOST,), ()),
            "device name 'd0' occurs twice; expected unique names",
        ),
        (lambda: Topology("t", (Device(1, "d0", 0, CPU),), (HOST,), ()), "device 'd0' has index 1; expected its position 0"),
        (lambda: Topology("t", (Device(0, "d0", 1, CPU),), (HOST,), ()), "device 'd0' is on host 1; expected 0 to 0"),
        (lambda: Host("h", 0, 1), "host 'h': number of CPU cores is 0; expected a finite number above 0"),
    ],
)
def test_impossible_clusters_are_refused(make, line):
    with pytest.raises(TopologyError) as refused:
        make()
    assert str(refused.value) == line


def test_parallel_links_are_refused():
    links = (Link(0, "one", "d0", "d1", 1e9, 0.0), Link(1, "two", "d0", "d1", 1e9, 0.0))
    devices = (Device(0, "d0", 0, CPU), Device(1, "d1", 0, CPU))
    with pytest.raises(TopologyError) as refused:
        Topology("t", devices, (HOST,), links)
    expected = "links 'one' and 'two' both lead from 'd0' to 'd1'; give one link with the sum of their bandwidths"
    assert str(refused.value) == expected


def test_import_is_light():
    code = "import sys, soap.cluster.yaml_file; print([m for m in ('torch', 'networkx', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_measured_figures_are_no_part_of_the_identity():
    wires = both("d0", "d1")
    measured = replace(topology(2, wires), measured=True)
    again = replace(topology(2, wires, device_type=replace(CPU, memory_bandwidth_bytes_per_second=1e9)), measured=True)
    assert measured.hash == again.hash != topology(2, wires).hash
    assert measured.hash != replace(topology(3, both("d0", "d1") + both("d1", "d2")), measured=True).hash
    assert pickle.loads(pickle.dumps(measured)).measured


def test_latency_factor_between_and_beyond_what_was_measured() -> None:
    found = CollectiveLatencyFactor(all_reduce=((2, 1.0), (4, 3.0)))
    assert [found.of_all_reduce(devices) for devices in (1, 2, 3, 4, 9)] == [1.0, 1.0, 2.0, 3.0, 3.0]
    assert found.of_exchange(4) == 1.0
