"""The clusters of the golden figures: literal figures, so that they are the same on every machine and do not follow the presets' data.

Nearly all of it goes the public way: a description as in a cluster file, read by ``soap.load_cluster``. ``_measured`` adds what
``soap-profile links`` would have measured: the place to adapt when those classes are renamed or moved.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import soap
from soap.cluster.overheads import ColdPenalty, CollectiveLatencyFactor, CpuOverhead, Port, Share
from soap.cluster.topology import DeviceType, Topology

DEVICE_TYPES: dict[str, Any] = {
    "old-gpu": {
        "kind": "cuda",
        "flops": {"float64": "5.3 TFLOP/s", "float32": "10.6 TFLOP/s", "float16": "21.2 TFLOP/s"},
        "memory_bandwidth": "732 GB/s",
        "memory": "16 GB",
        "kernel_overhead": "5 us",
    },
    "half-board": {
        "kind": "cuda",
        "flops": {"float64": "1.455 TFLOP/s", "float32": "4.37 TFLOP/s"},
        "memory_bandwidth": "240 GB/s",
        "memory": "12 GB",
        "kernel_overhead": "6 us",
    },
    "new-gpu": {
        "kind": "cuda",
        "flops": {"float64": "34 TFLOP/s", "float32": "67 TFLOP/s", "bfloat16": "989.5 TFLOP/s"},
        "memory_bandwidth": "4.8 TB/s",
        "memory": "141 GB",
        "kernel_overhead": "5 us",
    },
    "core": {
        "kind": "cpu",
        "flops": {"float64": "16 GFLOP/s", "float32": "32 GFLOP/s"},
        "memory_bandwidth": "8 GB/s",
        "memory": "4 GB",
        "kernel_overhead": "5 us",
    },
}


@dataclass(frozen=True)
class GoldenCluster:
    """``optimizer_states``: tensors of a parameter's size that the optimizer keeps in simulations on it."""

    name: str
    topology: Topology
    optimizer_states: int

    @property
    def ports(self) -> bool:
        """Whether communication keeps processors busy that compute: predictions there may change in ways in which others may not."""
        return bool(self.topology.ports)


def golden_clusters(device_count: int) -> dict[str, GoldenCluster]:
    """By name, those with so many devices."""
    return {name: golden_cluster(name, device_count) for name in cluster_names(device_count)}


def cluster_names(device_count: int) -> list[str]:
    """Those with so many devices (4, 16, 64); of 64 fewer, since simulations of so many take long."""
    return sorted(name for name in _MAKERS if device_count < 64 or name in OF_64)


@cache
def golden_cluster(name: str, device_count: int) -> GoldenCluster:
    """The cluster of this name with so many devices."""
    return GoldenCluster(name, *_MAKERS[name](device_count))


def _full_mesh(count: int) -> tuple[Topology, int]:
    each = 2 if count == 4 else 4
    host = _hosts("node", count // each, each, "old-gpu", "20 GB/s", "10 us", "full")
    host["links"]["host"] = {"bandwidth": "15.75 GB/s", "latency": "5 us"}
    return _read([host], "100 Gbit/s", "2 us"), 2


def _pairs(count: int) -> tuple[Topology, int]:
    """Hosts know the figures of their cores, which work for servers of parameters."""
    made = _read([_hosts("node", count // 4, 4, "half-board", "15.75 GB/s", "10 us", "pairs")], "56 Gbit/s", "2 us")
    core = DeviceType("server core", "cpu", {"float32": 2e10}, 1.2e10, 2**32, 3e-6, "made up for golden figures")
    return replace(made, hosts=tuple(replace(host, core=core, row_seconds=1.5e-7) for host in made.hosts)), 1


def _switched(count: int) -> tuple[Topology, int]:
    each = min(8, count)
    return _read([_hosts("host", count // each, each, "new-gpu", "450 GB/s", "5 us", "switch")], "400 Gbit/s", "3 us"), 2


def _mixed_ring(count: int) -> tuple[Topology, int]:
    """Two types of devices, on two hosts of different size."""
    smaller = count // 4
    hosts = [
        _hosts("fast", None, count - smaller, "old-gpu", "10 GB/s", "8 us", "ring"),
        _hosts("slow", None, smaller, "half-board", "5 GB/s", "12 us", "ring"),
    ]
    return _read(hosts, "25 Gbit/s", "4 us"), 2


def _waiting_cores(count: int) -> tuple[Topology, int]:
    """CPUs: collectives take longer than their messages, and devices that have waited are slow for a while, but there are no ports."""
    made = _read([_hosts("box", count // 2, 2, "core", "4 GB/s", "30 us", "switch")], "10 Gbit/s", "50 us")
    return _measured(made, ports=False), 0


def _ports_single(count: int) -> tuple[Topology, int]:
    """As emulated hosts with one device each."""
    return _measured(_read([_hosts("host", count, 1, "core", "2 GB/s", "40 us", "switch")], "200 Mbit/s", "120 us"), ports=True), 1


def _ports_several(count: int) -> tuple[Topology, int]:
    """As emulated hosts with two or four devices each."""
    each = 2 if count == 4 else 4
    made = _read([_hosts("host", count // each, each, "core", "2 GB/s", "40 us", "switch")], "1 Gbit/s", "100 us")
    return _measured(made, ports=True), 2


_MAKERS: Mapping[str, Callable[[int], tuple[Topology, int]]] = {
    "full-mesh": _full_mesh,
    "pairs": _pairs,
    "switched": _switched,
    "mixed-ring": _mixed_ring,
    "waiting-cores": _waiting_cores,
    "ports-single": _ports_single,
    "ports-several": _ports_several,
}

OF_64 = ("full-mesh", "mixed-ring", "switched", "ports-several")


def _hosts(name: str, count: int | None, each: int, device: str, bandwidth: str, latency: str, kind: str) -> dict[str, Any]:
    """Equal hosts of a description; one without a number if ``count`` is None. A single device of a host sits at its network card."""
    described: dict[str, Any] = {"name": name, "devices": {"type": device, "count": each}, "cpu_cores": 20, "memory": "256 GB"}
    if each > 1:
        described["links"] = {"intra": {"bandwidth": bandwidth, "latency": latency, "kind": kind}}
    return described if count is None else {**described, "count": count}


def _read(hosts: list[dict[str, Any]], bandwidth: str, latency: str) -> Topology:
    description = {
        "name": "golden",
        "device_types": {name: DEVICE_TYPES[name] for name in {host["devices"]["type"]: None for host in hosts}},
        "hosts": hosts,
        "network": {"bandwidth": bandwidth, "latency": latency},
    }
    return _load(json.dumps(description))


@cache
def _load(text: str) -> Topology:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.json"
        path.write_text(text)
        return soap.load_cluster(path)


def _measured(topology: Topology, *, ports: bool) -> Topology:
    """The cluster with what communication does to computation, in figures of the order of those between emulated hosts."""
    latency_factor = CollectiveLatencyFactor(((2, 1.3), (4, 1.9), (16, 3.5)), ((2, 1.1), (4, 1.6), (16, 2.8)))
    penalty = ColdPenalty(((500_000, 120_000), (2_000_000, 300_000), (9_000_000, 700_000)))
    made = replace(topology, latency_factor=latency_factor, cold_penalty=penalty)
    if not ports:
        return made
    numbers = {device.name: device.index for device in topology.devices}
    own = [
        Port(link.index, numbers.get(link.source, numbers.get(link.target)), 45_000 if link.source in numbers else 60_000, 350)
        for link in topology.links
        if link.source in numbers or link.target in numbers
    ]
    overhead = CpuOverhead(((2, Share(90_000, 400)), (4, Share(140_000, 450))), ((2, Share(110_000, 300)), (4, Share(170_000, 500))))
    return replace(made, ports=tuple(own), cpu_overhead=overhead)
