"""Which host's server has how much of a stage's parameters: all the same, or all of it the server beside the stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from soap.cluster.topology import Topology
from soap.elastic.faults import ElasticError
from soap.mixed.allocations import Allocation
from soap.mixed.partitioning import WorkerPlan
from soap.plan.collectives import REDUCE_TRAFFIC
from soap.simulator.communication.servers import server_type
from soap.simulator.costs import nanoseconds

COPY_TRAFFIC = 2
"""Bytes that a server reads and writes for each byte of values that it gives away."""


@dataclass(frozen=True)
class Placement:
    """``shares``: [worker][stage]: by host, bytes of the stage's parameters on its server."""

    shares: tuple[tuple[Mapping[int, int], ...], ...]

    @property
    def total_bytes(self) -> int:
        """Of all parameters: each worker has all of them."""
        return sum(sum(own.values()) for own in self.shares[0])


def placed(topology: Topology, allocation: Allocation, plans: Sequence[WorkerPlan]) -> Placement:
    """Where the parameters of these stages are. ElasticError if they are to be beside stages that are on different hosts, or cut otherwise,
    in different workers."""
    hosts = sorted({topology.devices[stage.device].host for plan in plans for stage in plan.stages})
    if not allocation.local:
        return Placement(tuple(tuple(_even(stage.parameter_bytes, hosts) for stage in plan.stages) for plan in plans))
    looks = {tuple((topology.devices[stage.device].host, stage.first) for stage in plan.stages) for plan in plans}
    if len(looks) > 1:
        raise ElasticError(
            f"allocation {allocation.name!r}: parameters are to be on their stage's host, but workers' stages differ; expected the same "
            "layers on the same host in each worker"
        )
    beside = [tuple({topology.devices[stage.device].host: stage.parameter_bytes} for stage in plan.stages) for plan in plans]
    return Placement(tuple(beside))


def _even(size: int, hosts: Sequence[int]) -> Mapping[int, int]:
    return {host: size * (k + 1) // len(hosts) - size * k // len(hosts) for k, host in enumerate(hosts)}


def count_ns(topology: Topology, device: int, size: int) -> int:
    """What the server beside a device takes to add so many bytes of a wave to its values."""
    return _moving_ns(topology, device, REDUCE_TRAFFIC * size)


def copy_ns(topology: Topology, device: int, size: int) -> int:
    """What it takes to give away so many bytes of values."""
    return _moving_ns(topology, device, COPY_TRAFFIC * size)


def _moving_ns(topology: Topology, device: int, moved_bytes: int) -> int:
    kind = server_type(topology, device)
    return nanoseconds(moved_bytes / kind.memory_bandwidth_bytes_per_second + kind.kernel_seconds)
