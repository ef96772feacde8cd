"""GPUs of one host in islands: inside an island they reach each other directly, islands are joined by the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from soap.cluster.topology import DeviceType, Link, Topology


def with_types(host: Topology, types: Sequence[DeviceType]) -> Topology:
    """The cluster with these device types, one for each device."""
    return replace(host, devices=tuple(replace(device, type=own) for device, own in zip(host.devices, types, strict=True)))


def with_islands(
    host: Topology, islands: Sequence[Sequence[int]], bandwidth_bytes_per_second: float, latency_seconds: float
) -> Topology:
    """The cluster, whose devices are joined by one switch, with a switch for each island of several devices.

    Its links have the figures inside islands. Bandwidth and latency are those of a message between islands, whose devices share the way to
    the host's switch, as behind a PCIe switch or a processor.
    """
    inside, hub = host.links[0], host.links[0].target
    links: list[Link] = []

    def connect(a: str, b: str, bandwidth: float, seconds: float) -> None:
        for source, target in ((a, b), (b, a)):
            links.append(Link(len(links), f"{source}->{target}", source, target, bandwidth, seconds))

    for number, island in enumerate(islands):
        own, half = hub, latency_seconds / 2
        if len(island) > 1:
            own, half = f"{hub}{number}", max(0.0, latency_seconds / 2 - inside.latency_seconds)
        for device in island if own != hub else ():
            connect(host.devices[device].name, own, inside.bandwidth_bytes_per_second, inside.latency_seconds)
        connect(own if own != hub else host.devices[island[0]].name, hub, bandwidth_bytes_per_second, half)
    return replace(host, links=tuple(links))
