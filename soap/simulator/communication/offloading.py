"""What offloading takes: copies between devices and their host's memory, and updates by the host's cores.

A device that is no CPU has three resources of its own beside it: what copies to the host, the host's cores that work for it, and what
copies back. They follow the cores in the numbers of resources. A CPU does all of that itself.
"""

from __future__ import annotations

from dataclasses import replace

from soap.cluster.host_links import HostLink
from soap.cluster.topology import DeviceType, Topology
from soap.simulator.communication.servers import HOST_CORE, core_names
from soap.simulator.costs import nanoseconds

HOST_BYTES_PER_SECOND = 200e9
"""Memory bandwidth of a host, which all updates on it share: eight channels of DDR4-3200 (204.8 GB/s) of one processor. An assumption, as
clusters do not say it. Without it, as many cores as a server has would be faster than its memory."""

DOWN, ON_HOST, UP = range(3)
"""A device's copies to the host, its part of the host's cores, its copies back: by their places among its resources."""
STAGES = (3, 4, 5)
"""Their tasks' third parts of ids, after the device's own update."""
OFFLOADING_NS = 1
"""What a device's own update takes longer where it offloads: it is then the moment in which all gradients are there, even if it updates
nothing itself."""


def offload_names(topology: Topology) -> list[str]:
    """Names of these resources, device by device; none if all devices are CPUs."""
    if all(device.type.kind == "cpu" for device in topology.devices):
        return []
    return [f"{device.name}/{what}" for device in topology.devices for what in ("to host", "host cores", "from host")]


def names_behind_links(topology: Topology) -> list[str]:
    """Names of all resources that are neither devices nor links, in the order of their numbers."""
    return core_names(topology) + offload_names(topology)


def offload_resource(topology: Topology, device: int, place: int) -> int:
    """The number of one of a device's three resources; of a CPU the device itself."""
    if topology.devices[device].type.kind == "cpu":
        return device
    return _first(topology) + 3 * device + place


def offloading_device(topology: Topology, resource: int) -> tuple[int, int] | None:
    """The device that ``offload_resource`` has this number for, and the place; None if it is a device, a link or a core."""
    own = resource - _first(topology)
    return divmod(own, 3) if own >= 0 else None


def _first(topology: Topology) -> int:
    return topology.device_count + len(topology.links) + sum(host.cpu_cores for host in topology.hosts)


def offload_updater(topology: Topology, device: int, neighbours: int | None = None) -> DeviceType:
    """What updates offloaded parameters of a device: an equal share of its host's cores, as fast as these together or as the host's memory
    allows; or the device itself, if it is a CPU. ``neighbours``: how many devices share the host (default: all that the topology has)."""
    own = topology.devices[device]
    if own.type.kind == "cpu":
        return own.type
    host = topology.hosts[own.host]
    core, neighbours = host.core or HOST_CORE, neighbours or sum(other.host == own.host for other in topology.devices)
    cores = max(1, host.cpu_cores // neighbours)
    bandwidth = min(cores * core.memory_bandwidth_bytes_per_second, HOST_BYTES_PER_SECOND / neighbours)
    rates = {dtype: cores * rate for dtype, rate in core.flops_per_second.items()}
    return replace(core, name=f"{cores} of {core.name}", flops_per_second=rates, memory_bandwidth_bytes_per_second=bandwidth)


def copy_ns(size: int, link: HostLink) -> int:
    """Nanoseconds to copy ``size`` bytes to the host, or back."""
    return nanoseconds(link.latency_seconds + size / link.bandwidth_bytes_per_second)
