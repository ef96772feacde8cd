"""Presets: the clusters that people know by name, and the sources of their figures."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest

from soap.cluster import presets
from soap.cluster.presets import device_types, local_topology, preset, preset_names
from soap.cluster.topology import DeviceType
from soap.errors import TopologyError

ALL = (
    "local:N, emulated:HxD@RATE, p100-4x4, k80-16x4, titanxp-8x6, muradin, thesis-4x4, v100-[Nx]D, a100-40gb-[Nx]D, a100-80gb-[Nx]D, "
    "h100-[Nx]D, h100-96gb-500w-[Nx]D, h200-[Nx]D, b200-[Nx]D, gb200-[Nx]D, mi300x-[Nx]D, l4-[Nx]D, rtx4090-D, piz-daint-N"
)
EXAMPLES = (
    "p100-4x4", "k80-16x4", "titanxp-8x6", "muradin", "thesis-4x4", "v100-8", "v100-2x8", "a100-40gb-8", "a100-40gb-2x8", "a100-80gb-8",
    "a100-80gb-2x8",
    "h100-8", "h100-2x8", "h100-96gb-500w-8", "h100-96gb-500w-2x8", "h200-8", "h200-2x8", "b200-8", "b200-2x8", "gb200-72", "gb200-2x64",
    "mi300x-8", "mi300x-2x8", "l4-4", "l4-2x4", "rtx4090-2", "piz-daint", "piz-daint-2",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "hosts", "devices", "device", "cores"),
    [
        ("p100-4x4", 4, 16, "p100", 20),
        ("k80-16x4", 16, 64, "k80", 20),
        ("titanxp-8x6", 8, 48, "titanxp", 36),
        ("h200-8", 1, 8, "h200", 112),
        ("h200-4x8", 4, 32, "h200", 112),
        ("v100-8", 1, 8, "v100-16gb", 40),
        ("v100-4x8", 4, 32, "v100-16gb", 40),
        ("v100-2x3", 2, 6, "v100-16gb", 40),
        ("a100-40gb-8", 1, 8, "a100-40gb", 128),
        ("a100-80gb-2x8", 2, 16, "a100-80gb", 128),
        ("h100-16x8", 16, 128, "h100", 112),
        ("h100-3x5", 3, 15, "h100", 112),
        ("b200-8", 1, 8, "b200", 112),
        ("h100-96gb-500w-4x8", 4, 32, "h100-96gb-500w", 112),
        ("gb200-72", 1, 72, "gb200", 2592),
        ("gb200-4x64", 4, 256, "gb200", 2592),
        ("mi300x-8", 1, 8, "mi300x", 64),
        ("l4-4", 1, 4, "l4", 24),
        ("rtx4090-2", 1, 2, "rtx4090", 32),
        ("muradin", 1, 8, "titanv", 10),
        ("piz-daint", 16, 16, "p100-pcie", 12),
        ("piz-daint-128", 128, 128, "p100-pcie", 12),
    ],
)
def test_shapes(name, hosts, devices, device, cores):
    t = preset(name)
    assert (t.name, len(t.hosts), t.device_count) == (name, hosts, devices)
    assert {d.type.name for d in t.devices} == {device}
    assert {h.cpu_cores for h in t.hosts} == {cores}
    assert [d.host for d in t.devices] == [i * hosts // devices for i in range(devices)]


@pytest.mark.parametrize(
    ("name", "inside", "between"),
    [("p100-4x4", 20e9, 12.5e9), ("k80-16x4", 15.75e9, 7e9), ("titanxp-8x6", 15.75e9, 12.5e9)],
)
def test_bottlenecks(name, inside, between):
    t = preset(name)
    last = t.device_count - 1
    assert min(t.links[i].bandwidth_bytes_per_second for i in t.route(0, 1)) == inside
    assert min(t.links[i].bandwidth_bytes_per_second for i in t.route(0, last)) == between
    assert t.distance(0, 1) == 1 and t.distance(0, last) == 2


def test_routes_of_the_published_clusters():
    p100, k80 = preset("p100-4x4"), preset("k80-16x4")
    assert [p100.links[i].name for i in p100.route(0, 3)] == ["node0/gpu0->node0/gpu3"]
    assert [k80.links[i].name for i in k80.route(0, 1)] == ["node0/gpu0->node0/switch0", "node0/switch0->node0/gpu1"]
    cards = [{p100.links[i].name for i in p100.route(d, d + 4) if "network" in p100.links[i].name} for d in range(4)]
    assert all(names == {"node0/switch->network", "network->node1/switch"} for names in cards)


def leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and "value" not in node:
        for key, item in node.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(node, list):
        for i, item in enumerate(node):
            yield from leaves(item, f"{path}[{i}]")
    else:
        yield path, node


@pytest.mark.parametrize("name", ["device_types.json", "clusters.json", "cluster_families.json"])
def test_every_number_stands_beside_its_source(name):
    data = json.loads(files("soap").joinpath("profiles", "data", name).read_text(encoding="utf-8"))
    for path, leaf in leaves(data, name):
        if path.rsplit(".", 1)[-1] not in ("kind", "source", "name", "type", "interconnect"):
            assert set(leaf) == {"value", "source"} and len(leaf["source"]) >= 10, path
    for entry in data.values():
        assert len(entry["source"]) >= 10


@pytest.mark.parametrize(
    ("node", "line"),
    [
        ({"count": 4}, "x.count: 4 stands alone; expected 'value' and 'source'"),
        ({"latency": "2 us"}, "x.latency: '2 us' stands alone; expected 'value' and 'source'"),
        ({"count": {"value": 4}}, "x.count: a value without its source; expected 'value' and 'source'"),
        ({"count": {"value": 4, "source": " "}}, "x.count: a value without its source; expected 'value' and 'source'"),
    ],
)
def test_data_without_source_is_refused(node, line):
    with pytest.raises(TopologyError) as refused:
        presets._plain(node, "x")
    assert str(refused.value) == line


def test_local_shares_the_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    core = device_types()["cpu-core"]
    two, sixteen = preset("local:2"), preset("local:16")
    assert two.devices[0].type.flops("float32") == core.flops("float32")
    assert sixteen.devices[0].type.flops("float32") == core.flops("float32") / 4
    assert sixteen.devices[0].type.memory_bandwidth_bytes_per_second == core.memory_bandwidth_bytes_per_second / 4
    assert two.devices[0].type.memory_bytes * 2 == two.hosts[0].memory_bytes
    assert two.hosts[0].cpu_cores == 4
    assert [d.name for d in two.devices] == ["local/cpu0", "local/cpu1"]
    assert two.distance(0, 1) == 1


def test_local_takes_measured_figures():
    measured = DeviceType("this core", "cpu", {"float32": 50e9}, 10e9, 2**31, 3e-6, "measured")
    t = local_topology(3, measured, 2e9, 10e-6)
    assert [d.type for d in t.devices] == [measured] * 3
    assert [t.links[i].bandwidth_bytes_per_second for i in t.route(0, 2)] == [2e9, 2e9]
    assert sum(t.links[i].latency_seconds for i in t.route(0, 2)) == 10e-6
    assert [d.name for d in local_topology(2, device_types()["h200"]).devices] == ["local/gpu0", "local/gpu1"]


def test_local_is_the_same_cluster_every_time():
    assert preset("local:4").hash == preset("local:4").hash != preset("local:3").hash
    assert preset("local:1").links == ()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("local:", "cluster 'local:': '' is no number of devices; expected 1 to 1024, such as 'local:4'"),
        ("local", "cluster 'local': '' is no number of devices; expected 1 to 1024, such as 'local:4'"),
        ("local:04", "cluster 'local:04': '04' is no number of devices; expected 1 to 1024, such as 'local:4'"),
        ("local:0", "cluster 'local:0': '0' is no number of devices; expected 1 to 1024, such as 'local:4'"),
        ("local:-1", "cluster 'local:-1': '-1' is no number of devices; expected 1 to 1024, such as 'local:4'"),
        ("local:four", "cluster 'local:four': 'four' is no number of devices; expected 1 to 1024, such as 'local:4'"),
        ("local:99999", "cluster 'local:99999': '99999' is no number of devices; expected 1 to 1024, such as 'local:4'"),
        ("p100-4x8", f"unknown cluster 'p100-4x8'; expected one of {ALL}: did you mean 'p100-4x4'?"),
        ("h100", f"unknown cluster 'h100'; expected one of {ALL}: did you mean 'h100-8'?"),
        ("moon", f"unknown cluster 'moon'; expected one of {ALL}: or give the path of a YAML file"),
    ],
)
def test_unknown_names_list_the_known_ones(name, line):
    with pytest.raises(TopologyError) as refused:
        preset(name)
    assert str(refused.value) == line


def test_names():
    assert ", ".join(preset_names()) == ALL


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_preset_is_connected_and_found_again_by_its_name(name):
    made = preset(name)
    assert made.name == name and presets.says_all(name) and presets.family(name) is None
    first, last = 0, made.device_count - 1
    for source, target in ((first, last), (last, first), (first, 1), (made.device_count // 2, first)):
        assert source == target or made.route(source, target)
    assert preset(name).hash == made.hash


def test_examples_name_every_preset_and_family():
    fixed = [name for name in preset_names() if not name.endswith("D") and ":" not in name and not name.endswith("-N")]
    families = {name.rpartition("-")[0] for name in preset_names() if name.endswith(("D", "-N")) and ":" not in name}
    assert set(fixed) <= set(EXAMPLES)
    assert families <= {name.rpartition("-")[0] for name in EXAMPLES}


def test_clusters_of_before_keep_their_hashes():
    """Strategies and measurements are kept for a hash. ``h200-8`` has another since its sheet has rates of TF32 and float8, and since its
    memory is what the driver reports less what a process takes: its wires and its host are the same."""
    known = {"p100-4x4": "ceee9ceb91a36d01", "k80-16x4": "d2806cec2040365d", "titanxp-8x6": "0f39962fa67b34a6"}
    assert {name: preset(name).hash for name in known} == known
    h200 = preset("h200-8")
    rates = {"float64": 34e12, "float32": 67e12, "bfloat16": 989.5e12, "float16": 989.5e12}
    before = replace(h200.devices[0].type, flops_per_second=rates, memory_bytes=141 * 10**9)
    assert replace(h200, devices=tuple(replace(device, type=before) for device in h200.devices)).hash == "c6ae2b89858f5ba4"


def test_hosts_of_several_differ_from_one_by_their_network_only():
    one, four = preset("h100-8"), preset("h100-4x8")
    assert [link.name.replace("host/", "host0/") for link in one.links] == [link.name for link in four.links[:16]]
    assert {link.bandwidth_bytes_per_second for link in four.links if "rail" in link.name} == {50e9}
    assert preset("h100-1x8").hash == one.hash


def test_a_dgx1_is_a_hybrid_cube_mesh_with_a_nic_for_each_two_gpus():
    host, two = preset("v100-8"), preset("v100-2x8")
    leaving = {device.name: 0.0 for device in host.devices}
    for link in host.links:
        leaving[link.source] += link.bandwidth_bytes_per_second
    assert set(leaving.values()) == {6 * 25e9}  # six NVLinks
    assert len(host.links) == 2 * 16 and [len(preset(f"v100-{n}").links) for n in (1, 2, 4)] == [0, 2, 12]
    assert [two.links[i].name for i in two.route(1, 9)][:2] == ["host0/gpu1->host0/nic0", "host0/nic0->network/rail0"]
    assert not {*two.route(0, 8)} & {*two.route(2, 10)} and {*two.route(0, 8)} & {*two.route(1, 9)}
    alone = preset("v100-2x3")
    assert [alone.links[i].name for i in alone.route(2, 5)] == ["host0/gpu2->network/rail1", "network/rail1->host1/gpu2"]


def test_sheets_name_what_links_are_made_of():
    unnamed = {name for name in EXAMPLES if not all(link.interconnect for link in preset(name).links)}
    assert unnamed == {"piz-daint", "piz-daint-2"}  # whose bandwidth was measured
    named = ("p100-4x4", "v100-8", "a100-40gb-8", "h200-8", "b200-8", "mi300x-8", "l4-4")
    made = [preset(name).links[0].interconnect for name in named]
    assert made == ["nvlink1", "nvlink2", "nvlink3", "nvlink4", "nvlink5", "xgmi3", "pcie"]


def test_the_thesis_has_a_node_of_each_type():
    made = preset("thesis-4x4")
    assert [host.name for host in made.hosts] == ["titanv", "titanrtx", "rtx2060", "p4000"]
    assert [device.type.name for device in made.devices] == [host.name for host in made.hosts for _ in range(4)]
    assert min(made.links[i].bandwidth_bytes_per_second for i in made.route(0, 15)) == 7e9


def test_nodes_with_one_device_sit_at_the_network():
    made = preset("piz-daint-4")
    assert [made.links[i].name for i in made.route(0, 3)] == ["node0/gpu0->network", "network->node3/gpu0"]
    assert made.is_tree and preset("piz-daint").hash == preset("piz-daint-16").hash


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("h100-2x16", "cluster 'h100-2x16': 16 devices in a host; expected at most 8: h100-D for one host with D devices, such as "
            "'h100-8', or h100-NxD for N hosts, such as 'h100-4x8'"),
        ("h100-0x8", "cluster 'h100-0x8': expected h100-D for one host with D devices, such as 'h100-8', or h100-NxD for N hosts, such as "
            "'h100-4x8'"),
        ("h100-", "cluster 'h100-': expected h100-D for one host with D devices, such as 'h100-8', or h100-NxD for N hosts, such as "
            "'h100-4x8'"),
        ("h100-100000x8", "cluster 'h100-100000x8': 800000 devices; expected at most 16384: describe more in a file"),
        ("rtx4090-2x2", "cluster 'rtx4090-2x2': what joins such hosts is not known; expected rtx4090-D, or a file with a network"),
        ("rtx4090-x", "cluster 'rtx4090-x': expected rtx4090-D for one host with D devices, such as 'rtx4090-8'"),
        ("piz-daint-4x2", "cluster 'piz-daint-4x2': expected piz-daint-N with N hosts, such as 'piz-daint-16'"),
        ("piz-daint-99999", "cluster 'piz-daint-99999': 99999 devices; expected at most 16384: describe more in a file"),
        ("a100-8", f"unknown cluster 'a100-8'; expected one of {ALL}: did you mean 'a100-80gb-8'?"),
    ],
)  # fmt: skip
def test_impossible_sizes_get_one_line(name, line):
    with pytest.raises(TopologyError) as refused:
        preset(name)
    assert str(refused.value) == line
    assert not presets.says_all(name)
