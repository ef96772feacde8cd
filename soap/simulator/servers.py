"""Parameter servers: gradients are pushed to a host, whose CPU cores add them up and update the parameter; values are pulled back.

A push and a pull per step as in Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014; a shard is cut into
partitions, so that several cores share its work, as in Kim et al., "Parallax: Sparsity-aware Data Parallel Training of Deep Neural
Networks", 2019. The server of a shard runs on the host of its first device, whose copy is there without a message. Only simulated: the
runtime has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from soap.regions import balanced, volume
from soap.simulator.collectives import REDUCE_TRAFFIC
from soap.simulator.costs import CostModel, nanoseconds
from soap.simulator.plan import Plan
from soap.topology import DeviceType, Topology

HOST_CORE = DeviceType("host core", "cpu", {"float32": 1e10}, 1e10, 2**30, 4e-6, "assumed: see soap.simulator.servers")
"""A core of a host whose devices are no CPUs, of which a topology says nothing but that it is there. 10 GB/s is the order of what one core
of a server streams (McCalpin, "STREAM: Sustainable Memory Bandwidth in High Performance Computers", single-threaded results); a call takes
4 us, as on the machine of ``profiles.roofline``."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A part of ``plan.served[served]``: number ``index``, of ``size`` bytes, on one CPU core, which is ``resource``."""

    served: int
    index: int
    size: int
    host: int
    resource: int


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


def core_type(topology: Topology, host: int) -> DeviceType:
    """The figures of a host's cores: those of its devices if they are CPUs, else ``HOST_CORE``."""
    return next((d.type for d in topology.devices if d.host == host and d.type.kind == "cpu"), HOST_CORE)


def partitions(plan: Plan, topology: Topology) -> Iterator[Partition]:
    """All partitions of all served shards, in order. A host's cores take them in turn; none has less than an element."""
    cores, taken = first_cores(topology), [0] * len(topology.hosts)
    for number, served in enumerate(plan.served):
        shard = plan.shards[served.shard]
        host = topology.devices[shard.devices[0]].host
        elements, itemsize = volume(shard.box), plan.graph.tensors[shard.parameter].itemsize
        for index, (start, stop) in enumerate(balanced(elements, min(served.partitions, elements))):
            core = cores[host] + taken[host] % topology.hosts[host].cpu_cores
            yield Partition(number, index, (stop - start) * itemsize, host, core)
            taken[host] += 1


def serve_ns(costs: CostModel, size: int, gradients: int, core: DeviceType) -> int:
    """A core adds up so many gradients of ``size`` bytes, at the rate of its memory, and updates the parameter.

    ceil((gradients - 1) * size * REDUCE_TRAFFIC / rate * 1e9) if there are several, and ``update_ns``.
    """
    update_ns = costs.update_ns(size, core)
    if gradients < 2:
        return update_ns
    return nanoseconds((gradients - 1) * size * REDUCE_TRAFFIC / core.memory_bandwidth_bytes_per_second) + update_ns
