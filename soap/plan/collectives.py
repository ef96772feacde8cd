"""Closed forms for exchanges between devices of a topology: how long they take, and which links they use. All-reduces: ``allreduce``.

All-to-all, all-gather and reduce-scatter use the direct exchange, which is gloo's and NCCL's all-to-all: every device sends every other
device its part, all at once. With m messages on the busiest port, the bytes on each link, and R bytes that a device adds up:

    seconds = m * latency * c  +  max over links (bytes / bandwidth)  +  R * REDUCE_TRAFFIC / memory bandwidth  +  call

evaluated in this order. Bandwidths are effective ones, and ``call`` is what a call of the library takes (``Topology``). ``latency`` is the
slowest flow's, ``memory bandwidth`` the slowest target's, and c comes from ``Topology.latency_factor`` (1 where nothing was measured). On
one switch a reduce-scatter takes exactly as long as the first half of a ring all-reduce, and an all-gather as long as the second half.

Broadcast: a binomial tree (gloo's, and Thakur, Rabenseifner & Gropp, "Optimization of Collective Communication Operations in MPICH", 2005,
for short messages). Its ceil(log2 n) rounds are direct exchanges, one after the other. The tree is one call of a library, so c is that of
an all-reduce (``CollectiveLatencyFactor.of_tree``). Its transpose, a sum at one device, runs the same tree backwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from soap.cluster.topology import Topology

REDUCE_TRAFFIC = 3
"""Bytes of memory traffic to add one byte: two operands are read, one sum is written."""

Flow = tuple[int, int, int]
"""What one device sends another in a collective: (source, target, bytes)."""


def flow_links(topology: Topology, flows: Iterable[Flow]) -> dict[int, int]:
    """Link number -> bytes that the flows put on it; link numbers ascend."""
    carried: dict[int, int] = {}
    for source, target, size in flows:
        for link in topology.route(source, target):
            carried[link] = carried.get(link, 0) + size
    return dict(sorted(carried.items()))


def exchange_seconds(topology: Topology, flows: Sequence[Flow], reduced_bytes: int = 0, latency_factor: float | None = None) -> float:
    """Duration of flows that run at once, after which each target adds up at most ``reduced_bytes``.

    ``latency_factor``: the c of the formula above, if the flows are one round of a larger collective; by default that of an exchange.
    """
    if not flows:
        return 0.0
    messages = busiest_messages(flows)
    latency = max(topology.route_latency_seconds(source, target) for source, target, _ in flows)
    carried = flow_links(topology, flows)
    moving = max((size / topology.effective_bandwidths[link] for link, size in carried.items()), default=0.0)
    memory = min(topology.devices[target].type.memory_bandwidth_bytes_per_second for _, target, _ in flows)
    latency_factor = topology.latency_factor.of_exchange(messages + 1) if latency_factor is None else latency_factor
    return messages * latency * latency_factor + moving + reduced_bytes * REDUCE_TRAFFIC / memory + topology.call_seconds


def busiest_messages(flows: Iterable[Flow]) -> int:
    """The largest number of messages that any one device sends or receives."""
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    for source, target, _ in flows:
        sent[source] = sent.get(source, 0) + 1
        received[target] = received.get(target, 0) + 1
    return max((*sent.values(), *received.values()), default=0)


def tree_rounds(devices: Sequence[int], size: int) -> list[list[Flow]]:
    """A binomial tree from the first device to the others: in each round, every device that has the bytes sends them to one more."""
    rounds: list[list[Flow]] = []
    reached = 1
    while reached < len(devices):
        rounds.append([(devices[i], devices[i + reached], size) for i in range(min(reached, len(devices) - reached))])
        reached *= 2
    return rounds
