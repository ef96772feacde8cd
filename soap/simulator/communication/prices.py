"""Prices of communication on a topology, the same for every cost model: messages, all-reduces, exchanges. Answers are cached.

All are closed forms over the links' bandwidths and latencies and the devices' memory bandwidths (``allreduce``, ``collectives``), in whole
nanoseconds, rounded up, at least 1.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from math import floor

from soap.cluster.interconnects import figures
from soap.cluster.overheads import Share
from soap.cluster.topology import Link, Topology
from soap.plan.collectives import REDUCE_TRAFFIC, Flow, exchange_seconds
from soap.plan.syncs.even_parts import Collective
from soap.simulator.communication.algorithms import AllReduceOption, fastest
from soap.simulator.communication.allreduce import allreduce_bytes, allreduce_options, parted_options
from soap.simulator.costs import nanoseconds

CACHE_ENTRIES = 2**18

VERSION = 7
"""Raise it whenever a formula changes."""

NCCL_VERSION = 1
"""The same of formulas for GPUs alone."""


class Communication:
    """Durations of communications, and the links that they hold. A search should keep one for its cluster."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._routes: dict[tuple[int, int], tuple[float, float]] = {}
        self._options: dict[tuple[int, ...], tuple[AllReduceOption, ...]] = {}
        self._parted: dict[tuple[int, ...], tuple[AllReduceOption, ...]] = {}
        self._exchanges: dict[tuple[tuple[Flow, ...], int, float | None], int] = {}
        self._ports = {port.link: port for port in topology.ports}
        self.groups: Sequence[tuple[int, ...]] = ()
        """Sets of devices, ascending, whose sums are going to be asked for, if that is known."""

    @property
    def hash(self) -> str:
        """16 hex digits over every figure that enters an answer."""
        links = [[float(link.bandwidth_bytes_per_second), float(link.latency_seconds), *_name(link)] for link in self.topology.links]
        devices = [[device.type.kind, float(device.type.memory_bandwidth_bytes_per_second)] for device in self.topology.devices]
        ports = [asdict(port) for port in self.topology.ports]
        cold = asdict(self.topology.cold_penalty)
        if not cold["behind_messages"]:  # figures are the same as before there were any
            del cold["behind_messages"]
        measured = [ports, asdict(self.topology.cpu_overhead), asdict(self.topology.latency_factor), cold]
        text = json.dumps(["communication", VERSION, REDUCE_TRAFFIC, links, devices, *measured, *self._nccl_figures()])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _nccl_figures(self) -> list[object]:
        """What else enters the prices of GPUs."""
        gpus = any(device.type.kind == "cuda" for device in self.topology.devices)
        return [NCCL_VERSION, figures(), self.topology.measured, self.topology.has_measured_links] if gpus else []

    def transfer_ns(self, transfer_bytes: int, source: int, target: int) -> int:
        """Duration of a message between two devices: its route's latencies, then the bytes at the rate of its slowest link.

        max(1, ceil((latency_seconds + seconds_per_byte * transfer_bytes) * 1e9)), in this order of operations.
        """
        latency_seconds, seconds_per_byte = self._route(source, target)
        return nanoseconds(latency_seconds + seconds_per_byte * transfer_bytes)

    def latency_ns(self, transfer_ns: int, source: int, target: int) -> int:
        """The end of a message's time, in which it holds no link and the next message may use them:
        min(transfer_ns - 1, floor(latency_seconds * 1e9))."""
        return min(transfer_ns - 1, floor(self._route(source, target)[0] * 1e9))

    def _route(self, source: int, target: int) -> tuple[float, float]:
        found = self._routes.get((source, target))
        if found is None:
            found = self._routes[source, target] = self.route_figures(source, target)
        return found

    def route_figures(self, source: int, target: int) -> tuple[float, float]:
        """(latency in seconds, seconds per byte) of a message between two devices; zeros on one device."""
        route, bandwidths = self.topology.route(source, target), self.topology.effective_bandwidths
        if not route:
            return 0.0, 0.0
        return self.topology.route_latency_seconds(source, target) + self.topology.call_seconds, max(1 / bandwidths[link] for link in route)

    def message_share(self, source: int, target: int) -> Share:
        """CPU overhead of a message on the devices that have ports at its route's links: the largest fixed time of these ports, and the
        smallest share of the time for which it holds links. The smallest, because the work is for bytes, which arrive only as fast as the
        slowest link carries them."""
        ports = [self._ports[link] for link in self.topology.route(source, target) if link in self._ports]
        return Share(max(port.fixed_ns for port in ports), min(port.permille for port in ports)) if ports else Share()

    def allreduce_options(self, devices: tuple[int, ...]) -> tuple[AllReduceOption, ...]:
        """The options for an all-reduce over these devices."""
        found = self._options.get(devices)
        if found is None:
            found = self._options[devices] = allreduce_options(self.topology, devices)
        return found

    def allreduce_option(self, reduced_bytes: int, devices: tuple[int, ...]) -> AllReduceOption:
        """The fastest option for this many bytes."""
        return fastest(self.allreduce_options(devices), reduced_bytes)

    def allreduce(self, reduced_bytes: int, devices: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Duration in ns of an all-reduce by the fastest option, and the numbers of the links that it holds."""
        option = self.allreduce_option(reduced_bytes, devices)
        return option.duration_ns(reduced_bytes), option.links

    def parted_options(self, devices: tuple[int, ...]) -> tuple[AllReduceOption, ...]:
        """The options for an all-gather or a reduce-scatter of equal parts over these devices."""
        found = self._parted.get(devices)
        if found is None:
            found = self._parted[devices] = parted_options(self.topology, devices)
        return found

    def collective(self, collective: Collective) -> tuple[int, tuple[int, ...]]:
        """Duration in ns of a collective of equal parts by the fastest options, that of the slowest group, and the links that it holds."""
        size = collective.size_bytes
        used = [fastest(self.parted_options(group), size) for group in collective.groups]
        return max(option.duration_ns(size) for option in used), tuple(sorted({link for option in used for link in option.links}))

    def allreduce_bytes(self, reduced_bytes: int, devices: tuple[int, ...]) -> int:
        """Bytes that an all-reduce puts on all its hops together."""
        return allreduce_bytes(reduced_bytes, self.members(devices))

    def members(self, devices: tuple[int, ...]) -> int:
        """How many devices of the cluster sum where these do: as many, but in a folded plan (``folding``)."""
        return len(devices)

    def places(self, sharing: tuple[int, ...]) -> Sequence[Sequence[int]]:
        """For each of the devices that share what they own in parts, its places among all that do: its own alone, but in a folded plan."""
        return [[place] for place in range(len(sharing))]

    def exchange_ns(self, flows: Sequence[Flow], reduced_bytes: int = 0, latency_factor: float | None = None) -> int:
        """Duration of flows that run at once, as a collective or a round of one (``collectives.exchange_seconds``); each target then adds
        up at most ``reduced_bytes``."""
        key = (tuple(flows), reduced_bytes, latency_factor)
        found = self._exchanges.get(key)
        if found is None:
            if len(self._exchanges) >= CACHE_ENTRIES:
                self._exchanges.clear()
            found = self._exchanges[key] = nanoseconds(exchange_seconds(self.topology, flows, reduced_bytes, latency_factor))
        return found


def _name(link: Link) -> list[str]:
    return [link.interconnect] if link.interconnect else []
