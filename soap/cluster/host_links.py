"""The links between accelerators and their host's memory, which offloading copies over.

A cluster does not describe them. They follow from what joins a host's devices. Links that are PCI Express themselves are the way to the
host's memory, too, and copies contend with messages there. Beside NVLink and xGMI there is the PCI Express of the same generation of
machines, which no message of the cluster uses. Bandwidths are of 16 lanes, times what NCCL counts for PCI Express (``nccl.json``: 12.0 of
15.75 GB/s).
"""

from __future__ import annotations

from dataclasses import dataclass

from soap.cluster.interconnects import interconnects
from soap.cluster.topology import Link, Topology

LANES_BYTES_PER_SECOND = {"nvlink1": 15.75e9, "nvlink2": 15.75e9, "nvlink3": 31.5e9, "nvlink4": 63e9, "nvlink5": 63e9, "xgmi3": 63e9}
"""PCI Express beside an interconnect: 3.0 with P100 and V100, 4.0 with A100, 5.0 with H100, B200 and MI300X (their data sheets)."""
USUAL_BYTES_PER_SECOND = 15.75e9
"""PCI Express 3.0, where nothing tells more: no device is taken to be closer to its host than it is known to be."""
LATENCY_SECONDS = 1e-5
"""Assumed time to begin a copy: a call, and the round over PCI Express, as of a small ``cudaMemcpyAsync``."""


@dataclass(frozen=True, slots=True)
class HostLink:
    """Bytes per second in either direction, the time to begin a copy, and the links of the cluster that copies to the host (``down``) and
    back (``up``) hold."""

    bandwidth_bytes_per_second: float
    latency_seconds: float
    down: tuple[int, ...] = ()
    up: tuple[int, ...] = ()


def host_link(topology: Topology, device: int) -> HostLink:
    """The way between a device and its host's memory. A device that is a CPU is in that memory: a copy reads and writes it."""
    own = topology.devices[device]
    if own.type.kind == "cpu":
        return HostLink(own.type.memory_bandwidth_bytes_per_second / 2, 0.0)
    at = [link for link in topology.links if own.name in (link.source, link.target)]
    shared = [link for link in at if _medium(link) == "pcie"]
    if shared:
        down, up = (tuple(link.index for link in shared if end(link) == own.name) for end in (_source, _target))
        bandwidth = max(topology.effective_bandwidths[link.index] for link in shared)
        return HostLink(bandwidth, LATENCY_SECONDS, down, up)
    named = [LANES_BYTES_PER_SECOND[link.interconnect] for link in at if link.interconnect in LANES_BYTES_PER_SECOND]
    return HostLink(max(named, default=USUAL_BYTES_PER_SECOND) * interconnects()["pcie"].share, LATENCY_SECONDS)


def _medium(link: Link) -> str:
    return "" if link.kind is None else link.kind.medium


def _source(link: Link) -> str:
    return link.source


def _target(link: Link) -> str:
    return link.target
