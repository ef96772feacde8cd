"""Which host's server has how much of a stage's parameters: all the same, or all of it the server beside the stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from soap.cluster.topology import Topology
from soap.errors import ElasticError
from soap.mixed.allocations import Allocation
from soap.mixed.partitioning import COUNTED_BOUND, WorkerPlan
from soap.plan.collectives import REDUCE_TRAFFIC
from soap.simulator.communication.servers import server_type
from soap.simulator.costs import nanoseconds
from soap.units import format_bytes

COPY_TRAFFIC = 2
"""Bytes that a server reads and writes for each byte of values that it gives away."""


@dataclass(frozen=True)
class Placement:
    """``shares``: [worker][stage]: by host, bytes of the stage's parameters on its server."""

    shares: tuple[tuple[Mapping[int, int], ...], ...]


def placed(topology: Topology, allocation: Allocation, plans: Sequence[WorkerPlan]) -> Placement:
    """Where these stages' parameters are. ElasticError if they are to be on their stage's host, and workers' stages differ in that."""
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


def host_bytes(topology: Topology, plans: Sequence[WorkerPlan], placement: Placement, bound: int | None) -> tuple[int, ...]:
    """By host, what it holds at most of parameters, for any order of events: its servers the versions that may be asked for, pushes of
    waves that not all workers have pushed, and a question and an answer of each worker; and, of stages on accelerators, the sums of own
    waves that are in no pulled values (of those on processors these are in the device's memory). Without a bound as with
    ``COUNTED_BOUND``."""
    ahead, found = (COUNTED_BOUND if bound is None else bound) + 2, [0] * len(topology.hosts)
    copies = ahead + 2 + (len(plans) - 1) * ahead + 2 * len(plans)
    for host, size in ((host, size) for shares in placement.shares[0] for host, size in shares.items()):
        found[host] += copies * size
    for stage in (stage for plan in plans for stage in plan.stages):
        device = topology.devices[stage.device]
        found[device.host] += 0 if device.type.kind == "cpu" else ahead * stage.parameter_bytes
    return tuple(found)


def require_room(topology: Topology, plans: Sequence[WorkerPlan], placement: Placement, bound: int | None) -> None:
    """ElasticError in one line if a host's memory, where it is known, is less than ``host_bytes``."""
    for host, size in zip(topology.hosts, host_bytes(topology, plans, placement, bound), strict=True):
        if host.memory_bytes is not None and size > host.memory_bytes:
            raise ElasticError(
                f"servers and waiting updates of {len(plans)} workers need {format_bytes(size)} on host {host.name!r}, which has "
                f"{format_bytes(host.memory_bytes)}; expected a tighter bound, fewer workers, or more memory"
            )


def count_ns(topology: Topology, device: int, size: int) -> int:
    """What the server beside a device takes to add so many bytes of a wave to its values."""
    return _moving_ns(topology, device, REDUCE_TRAFFIC * size)


def copy_ns(topology: Topology, device: int, size: int) -> int:
    """What it takes to give away so many bytes of values."""
    return _moving_ns(topology, device, COPY_TRAFFIC * size)


def _moving_ns(topology: Topology, device: int, moved_bytes: int) -> int:
    kind = server_type(topology, device)
    return nanoseconds(moved_bytes / kind.memory_bandwidth_bytes_per_second + kind.kernel_seconds)
