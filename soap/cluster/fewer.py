"""Clusters of some of a cluster's devices: those that are left when others are lost, and those that a job has to itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from soap.cluster.overheads import NO_COLD_PENALTY, NO_CPU_OVERHEAD, NO_LATENCY_FACTOR
from soap.cluster.presets import LOCAL, family, local_topology
from soap.cluster.topology import Link, Topology
from soap.errors import TopologyError


def without(topology: Topology, devices: Collection[int]) -> Topology:
    """The cluster without the devices of these numbers, and their links; the others are numbered anew, in their order. Of ``local:N``, all
    of whose devices are alike, it is ``local:N`` with fewer. What was measured between all of them is left out.

    TopologyError if none is left, or those left do not reach each other any more.
    """
    lost = {topology.devices[number].name for number in devices}
    left = [device for device in topology.devices if device.name not in lost]
    if not left:
        raise TopologyError(
            f"cluster {topology.name!r} has lost all of its {topology.device_count} devices; expected one at least to be left"
        )
    limits = tuple(topology.limits[device.index] for device in left) if topology.limits else ()
    if family(topology.name) == LOCAL:
        return replace(local_topology(len(left)), limits=limits, price=topology.price, own_samples=topology.own_samples)
    described = replace(
        topology,
        links=topology.described or topology.links,
        described=(),
        links_source="",
        ports=(),
        cpu_overhead=NO_CPU_OVERHEAD,
        latency_factor=NO_LATENCY_FACTOR,
        cold_penalty=NO_COLD_PENALTY,
    )
    return _with(described, [device.index for device in left], f"{topology.name} without {', '.join(sorted(lost))}")


def part_of(topology: Topology, names: Sequence[str]) -> Topology:
    """The cluster of these devices alone, each named, or all of a host by its name: what one of several jobs on the cluster has to itself.
    All hosts stay, with their links and what was measured of them, and all names. TopologyError in one line if there is no such device or
    host, or the devices do not reach each other without the others.
    """
    hosts = {host.name: number for number, host in enumerate(topology.hosts)}
    chosen: set[int] = set()
    for name in names:
        own = [device.index for device in topology.devices if name == device.name or hosts.get(name) == device.host]
        if not own:
            known = ", ".join([*hosts][:3] + [device.name for device in topology.devices][:3])
            raise TopologyError(
                f"{name!r} is no device of cluster {topology.name!r}, and no host that has some; expected some of {known}, …"
            )
        chosen.update(own)
    if not chosen:
        raise TopologyError(f"no devices of cluster {topology.name!r} are named; expected one at least")
    if len(chosen) == topology.device_count:
        return topology
    return _with(topology, sorted(chosen), f"{', '.join(names)} of {topology.name}")


def _with(topology: Topology, devices: Sequence[int], name: str) -> Topology:
    """The cluster of these devices, by number, and of the links that do not end at others."""
    left = [topology.devices[number] for number in devices]
    lost = {device.name for device in topology.devices} - {device.name for device in left}
    kept = [link.index for link in topology.links if not {link.source, link.target} & lost]
    links, places = {old: new for new, old in enumerate(kept)}, {old: new for new, old in enumerate(devices)}
    ports = [
        replace(port, link=links[port.link], device=None if port.device is None else places[port.device])
        for port in topology.ports
        if port.link in links and (port.device is None or port.device in places)
    ]
    return replace(
        topology,
        name=name,
        devices=tuple(replace(device, index=number) for number, device in enumerate(left)),
        links=_numbered([topology.links[link] for link in kept]),
        stated=tuple(links[link] for link in topology.stated if link in links),
        described=_numbered([topology.described[link] for link in kept]) if topology.described else (),
        ports=tuple(ports),
        limits=tuple(topology.limits[device] for device in devices) if topology.limits else (),
    )


def _numbered(links: Sequence[Link]) -> tuple[Link, ...]:
    return tuple(replace(link, index=number) for number, link in enumerate(links))
