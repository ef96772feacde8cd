"""Closed forms for collectives: how long they take over some devices of a topology, and on which links.

All-reduce: the ring (reduce-scatter, then all-gather), which NCCL and gloo use for large buffers. n devices take 2(n-1) steps, each of
which moves 1/n of the buffer over every hop at once. With B bytes:

    seconds = 2(n-1) * latency  +  2(n-1)/n * B / bandwidth  +  (n-1)/n * B / reduce rate

(Thakur, Rabenseifner & Gropp, "Optimization of Collective Communication Operations in MPICH", 2005: pairwise reduce-scatter and ring
all-gather, in their terms alpha, beta and gamma; Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms", 2009). RedSync's eq. 2
has the same three terms, but 2*lg(n) latencies, because it takes Rabenseifner's halving and doubling instead of the ring.

Hops that share a link share its bandwidth, so the bandwidth that counts is the smallest *bandwidth / hops* of any link of the ring.

All-to-all, all-gather, reduce-scatter: the direct exchange, which is gloo's and NCCL's all-to-all. Every device sends each other one its
part, all at once. With m messages on the busiest port, the load of each link, and R bytes that a device adds up:

    seconds = m * latency  +  max over links (bytes / bandwidth)  +  R / reduce rate

On one switch a reduce-scatter takes exactly the ring's first half, and an all-gather its second.

Broadcast: a binomial tree (gloo's, and Thakur et al. for short messages), whose ceil(log2 n) rounds are direct exchanges one after
the other. Its transpose, a sum at one device, is the tree the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from soap.topology import Topology

REDUCE_TRAFFIC = 3
"""Bytes of memory traffic to add one byte: two operands are read, one sum is written."""

Flow = tuple[int, int, int]
"""What one device sends another in a collective: (source, target, bytes)."""


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


def ring_bytes(reduced_bytes: int, device_count: int) -> int:
    """Bytes that a ring all-reduce of a buffer puts on all its hops together: each of 2(n-1) steps moves the buffer once."""
    return 2 * (device_count - 1) * reduced_bytes


def flow_links(topology: Topology, flows: Iterable[Flow]) -> dict[int, int]:
    """Link number -> bytes that the flows put on it, by link number."""
    carried: dict[int, int] = {}
    for source, target, size in flows:
        for link in topology.route(source, target):
            carried[link] = carried.get(link, 0) + size
    return dict(sorted(carried.items()))


def exchange_seconds(topology: Topology, flows: Sequence[Flow], reduced_bytes: int = 0) -> float:
    """Duration of flows that run at once; the targets then add up at most ``reduced_bytes`` each."""
    if not flows:
        return 0.0
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    for source, target, _ in flows:
        sent[source] = sent.get(source, 0) + 1
        received[target] = received.get(target, 0) + 1
    messages = max(*sent.values(), *received.values())
    routes = [topology.route(source, target) for source, target, _ in flows]
    latency = max(sum(topology.links[link].latency_seconds for link in route) for route in routes)
    carried = flow_links(topology, flows)
    moving = max((size / topology.links[link].bandwidth_bytes_per_second for link, size in carried.items()), default=0.0)
    memory = min(topology.devices[target].type.memory_bandwidth_bytes_per_second for target in received)
    return messages * latency + moving + reduced_bytes * REDUCE_TRAFFIC / memory


def tree_rounds(devices: Sequence[int], size: int) -> list[list[Flow]]:
    """A binomial tree from the first device to the others: in every round each that has the ``size`` bytes sends them to one more."""
    rounds: list[list[Flow]] = []
    reached = 1
    while reached < len(devices):
        rounds.append([(devices[i], devices[i + reached], size) for i in range(min(reached, len(devices) - reached))])
        reached *= 2
    return rounds
