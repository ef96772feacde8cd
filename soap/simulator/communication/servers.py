"""Where parameter servers run, and how long their work takes: on their host's cores, or, if the devices are CPUs, on a device."""

from __future__ import annotations

from soap.cluster.topology import DeviceType, Topology
from soap.plan.collectives import REDUCE_TRAFFIC
from soap.plan.plan import Plan
from soap.plan.syncs.seam import ShardUpdate
from soap.simulator.costs import nanoseconds

HOST_CORE = DeviceType("host core", "cpu", {"float32": 1e10}, 1e10, 2**30, 4e-6, "assumed: see soap.simulator.communication.servers")
"""A CPU core of a host with other devices, if the topology says nothing about it but that it exists. One core of a server streams about
10 GB/s (McCalpin, "STREAM: Sustainable Memory Bandwidth in High Performance Computers", single-threaded results). A call takes 4 us, as on
the machine of ``profiles.roofline``; each partition costs that beside its bytes."""

ROW_SECONDS = 2e-7
"""Assumed seconds that a core takes to find a row's place in a table, beside adding the row: one or two misses of all caches."""


def first_cores(topology: Topology) -> list[int]:
    """For each host the resource number of its first core. Cores are numbered after devices and links, host by host."""
    numbers, following = [], topology.device_count + len(topology.links)
    for host in topology.hosts:
        numbers.append(following)
        following += host.cpu_cores
    return numbers


def core_names(topology: Topology) -> list[str]:
    """Names of all cores in the order of their resources."""
    return [f"{host.name}/core{core}" for host in topology.hosts for core in range(host.cpu_cores)]


def server_type(topology: Topology, server: int) -> DeviceType:
    """The type of what runs the server beside this device: the device itself if it is a CPU, else its host's core, or ``HOST_CORE``."""
    device = topology.devices[server]
    return device.type if device.type.kind == "cpu" else topology.hosts[device.host].core or HOST_CORE


def server_resources(plan: Plan, topology: Topology) -> dict[int, int]:
    """Shard that a server owns -> the resource that the server's work holds: the device if it is a CPU, else a core of its host. A host's
    cores take its partitions in turn."""
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
    """Seconds that the server beside this device takes to find a row's place: as its host says, or ``ROW_SECONDS``."""
    stated = topology.hosts[topology.devices[server].host].row_seconds
    return ROW_SECONDS if stated is None else stated


def device_row_seconds(topology: Topology, device: int) -> float:
    """Seconds that a device takes to find a row's place; 0 if it is not a CPU: it finds rows as fast as it reads them."""
    return row_seconds(topology, device) if topology.devices[device].type.kind == "cpu" else 0.0


def adding_ns(part: ShardUpdate, kind: DeviceType, row_seconds: float) -> int:
    """Nanoseconds to add up an owner's gradients, at memory bandwidth, and to find each row's place:

    ceil((added_bytes * REDUCE_TRAFFIC / bandwidth + added_rows * row_seconds) * 1e9); 0 if there is nothing to add.
    """
    if part.added_bytes == 0:
        return 0
    adding = part.added_bytes * REDUCE_TRAFFIC / kind.memory_bandwidth_bytes_per_second
    return nanoseconds(adding + part.added_rows * row_seconds)
