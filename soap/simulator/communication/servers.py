"""Where servers of parameters work, and how long that takes: on the cores of their hosts, or, where devices are CPUs, on these."""

from __future__ import annotations

from soap.cluster.topology import DeviceType, Topology
from soap.plan.collectives import REDUCE_TRAFFIC
from soap.plan.plan import Plan
from soap.plan.syncs.seam import ShardUpdate
from soap.simulator.costs import nanoseconds

HOST_CORE = DeviceType("host core", "cpu", {"float32": 1e10}, 1e10, 2**30, 4e-6, "assumed: see soap.simulator.communication.servers")
"""A core of a host whose devices are no CPUs, of which a topology says nothing but that it is there. 10 GB/s is the order of what one core
of a server streams (McCalpin, "STREAM: Sustainable Memory Bandwidth in High Performance Computers", single-threaded results); a call takes
4 us, as on the machine of ``profiles.roofline``: what each partition costs beside its bytes."""

ROW_SECONDS = 2e-7
"""Assumed: what a core takes to find a row's place among others, beside adding it up. Some hundred nanoseconds are a miss of all caches
or two."""


def first_cores(topology: Topology) -> list[int]:
    """For each host the resource of its first core: cores are numbered after devices and links, host by host."""
    numbers, following = [], topology.device_count + len(topology.links)
    for host in topology.hosts:
        numbers.append(following)
        following += host.cpu_cores
    return numbers


def core_names(topology: Topology) -> list[str]:
    """Names of all cores in the order of their resources."""
    return [f"{host.name}/core{core}" for host in topology.hosts for core in range(host.cpu_cores)]


def server_type(topology: Topology, server: int) -> DeviceType:
    """The figures of what runs the server beside this device: its own if it is a CPU, else those of its host's core, or ``HOST_CORE``."""
    device = topology.devices[server]
    return device.type if device.type.kind == "cpu" else topology.hosts[device.host].core or HOST_CORE


def server_resources(plan: Plan, topology: Topology) -> dict[int, int]:
    """Shard that a server keeps -> the resource that the server's work holds: its device if that is a CPU, else a core of the host. A
    host's cores take its partitions in turn."""
    cores, taken = first_cores(topology), [0] * len(topology.hosts)
    found: dict[int, int] = {}
    for number in sorted(plan.on_servers):
        device = plan.shards[number].devices[0]
        host = topology.devices[device].host
        if topology.devices[device].type.kind == "cpu":
            found[number] = device
            continue
        found[number] = cores[host] + taken[host] % topology.hosts[host].cpu_cores
        taken[host] += 1
    return found


def row_seconds(topology: Topology, server: int) -> float:
    """What finding a row's place takes the server beside this device: as its host says, or ``ROW_SECONDS``."""
    stated = topology.hosts[topology.devices[server].host].row_seconds
    return ROW_SECONDS if stated is None else stated


def device_row_seconds(topology: Topology, device: int) -> float:
    """What finding a row's place takes a device. One that is no CPU finds the rows' places as fast as it reads them."""
    return row_seconds(topology, device) if topology.devices[device].type.kind == "cpu" else 0.0


def adding_ns(part: ShardUpdate, kind: DeviceType, row_seconds: float) -> int:
    """Gradients are added up at the rate of memory, and each row's place is found:

    ceil((added_bytes * REDUCE_TRAFFIC / rate + added_rows * row_seconds) * 1e9) if there is something to add.
    """
    if part.added_bytes == 0:
        return 0
    adding = part.added_bytes * REDUCE_TRAFFIC / kind.memory_bandwidth_bytes_per_second
    return nanoseconds(adding + part.added_rows * row_seconds)
