"""Closed forms for collectives: how long an all-reduce takes over some devices of a topology, and on which links.

The algorithm is the ring (reduce-scatter, then all-gather), which NCCL and gloo use for large buffers: n devices, 2(n-1) steps, each of
which moves 1/n of the buffer over every hop at once. With B bytes:

    seconds = 2(n-1) * latency  +  2(n-1)/n * B / bandwidth  +  (n-1)/n * B / reduce rate

(Thakur, Rabenseifner & Gropp, "Optimization of Collective Communication Operations in MPICH", 2005: pairwise reduce-scatter and ring
all-gather, in their terms alpha, beta and gamma; Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms", 2009). RedSync's eq. 2
has the same three terms, but 2*lg(n) latencies, because it takes Rabenseifner's halving and doubling instead of the ring.

Hops that share a link share its bandwidth, so the bandwidth that counts is the smallest *bandwidth / hops* of any link of the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from soap.topology import Topology

REDUCE_TRAFFIC = 3
"""Bytes of memory traffic to add one byte: two operands are read, one sum is written."""


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring over devices in ascending order, and back to the first.

    ``uses``: (link number, hops of the ring that cross it), by link number. ``latency_seconds``: of the slowest hop.
    ``bandwidth_bytes_per_second``: what every hop gets while all are busy; infinite without links.
    ``reduce_bytes_per_second``: bytes of a buffer that the slowest device adds per second.
    """

    devices: tuple[int, ...]
    uses: tuple[tuple[int, int], ...]
    latency_seconds: float
    bandwidth_bytes_per_second: float
    reduce_bytes_per_second: float

    @property
    def links(self) -> tuple[int, ...]:
        """Link numbers, sorted."""
        return tuple(link for link, _ in self.uses)

    def seconds(self, reduced_bytes: int) -> float:
        """Duration of an all-reduce of ``reduced_bytes``; 0 on a single device."""
        count = len(self.devices)
        if count < 2:
            return 0.0
        share = (count - 1) / count * reduced_bytes
        moving = 2 * share / self.bandwidth_bytes_per_second
        return 2 * (count - 1) * self.latency_seconds + moving + share / self.reduce_bytes_per_second


def ring(topology: Topology, devices: Sequence[int]) -> Ring:
    """The ring over these devices (any order, repetitions count once)."""
    members = tuple(sorted(set(devices)))
    hops = list(zip(members, (*members[1:], *members[:1]), strict=True)) if len(members) > 1 else []
    routes = [topology.route(source, target) for source, target in hops]
    uses: dict[int, int] = {}
    for route in routes:
        for link in route:
            uses[link] = uses.get(link, 0) + 1
    latencies = [sum(topology.links[link].latency_seconds for link in route) for route in routes]
    shares = [topology.links[link].bandwidth_bytes_per_second / count for link, count in uses.items()]
    memory = min((topology.devices[d].type.memory_bandwidth_bytes_per_second for d in members), default=float("inf"))
    return Ring(
        devices=members,
        uses=tuple(sorted(uses.items())),
        latency_seconds=max(latencies, default=0.0),
        bandwidth_bytes_per_second=min(shares, default=float("inf")),
        reduce_bytes_per_second=memory / REDUCE_TRAFFIC,
    )


def ring_links(topology: Topology, devices: Sequence[int]) -> tuple[int, ...]:
    """The numbers of all links that an all-reduce over these devices holds, sorted; () for a single device."""
    return ring(topology, devices).links


def ring_allreduce_seconds(topology: Topology, devices: Sequence[int], reduced_bytes: int) -> float:
    """Duration of a ring all-reduce of ``reduced_bytes`` over these devices."""
    return ring(topology, devices).seconds(reduced_bytes)
