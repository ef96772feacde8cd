"""The presets of emulated clusters: names, links, and what is part of their identity."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.cluster.emulated import emulated_topology, parse_emulated
from soap.cluster.presets import family, local_topology, preset, says_all
from soap.cluster.yaml_file import load_cluster
from soap.errors import TopologyError


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 40_000))
def test_shapes(hosts: int, devices: int, megabits: int) -> None:
    topology = preset(f"emulated:{hosts}x{devices}@{megabits}Mbit/s")
    local = local_topology(hosts * devices)
    assert [device.host for device in topology.devices] == [i // devices for i in range(hosts * devices)]
    (device_type,), own = {device.type for device in topology.devices}, local.devices[0].type
    assert device_type.name == f"{own.name}, emulated" and device_type.memory_bytes == own.memory_bytes
    assert device_type.memory_bandwidth_bytes_per_second == pytest.approx(0.75 * own.memory_bandwidth_bytes_per_second)
    assert device_type.flops_per_second == pytest.approx({dtype: 0.75 * rate for dtype, rate in own.flops_per_second.items()})
    assert device_type.kernel_seconds == pytest.approx(own.kernel_seconds / 0.75)
    for source in range(hosts * devices):
        for target in range(hosts * devices):
            route = [topology.links[link] for link in topology.route(source, target)]
            between = topology.distance(source, target) == 2
            rates = {link.bandwidth_bytes_per_second for link in route if "network" in (link.source, link.target)}
            assert rates == ({megabits * 125_000.0} if between else set())
            if source != target:
                assert topology.route_latency_seconds(source, target) == pytest.approx(local.route_latency_seconds(0, 1))


@pytest.mark.parametrize(("name", "count"), [("emulated:4x1", 8), ("emulated:2x2", 12), ("emulated:1x2", 4), ("emulated:1x1", 0)])
def test_links_and_the_default_rate(name: str, count: int) -> None:
    topology = preset(name)
    assert (topology.name, len(topology.links)) == (name, count)
    stated = {topology.links[link].name: topology.links[link].bandwidth_bytes_per_second for link in topology.stated}
    assert set(stated) == {link.name for link in topology.links if "network" in link.name} and set(stated.values()) <= {125e6}


def test_the_stated_rate_is_part_of_the_identity_and_measured_figures_are_not() -> None:
    shape = parse_emulated("emulated:2x2@200Mbit/s", 64)
    one, local = preset(shape.name), local_topology(4)
    faster_type = replace(local.devices[0].type, memory_bandwidth_bytes_per_second=1e12)
    measured_again = emulated_topology(shape, local_topology(4, faster_type, 5e9, 1e-6))
    assert measured_again.hash == one.hash == preset("emulated:2x2@0.2Gbit/s").hash
    assert measured_again.links[0].bandwidth_bytes_per_second == 5e9
    hashes = {preset(f"emulated:{rest}").hash for rest in ("2x2", "2x2@200Mbit/s", "4x1@200Mbit/s", "1x4@200Mbit/s")}
    assert len(hashes) == 4
    assert pickle.loads(pickle.dumps(one)).hash == one.hash


def test_names_are_no_files_and_need_none() -> None:
    assert load_cluster("emulated:4x1@200Mbit/s").device_count == 4
    known = ("emulated:4x1@200Mbit/s", "local:4", "p100-4x4", "emulated", "a/emulated:1x1", "c.yaml")
    assert [(family(name), says_all(name)) for name in known] == [
        ("emulated", True), ("local", True), (None, True), ("emulated", True), (None, False), (None, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name", ["emulated:", "emulated:4", "emulated:0x1", "emulated:4x", "emulated:2x1x1", "emulated:04x1", "emulated:64x32"]
)
def test_other_shapes_are_refused(name: str) -> None:
    with pytest.raises(TopologyError, match=r"expected emulated:HOSTSxDEVICES or emulated:HOSTSxDEVICES@RATE with at most 1024 devices"):
        load_cluster(name)


@pytest.mark.parametrize("rate", ["", "fast", "200", "0 Gbit/s", "-1Gbit/s"])
def test_other_rates_are_refused(rate: str) -> None:
    with pytest.raises(TopologyError, match=r"rate|bandwidth is 0\.0"):
        load_cluster(f"emulated:4x1@{rate}")
