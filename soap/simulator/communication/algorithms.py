"""Algorithms of all-reduces as lists of steps: which devices send which others which part of the buffer.

- *Ring*: reduce-scatter, then all-gather, n-1 steps of 1/n each (Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms", 2009). gloo
  has nothing else; NCCL uses it for large buffers. There may be several rings at once, which sum equal parts (``ring_orders``).
- *Tree*: NCCL's. The devices of a host are a chain, whose first devices are two trees between the hosts. Each tree sums half of the buffer
  towards its root and takes the sum back; who is inside one tree is a leaf of the other (Sanders, Speck & Träff, "Two-tree algorithms for
  full bandwidth broadcast, reduction and scan", 2009). All of it is a pipeline.
- *NVLS*: NVLink SHARP. Each device reads one part of everybody's buffer, which the NVSwitch adds up, and writes the sum to everybody
  through the switch, so that a device's link carries (n+1)/n of the buffer each way. *NVLS tree*: the same inside hosts, trees between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, pairwise

from soap.simulator.communication.ring_orders import Orders
from soap.simulator.costs import nanoseconds

Hop = tuple[int, int]
"""(source device, target device)."""

ONE_HOST: Mapping[int, int] = {}
"""As ``hosts`` of ``steps``: all devices are on one host."""


class Algorithm(StrEnum):
    """How an all-reduce is done. Of equally fast algorithms the first one here is preferred."""

    RING = "ring"
    TREE = "tree"
    NVLS = "NVLS"
    NVLS_TREE = "NVLS tree"


@dataclass(frozen=True, slots=True)
class Step:
    """Each of ``hops`` moves 1/``parts`` of the buffer at once, ``repeats`` times. If ``adds``, receivers add it to their own buffer.
    ``received``: how many of the hops end at one device."""

    hops: tuple[Hop, ...]
    parts: int
    repeats: int
    adds: bool
    received: int = 1


def steps(algorithm: Algorithm, devices: Sequence[int], orders: Orders = (), hosts: Mapping[int, int] = ONE_HOST) -> list[Step]:
    """The steps of an algorithm over these devices, each counted once; none for a single device. ``orders``: those of the rings, or of the
    chains, if they are not one in ascending order (``ring_orders``). ``hosts``: device -> its host's number."""
    members = sorted(set(devices))
    if len(members) < 2:
        return []
    orders = orders or (tuple(members),)
    match algorithm:
        case Algorithm.RING:
            return _rings(orders)
        case Algorithm.TREE:
            return _chains(orders, hosts) + _trees(orders, hosts)
        case Algorithm.NVLS:
            return _through_switches([members])
        case Algorithm.NVLS_TREE:
            return _through_switches(by_host(members, hosts)) + _trees(orders, hosts)


def by_host(devices: Sequence[int], hosts: Mapping[int, int]) -> list[list[int]]:
    """Devices that follow each other on one host, host after host."""
    return [list(own) for _, own in groupby(devices, lambda device: hosts.get(device, 0))]


def double_tree(count: int) -> tuple[list[int | None], list[int | None]]:
    """Two binary trees over so many hosts: host -> its parent, None for the root. In the first, odd hosts are leaves; the second is its
    mirror image, or with an odd number of hosts is shifted by one, so that (nearly) no host has children in both."""
    first = [_parent(host, count) for host in range(count)]
    if count % 2 == 0:
        mirrored = [first[count - 1 - host] for host in range(count)]
        return first, [None if parent is None else count - 1 - parent for parent in mirrored]
    shifted = [first[host - 1] for host in range(count)]  # host 0 takes the place of the last
    return first, [None if parent is None else (parent + 1) % count for parent in shifted]


def _parent(host: int, count: int) -> int | None:
    """In the tree in which a host's lowest bit that is set says how high it stands."""
    if host == 0:
        return None
    bit = host & -host
    above = (host ^ bit) | (bit << 1)
    return above if above < count else host ^ bit


def _rings(orders: Orders) -> list[Step]:
    count, parts = len(orders[0]), len(orders[0]) * len(orders)
    hops = tuple(hop for order in orders for hop in (*pairwise(order), (order[-1], order[0])))
    return [Step(hops, parts, count - 1, adds, len(orders)) for adds in (True, False)]


def _chains(orders: Orders, hosts: Mapping[int, int]) -> list[Step]:
    """Along each order inside each host towards its first device, and back."""
    inward = tuple((b, a) for order in orders for own in by_host(order, hosts) for a, b in pairwise(own))
    return _there_and_back(inward, len(orders))


def _trees(orders: Orders, hosts: Mapping[int, int]) -> list[Step]:
    """Two trees between the hosts for each order, whose devices are the first of each host."""
    inward: list[Hop] = []
    for order in orders:
        heads = [own[0] for own in by_host(order, hosts)]
        for parents in double_tree(len(heads)):
            inward += [(heads[host], heads[parent]) for host, parent in enumerate(parents) if parent is not None]
    return _there_and_back(tuple(inward), 2 * len(orders))


def _there_and_back(hops: tuple[Hop, ...], parts: int) -> list[Step]:
    if not hops:
        return []
    return [Step(hops, parts, 1, True), Step(tuple((target, source) for source, target in hops), parts, 1, False)]


def _through_switches(groups: Sequence[Sequence[int]]) -> list[Step]:
    """What links to and from a switch carry, as hops from each device to the next."""
    return [Step((*pairwise(own), (own[-1], own[0])), len(own), len(own) + 1, False) for own in groups if len(own) > 1]


@dataclass(frozen=True, slots=True)
class AllReduceOption:
    """An algorithm over one group of devices. ``links``: numbers of all links that it holds, sorted. ``protocol``: NCCL's name of how bytes
    are handed over, or nothing."""

    algorithm: Algorithm
    latency_seconds: float
    seconds_per_byte: float
    links: tuple[int, ...]
    protocol: str = ""

    def duration_ns(self, reduced_bytes: int) -> int:
        """max(1, ceil((latency_seconds + seconds_per_byte * reduced_bytes) * 1e9)), in this order of operations."""
        return nanoseconds(self.latency_seconds + self.seconds_per_byte * reduced_bytes)


def fastest(options: Sequence[AllReduceOption], reduced_bytes: int) -> AllReduceOption:
    """The option with the smallest ``duration_ns``; the first one if several are equal."""
    return min(options, key=lambda option: option.duration_ns(reduced_bytes))


def undominated(options: Sequence[AllReduceOption]) -> tuple[AllReduceOption, ...]:
    """The options that are the fastest for some number of bytes, in their order; of equal ones the first."""
    chosen = [min(options, key=lambda option: (option.latency_seconds, option.seconds_per_byte))]
    while True:
        last = chosen[-1]
        faster = [option for option in options if option.seconds_per_byte < last.seconds_per_byte]
        if not faster:
            return tuple(option for option in options if any(option is one for one in chosen))
        chosen.append(min(faster, key=lambda option: (_crossing_bytes(last, option), option.seconds_per_byte)))


def _crossing_bytes(slower: AllReduceOption, faster: AllReduceOption) -> float:
    """From how many bytes on the one with fewer seconds per byte is faster."""
    return (faster.latency_seconds - slower.latency_seconds) / (slower.seconds_per_byte - faster.seconds_per_byte)
