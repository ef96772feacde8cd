"""RedSync's equations (1) and (2) in closed form, for all parameters of a net that are compressed, and where they meet.

With p devices, for a parameter of M elements: a message's latency a, B bytes a second on the wire, messages of m bytes:

    (1)  T_sparse = T_select + lg(p) a + (p - 1) m / B + p g1           g1: decompressing one message
    (2)  T_dense  = 2 lg(p) a + 2 (p - 1) / p 4 M / B + (p - 1) / p g2  g2: adding up M elements

Recursive doubling gathers, Rabenseifner's algorithm sums. Nothing overlaps. ``tests/simulator/test_redsync_equations.py`` has both come out
of simulated tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log2

from soap.cluster.topology import Topology
from soap.plan.collectives import REDUCE_TRAFFIC
from soap.plan.compression.seam import layout_of
from soap.profiles.roofline import RooflineCosts
from soap.strategy.compression import Compression

MOST = 2**14
"""Devices up to which a crossing is looked for."""


@dataclass(frozen=True)
class Gradient:
    """A compressed parameter's. ``how``: with a selection."""

    shape: tuple[int, ...]
    element_bytes: int
    how: Compression


def sparse_ns(gradients: Iterable[Gradient], topology: Topology, peers: int) -> float:
    """(1), added up over parameters."""
    kind, costs = topology.devices[0].type, RooflineCosts(topology, 0)
    latency, bandwidth = wire(topology)
    total = 0.0
    for own in gradients:
        layout = layout_of(own.how, own.shape, own.element_bytes, peers)
        worked = sum(costs.compression_ns(own.how, layout, work, kind) for work in ("select", "restore"))
        message = layout.exchanges[0].message_bytes
        total += worked + 1e9 * (log2(peers) * latency + (peers - 1) * message / bandwidth)
    return total


def dense_ns(gradients: Iterable[Gradient], topology: Topology, peers: int) -> float:
    """(2), added up over parameters."""
    latency, bandwidth = wire(topology)
    memory = topology.devices[0].type.memory_bandwidth_bytes_per_second
    total = 0.0
    for own in gradients:
        size = layout_of(own.how, own.shape, own.element_bytes, peers).whole_bytes
        moving = 2 * log2(peers) * latency + 2 * (peers - 1) / peers * size / bandwidth
        total += 1e9 * (moving + (peers - 1) / peers * size * REDUCE_TRAFFIC / memory)
    return total


def wire(topology: Topology) -> tuple[float, float]:
    """Latency in seconds and bytes a second between the first two devices."""
    route = topology.route(0, 1)
    return topology.route_latency_seconds(0, 1), min(topology.links[link].bandwidth_bytes_per_second for link in route)


def worthwhile(gradients: Sequence[Gradient], topology: Topology) -> tuple[int, int] | None:
    """From how many devices to how many (1) is below (2), of 2 to ``MOST``; None if it never is."""

    def better(peers: int) -> bool:
        return sparse_ns(gradients, topology, peers) < dense_ns(gradients, topology, peers)

    powers = [2**k for k in range(1, MOST.bit_length())]
    good = [peers for peers in powers if better(peers)]
    if not good:
        return None
    first, last = good[0], good[-1]
    low, high = first // 2, first  # low is no better, or 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if better(middle) else (middle, high)
    end, beyond = last, 2 * last
    while last < MOST and beyond - end > 1:
        middle = (end + beyond) // 2
        end, beyond = (middle, beyond) if better(middle) else (end, middle)
    return max(high, 2), end
