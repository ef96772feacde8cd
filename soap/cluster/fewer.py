"""A cluster that has lost devices."""

from __future__ import annotations

from collections.abc import Collection
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
        return replace(local_topology(len(left)), limits=limits, price=topology.price)
    kept = [link for link in topology.described or topology.links if not {link.source, link.target} & lost]
    numbers = {link.name: number for number, link in enumerate(kept)}
    stated = [numbers[name] for name in (topology.links[number].name for number in topology.stated) if name in numbers]
    return replace(
        topology,
        name=f"{topology.name} without {', '.join(sorted(lost))}",
        devices=tuple(replace(device, index=number) for number, device in enumerate(left)),
        links=tuple(_numbered(link, numbers[link.name]) for link in kept),
        stated=tuple(stated),
        described=(),
        links_source="",
        ports=(),
        cpu_overhead=NO_CPU_OVERHEAD,
        latency_factor=NO_LATENCY_FACTOR,
        cold_penalty=NO_COLD_PENALTY,
        limits=limits,
    )


def _numbered(link: Link, number: int) -> Link:
    return replace(link, index=number)
