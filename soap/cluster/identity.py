"""What of a cluster its strategies depend on: its identity."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soap.cluster.topology import Host, Topology


def identity(topology: Topology) -> str:
    """Of devices, hosts and links as described, not of the cluster's name: 16 hex digits of SHA-256. Figures that were measured are no
    part of it; those that the cluster's name states are."""
    described = topology.described or topology.links
    if topology.measured:
        parts: list[Any] = [[[d.name, d.host, d.type.kind] for d in topology.devices], [[x.source, x.target] for x in described]]
        if topology.stated:
            parts.append([[link, float(described[link].bandwidth_bytes_per_second)] for link in topology.stated])
    else:
        devices = [[d.name, d.host, d.type.identity] for d in topology.devices]
        hosts = [[h.name, h.cpu_cores, h.memory_bytes, *_stated(h)] for h in topology.hosts]
        links = [[x.name, x.source, x.target, float(x.bandwidth_bytes_per_second), float(x.latency_seconds)] for x in described]
        parts = [devices, hosts, links]
    if topology.servers:
        parts.append({"servers": topology.servers})
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _stated(host: Host) -> list[Any]:
    """The host's ``core`` and ``row_seconds``, where known, as plain JSON values."""
    core = None if host.core is None else host.core.identity
    return [] if core is None and host.row_seconds is None else [core, host.row_seconds]
