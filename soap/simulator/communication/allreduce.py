"""All-reduce over some devices of a topology: closed forms of several algorithms, each linear in the bytes that are summed.

An algorithm is a list of *steps* (``algorithms``). In a step all hops move an equal part of the buffer at once; in some steps the receivers
add it up. NCCL's and RCCL's are in ``nccl``. gloo, the backend of processors, has one ring. Let a be the slowest hop's latency (its links'
latencies added up in the order of the route), s the busiest link's share (seconds per byte of that link, times the hops that cross it), and
g the slowest device's time to add one byte (``REDUCE_TRAFFIC`` bytes of memory traffic). A step that is repeated r times and moves 1/p of B
bytes per hop takes r * (a + B/p * s), and r * B/p * g more if it adds: on one switch 2(n-1)a + 2(n-1)/n B s + (n-1)/n B g. If the latency
of a step has been measured to be longer than a message's, the algorithm's whole latency is multiplied by ``Topology.latency_factor``.
"""

from __future__ import annotations

from collections.abc import Sequence

from soap.cluster.topology import Topology
from soap.plan.collectives import REDUCE_TRAFFIC
from soap.simulator.communication.algorithms import Algorithm, AllReduceOption, steps
from soap.simulator.communication.loads import ROUTES, loads, step_shares
from soap.simulator.communication.nccl import nccl_options, nccl_parted_options
from soap.simulator.communication.ring_orders import is_gloo, ring_orders


def allreduce_options(topology: Topology, devices: Sequence[int]) -> tuple[AllReduceOption, ...]:
    """Ways to sum over these devices: all that are the fastest for some number of bytes, in the order of ``Algorithm``."""
    return (_gloo_ring(topology, devices),) if is_gloo(topology, devices) else nccl_options(topology, devices)


def parted_options(topology: Topology, devices: Sequence[int]) -> tuple[AllReduceOption, ...]:
    """Ways to gather or to scatter equal parts over these devices by a collective; none where the backend has no such collective."""
    return () if is_gloo(topology, devices) else nccl_parted_options(topology, devices)


def allreduce_bytes(reduced_bytes: int, device_count: int) -> int:
    """Bytes that an all-reduce puts on all its hops together, by any algorithm in which devices and not switches add up."""
    return 2 * (device_count - 1) * reduced_bytes


def link_bytes(topology: Topology, algorithm: Algorithm, devices: Sequence[int], reduced_bytes: int) -> dict[int, int]:
    """Link number -> bytes that an all-reduce puts on it, rounded up; link numbers ascend."""
    shares, parts = link_shares(topology, algorithm, devices)
    return {link: -(-share * reduced_bytes // parts) for link, share in shares.items()}


def parted_link_bytes(topology: Topology, devices: Sequence[int], parts_bytes: int) -> dict[int, int]:
    """The same of a collective of equal parts, which hold so many bytes together: one turn of NCCL's rings."""
    turn = steps(Algorithm.RING, devices, ring_orders(topology, devices))[:1]
    shares, parts = step_shares(topology, turn, topology.direct_links)
    return {link: -(-share * parts_bytes // parts) for link, share in shares.items()}


def link_shares(topology: Topology, algorithm: Algorithm, devices: Sequence[int]) -> tuple[dict[int, int], int]:
    """({link number: share}, parts): ``share / parts`` of the summed bytes cross the link; link numbers ascend."""
    hosts = {device: topology.devices[device].host for device in devices}
    direct = ROUTES if is_gloo(topology, devices) else topology.direct_links
    return step_shares(topology, steps(algorithm, devices, ring_orders(topology, devices), hosts), direct)


def _gloo_ring(topology: Topology, devices: Sequence[int]) -> AllReduceOption:
    """Steps are added up in order, each as ``repeats / parts * share``, then ``repeats / parts * adding * received``."""
    slowest = min((topology.devices[d].type.memory_bandwidth_bytes_per_second for d in devices), default=float("inf"))
    adding = REDUCE_TRAFFIC / slowest
    latency_seconds = seconds_per_byte = 0.0
    links: tuple[int, ...] = ()
    for step in steps(Algorithm.RING, devices):
        own = loads(topology, step.hops)
        links = tuple(sorted(own.crossings))
        latency_seconds += step.repeats * own.latency_seconds
        seconds_per_byte += step.repeats / step.parts * own.share
        if step.adds:
            seconds_per_byte += step.repeats / step.parts * adding * step.received
    latency_seconds *= topology.latency_factor.of_all_reduce(len(set(devices)))
    return AllReduceOption(Algorithm.RING, latency_seconds, seconds_per_byte, links)
