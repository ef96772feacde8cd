"""All-reduce over some devices of a topology: closed forms of three algorithms, each linear in the bytes that are summed.

An algorithm is a list of *steps*. In a step all hops move an equal part of the buffer at once; in some steps the receivers add it up. Let
a be the slowest hop's latency (its links' latencies added up in the order of the route), s the busiest link's share (seconds per byte of
that link, times the hops that cross it), and g the slowest device's time to add one byte (``REDUCE_TRAFFIC`` bytes of memory traffic). A
step that is repeated r times and moves 1/p of B bytes per hop takes r * (a + B/p * s), and r * B/p * g more if it adds, for each hop that
a receiver gets at once. If the latency of a step has been measured to be longer than a message's, the algorithm's whole latency is
multiplied by ``Topology.latency_factor``.

- *Ring*: reduce-scatter, then all-gather, n-1 steps of 1/n each (Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms", 2009). gloo
  uses it, and NCCL for large buffers: 2(n-1)a + 2(n-1)/n B s + (n-1)/n B g on one switch. Between hosts with several NICs it is a ring
  for each of them, all at once, which sum equal parts (``ring_orders``).
- *Recursive halving and doubling* (Rabenseifner, "Optimization of collective reduction operations", 2004): partners at distance 1, 2, 4, …
  swap halves, quarters, …, then go back: 2 lg(n) a + 2(n-1)/n B s + (n-1)/n B g, which is RedSync's eq. 2. If n is not a power of two,
  each extra device first sends its whole buffer to a neighbour, which sends it the sum at the end (Thakur, Rabenseifner & Gropp,
  "Optimization of Collective Communication Operations in MPICH", 2005, section 4.5).
- *Binomial tree*: a sum at the first device, then a broadcast: 2 lg(n) a + 2 lg(n) B s + lg(n) B g, for few bytes (ibid.).

Whatever the algorithm, all hops together carry the buffer 2(n-1) times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import lcm
from typing import NamedTuple

import numpy as np

from soap.cluster.topology import Topology
from soap.plan.collectives import REDUCE_TRAFFIC, tree_rounds
from soap.simulator.communication.ring_orders import Orders, ring_orders
from soap.simulator.costs import nanoseconds

MANY_HOPS = 64
"""From this many hops in a step on, arrays are faster than one route after the other."""

Hop = tuple[int, int]
"""(source device, target device)."""


class Algorithm(StrEnum):
    """How an all-reduce is done. Of equally fast algorithms the first one here is preferred."""

    RING = "ring"
    HALVING_DOUBLING = "recursive halving and doubling"
    TREE = "binomial tree"


@dataclass(frozen=True, slots=True)
class Step:
    """Each of ``hops`` moves 1/``parts`` of the buffer at once, ``repeats`` times. If ``adds``, receivers add it to their own buffer.
    ``received``: how many of the hops end at one device."""

    hops: tuple[Hop, ...]
    parts: int
    repeats: int
    adds: bool
    received: int = 1


@dataclass(frozen=True, slots=True)
class AllReduceOption:
    """An algorithm over one group of devices. ``links``: numbers of all links that it holds, sorted."""

    algorithm: Algorithm
    latency_seconds: float
    seconds_per_byte: float
    links: tuple[int, ...]

    def duration_ns(self, reduced_bytes: int) -> int:
        """max(1, ceil((latency_seconds + seconds_per_byte * reduced_bytes) * 1e9)), in this order of operations."""
        return nanoseconds(self.latency_seconds + self.seconds_per_byte * reduced_bytes)


def steps(algorithm: Algorithm, devices: Sequence[int], orders: Orders = ()) -> list[Step]:
    """The steps of an algorithm over these devices, taken in ascending order, each once; none for a single device. ``orders``: those of
    several rings, where a ring is not one in ascending order (``ring_orders``)."""
    members = sorted(set(devices))
    if len(members) < 2:
        return []
    match algorithm:
        case Algorithm.RING:
            return _rings(orders or [members])
        case Algorithm.HALVING_DOUBLING:
            return _halving_doubling(members)
        case Algorithm.TREE:
            return _tree(members)


def available(topology: Topology, devices: Sequence[int]) -> tuple[Algorithm, ...]:
    """The algorithms that the devices' backend has: gloo, the backend of processors, has only the ring."""
    gloo = any(topology.devices[d].type.kind == "cpu" for d in devices)
    return (Algorithm.RING,) if gloo else tuple(Algorithm)


def allreduce_options(topology: Topology, devices: Sequence[int]) -> tuple[AllReduceOption, ...]:
    """The available algorithms over these devices, in the order of ``Algorithm``."""
    return tuple(_option(topology, algorithm, devices) for algorithm in available(topology, devices))


def fastest(options: Sequence[AllReduceOption], reduced_bytes: int) -> AllReduceOption:
    """The option with the smallest ``duration_ns``; the first one if several are equal."""
    return min(options, key=lambda option: option.duration_ns(reduced_bytes))


def allreduce_bytes(reduced_bytes: int, device_count: int) -> int:
    """Bytes that an all-reduce puts on all its hops together, by any of the algorithms."""
    return 2 * (device_count - 1) * reduced_bytes


def link_bytes(topology: Topology, algorithm: Algorithm, devices: Sequence[int], reduced_bytes: int) -> dict[int, int]:
    """Link number -> bytes that an all-reduce puts on it, rounded up; link numbers ascend."""
    shares, parts = link_shares(topology, algorithm, devices)
    return {link: -(-share * reduced_bytes // parts) for link, share in shares.items()}


def link_shares(topology: Topology, algorithm: Algorithm, devices: Sequence[int]) -> tuple[dict[int, int], int]:
    """({link number: share}, parts): ``share / parts`` of the summed bytes cross the link; link numbers ascend."""
    todo = _steps_on(topology, algorithm, devices)
    parts = lcm(*(step.parts for step in todo))
    shares: dict[int, int] = {}
    known: dict[tuple[Hop, ...], _Loads] = {}
    for step in todo:
        loads = known.get(step.hops)
        if loads is None:
            loads = known[step.hops] = _loads(topology, step.hops)
        each = step.repeats * (parts // step.parts)
        for link, count in loads.crossings.items():
            shares[link] = shares.get(link, 0) + count * each
    return dict(sorted(shares.items())), parts


def _steps_on(topology: Topology, algorithm: Algorithm, devices: Sequence[int]) -> list[Step]:
    return steps(algorithm, devices, ring_orders(topology, devices) if algorithm is Algorithm.RING else ())


def _rings(orders: Sequence[Sequence[int]]) -> list[Step]:
    count, parts = len(orders[0]), len(orders[0]) * len(orders)
    hops = tuple(hop for order in orders for hop in (*pairwise(order), (order[-1], order[0])))
    return [Step(hops, parts, count - 1, adds, len(orders)) for adds in (True, False)]


def _halving_doubling(members: Sequence[int]) -> list[Step]:
    power = 1 << (len(members).bit_length() - 1)
    extra = len(members) - power
    folded = tuple((members[2 * i], members[2 * i + 1]) for i in range(extra))
    core = [*members[1 : 2 * extra : 2], *members[2 * extra :]]
    distances = [1 << k for k in range(power.bit_length() - 1)]
    swaps = [(tuple((core[i], core[i ^ distance]) for i in range(power)), 2 * distance) for distance in distances]
    found = [Step(hops, parts, 1, True) for hops, parts in swaps]
    found += [Step(hops, parts, 1, False) for hops, parts in reversed(swaps)]
    if not extra:
        return found
    return [Step(folded, 1, 1, True), *found, Step(_turned(folded), 1, 1, False)]


def _tree(members: Sequence[int]) -> list[Step]:
    rounds = [tuple((source, target) for source, target, _ in flows) for flows in tree_rounds(members, 0)]
    return [Step(_turned(hops), 1, 1, True) for hops in reversed(rounds)] + [Step(hops, 1, 1, False) for hops in rounds]


def _turned(hops: Sequence[Hop]) -> tuple[Hop, ...]:
    return tuple((target, source) for source, target in hops)


def _option(topology: Topology, algorithm: Algorithm, devices: Sequence[int]) -> AllReduceOption:
    """The option of an algorithm. Steps are added up in order, each as ``repeats / parts * share``, then
    ``repeats / parts * adding * received``."""
    slowest = min((topology.devices[d].type.memory_bandwidth_bytes_per_second for d in devices), default=float("inf"))
    adding = REDUCE_TRAFFIC / slowest
    latency_seconds = seconds_per_byte = 0.0
    used: set[int] = set()
    known: dict[tuple[Hop, ...], _Loads] = {}
    for step in _steps_on(topology, algorithm, devices):
        loads = known.get(step.hops)
        if loads is None:
            loads = known[step.hops] = _loads(topology, step.hops)
            used.update(loads.crossings)
        latency_seconds += step.repeats * loads.latency_seconds
        seconds_per_byte += step.repeats / step.parts * loads.share
        if step.adds:
            seconds_per_byte += step.repeats / step.parts * adding * step.received
    latency_seconds *= topology.latency_factor.of_all_reduce(len(set(devices)))
    return AllReduceOption(algorithm, latency_seconds, seconds_per_byte, tuple(sorted(used)))


class _Loads(NamedTuple):
    """Hops that run at once: latency of the slowest, seconds per byte of the busiest link, and link number -> hops that cross it."""

    latency_seconds: float
    share: float
    crossings: dict[int, int]


def _loads(topology: Topology, hops: Sequence[Hop]) -> _Loads:
    if len(hops) >= MANY_HOPS:
        return _many_loads(topology, hops)
    crossings = _crossings(topology, hops)
    latency = max(topology.route_latency_seconds(source, target) for source, target in hops)
    share = max(count / topology.links[link].bandwidth_bytes_per_second for link, count in crossings.items())
    return _Loads(latency, share, crossings)


def _many_loads(topology: Topology, hops: Sequence[Hop]) -> _Loads:
    """``_loads`` with arrays. Latencies are added up in the order of the route, as there."""
    routes = topology.routes([source for source, _ in hops], [target for _, target in hops])
    bandwidths, latencies = topology.link_figures
    along = np.zeros(len(routes))
    for column in routes.T:
        along += np.where(column < 0, 0.0, latencies[column])
    counts = np.bincount(routes[routes >= 0], minlength=len(topology.links))
    links = np.flatnonzero(counts)
    crossings = dict(zip(links.tolist(), counts[links].tolist(), strict=True))
    return _Loads(float(along.max()), float((counts[links] / bandwidths[links]).max()), crossings)


def _crossings(topology: Topology, hops: Sequence[Hop]) -> dict[int, int]:
    """Link number -> hops that cross it."""
    found: dict[int, int] = {}
    for source, target in hops:
        for link in topology.route(source, target):
            found[link] = found.get(link, 0) + 1
    return found
