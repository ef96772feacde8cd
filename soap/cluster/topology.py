"""The cluster as data: device types, hosts, devices and the directed links between them, with their routes.

Pure data, no torch; ``yaml_file`` and ``presets`` make topologies. A full-duplex cable is two ``Link``s. The nodes of the
network are devices and switches; a switch is any link end that is no device's name, and costs nothing itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from soap.cluster.device_clock import DeviceClock, NoClock, WarmUp
from soap.cluster.interconnects import Interconnect, interconnects, library
from soap.cluster.overheads import (
    NO_COLD_PENALTY,
    NO_CPU_OVERHEAD,
    NO_LATENCY_FACTOR,
    ColdPenalty,
    CollectiveLatencyFactor,
    CpuOverhead,
    Port,
    check_not_negative,
)
from soap.cluster.price import Price
from soap.cluster.routes import Router
from soap.errors import TopologyError, did_you_mean

if TYPE_CHECKING:
    import networkx as nx
    import numpy as np
    from numpy.typing import NDArray

    from soap.cluster.alike_hosts import AlikeHosts

DeviceKind = Literal["cpu", "cuda"]
DEVICE_KINDS: tuple[DeviceKind, ...] = ("cpu", "cuda")

_FALLBACK_SHARES = {"float64": 0.5, "complex128": 0.5}
"""Rate of a dtype without a figure, relative to float32: half as many lanes fit into a vector register."""


MEASURED = "measured"
"""``source`` of a device type begins with this word if its rates were measured."""
QUICKLY_MEASURED = "quickly measured"
"""A topology's ``links_source`` begins so if only a few seconds were taken for it."""

@dataclass(frozen=True, slots=True)
class DeviceType:
    """A kind of device and its figures, from a data sheet or a measurement (``source`` says which). ``flops_per_second``: peak rate by
    dtype name; ``float32`` must be among them. ``kernel_seconds``: extra time of every kernel call."""

    name: str
    kind: DeviceKind
    flops_per_second: Mapping[str, float]
    memory_bandwidth_bytes_per_second: float
    memory_bytes: int
    kernel_seconds: float
    source: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops_per_second", MappingProxyType(dict(self.flops_per_second)))
        where = f"device type {self.name!r}"
        if self.kind not in DEVICE_KINDS:
            raise TopologyError(f"{where}: kind {self.kind!r}; expected one of {', '.join(DEVICE_KINDS)}")
        if "float32" not in self.flops_per_second:
            raise TopologyError(f"{where}: no compute rate for float32; add it: other dtypes fall back to it")
        for dtype, rate in self.flops_per_second.items():
            check_positive(where, f"rate for {dtype}", rate)
        check_positive(where, "memory bandwidth", self.memory_bandwidth_bytes_per_second)
        check_positive(where, "memory", self.memory_bytes)
        check_not_negative(where, "kernel time", self.kernel_seconds)

    def __hash__(self) -> int:
        return hash((self.name, self.kind, self.memory_bytes, tuple(sorted(self.flops_per_second.items()))))

    def __reduce__(self) -> tuple[object, ...]:
        rates = dict(self.flops_per_second)  # a mapping proxy cannot be pickled
        rest = (self.memory_bandwidth_bytes_per_second, self.memory_bytes, self.kernel_seconds, self.source)
        return (DeviceType, (self.name, self.kind, rates, *rest))

    def flops(self, dtype: str) -> float:
        """Peak rate for a dtype in FLOP/s. A dtype without a figure gets float32's rate (float64 and complex128: half of it), so a
        narrow type never looks faster than it is known to be."""
        rate = self.flops_per_second.get(dtype)
        return rate if rate is not None else self.flops_per_second["float32"] * _FALLBACK_SHARES.get(dtype, 1.0)

    @property
    def is_measured(self) -> bool:
        """Whether the rates were measured on such a device; False if they are peaks of a data sheet."""
        return self.source.startswith(MEASURED)

    @property
    def identity(self) -> list[Any]:
        """All figures as plain JSON values. The source text is left out, because rewording it changes nothing."""
        rates = sorted((dtype, float(rate)) for dtype, rate in self.flops_per_second.items())
        seconds, bandwidth = float(self.kernel_seconds), float(self.memory_bandwidth_bytes_per_second)
        return [self.name, self.kind, rates, bandwidth, self.memory_bytes, seconds]


@dataclass(frozen=True, slots=True)
class Host:
    """A machine: its CPU cores and main memory (None: not known), which its devices share. Where known: ``core``, the figures of one of
    the cores; ``row_seconds``, the time that one core takes to find one row among others. ``server``: parameter servers run on hosts that
    say so, if any does, and strategies by name compute on the other ones alone (``Topology.workers``)."""

    name: str
    cpu_cores: int
    memory_bytes: int | None
    core: DeviceType | None = None
    row_seconds: float | None = None
    server: bool = False

    def __post_init__(self) -> None:
        check_positive(f"host {self.name!r}", "number of CPU cores", self.cpu_cores)
        if self.memory_bytes is not None:
            check_positive(f"host {self.name!r}", "memory", self.memory_bytes)
        if self.row_seconds is not None:
            check_not_negative(f"host {self.name!r}", "time per row", self.row_seconds)


@dataclass(frozen=True, slots=True)
class Device:
    """One place where tiles run. ``host`` is a position in ``Topology.hosts``. The rank of the same number drives it."""

    index: int
    name: str
    host: int
    type: DeviceType


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a connection between two nodes (device or switch names). ``interconnect``: what it is made of
    (``interconnects``), if its bandwidth is a data sheet's; nothing if it is what messages reach."""

    index: int
    name: str
    source: str
    target: str
    bandwidth_bytes_per_second: float
    latency_seconds: float
    interconnect: str = ""

    def __post_init__(self) -> None:
        where = f"link {self.name!r}"
        if self.source == self.target:
            raise TopologyError(f"{where} leads from {self.source!r} to itself; expected two different nodes")
        check_positive(where, "bandwidth", self.bandwidth_bytes_per_second)
        check_not_negative(where, "latency", self.latency_seconds)
        if self.interconnect and self.interconnect not in interconnects():
            raise TopologyError(f"{where}: unknown interconnect {self.interconnect!r}; expected one of {', '.join(interconnects())}")

    @property
    def kind(self) -> Interconnect | None:
        """The figures of the interconnect; None if it is not named."""
        return interconnects()[self.interconnect] if self.interconnect else None


@dataclass(frozen=True)
class Topology:
    """Devices, hosts and links of a cluster. Immutable and checked: every device reaches every other. A route is the path with the
    fewest seconds for a reference message; ``routes`` has the details.

    ``measured``: the figures come from measuring this machine. They are then no part of the cluster's identity: measuring again must
    not make its strategies another cluster's. ``stated``: numbers of the links of such a cluster whose bandwidth is part of the
    identity all the same, because the cluster's name states it.

    ``described``: the links as the cluster was described, if ``links`` have figures measured between its ranks. It is still that
    cluster, and its identity follows from these. ``links_source``: where such figures come from, in one line.

    ``ports`` (at most one per link), ``cpu_overhead``, ``latency_factor`` and ``cold_penalty``: what communication costs processors and
    other communication, where that was measured (``soap.cluster.overheads``); no part of the identity. ``price``: what the cluster
    costs, if known; no part of the identity either, and no prediction depends on it. ``limits``: for each device the bytes that plans may
    use of its memory, if not all of it (``soap.cluster.memory_budget``); no part of the identity. ``own_samples``: the job gives each
    device only those samples of a batch that it reads (``soap.plan.samples``), not all of it; no part of the identity either.
    """

    name: str
    devices: tuple[Device, ...]
    hosts: tuple[Host, ...]
    links: tuple[Link, ...]
    measured: bool = False
    stated: tuple[int, ...] = ()
    described: tuple[Link, ...] = ()
    links_source: str = ""
    ports: tuple[Port, ...] = ()
    cpu_overhead: CpuOverhead = NO_CPU_OVERHEAD
    latency_factor: CollectiveLatencyFactor = NO_LATENCY_FACTOR
    cold_penalty: ColdPenalty = NO_COLD_PENALTY
    price: Price | None = None
    limits: tuple[int, ...] = ()
    own_samples: bool = False

    def __post_init__(self) -> None:
        for attribute in ("devices", "hosts", "links", "described", "ports", "limits"):
            object.__setattr__(self, attribute, tuple(getattr(self, attribute)))
        if not self.devices:
            raise TopologyError(f"cluster {self.name!r} has no devices; expected at least one")
        check_unique("host", (host.name for host in self.hosts))
        check_unique("device", (device.name for device in self.devices))
        check_unique("link", (link.name for link in self.links))
        check_types(f"cluster {self.name!r}", (device.type for device in self.devices))
        self._check_indices()
        self._check_described()
        check_parallel(self.links)
        self._check_limits()
        self._check_connected()
        if not self.workers:
            raise TopologyError(f"cluster {self.name!r}: all of its hosts with devices are servers; expected one at least without 'server'")

    def __reduce__(self) -> tuple[object, ...]:
        measured = (self.measured, self.stated, self.described, self.links_source)
        between = (self.ports, self.cpu_overhead, self.latency_factor, self.cold_penalty)
        return (Topology, (self.name, self.devices, self.hosts, self.links, *measured, *between, self.price, self.limits, self.own_samples))

    @property
    def links_known(self) -> Literal["described", "quick", "measured"]:
        """How well the links' figures are known."""
        if not self.links_source:
            return "described"
        return "quick" if self.links_source.startswith(QUICKLY_MEASURED) else "measured"

    def device_clock(self) -> DeviceClock:
        """How long tiles take in the course of a simulation; one for each."""
        return WarmUp(self.cold_penalty) if self.cold_penalty != NO_COLD_PENALTY else NoClock()

    @property
    def device_count(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """Numbers of the devices of hosts that are no servers, ascending."""
        return tuple([device.index for device in self.devices if not self.hosts[device.host].server])

    @cached_property
    def servers(self) -> tuple[int, ...]:
        """Numbers of the devices of hosts that are servers, ascending."""
        return tuple([device.index for device in self.devices if self.hosts[device.host].server])

    @property
    def memory_limits(self) -> tuple[int, ...]:
        """Bytes that plans may use on each device."""
        return self.limits or tuple([device.type.memory_bytes for device in self.devices])

    @cached_property
    def switches(self) -> tuple[str, ...]:
        """Names of the nodes that are not devices, sorted."""
        ends = {end for link in self.links for end in (link.source, link.target)}
        return tuple(sorted(ends - {device.name for device in self.devices}))

    def device(self, name: str) -> Device:
        """The device with this name; TopologyError if there is none."""
        for device in self.devices:
            if device.name == name:
                return device
        names = ", ".join(device.name for device in self.devices[:4]) + (", …" if self.device_count > 4 else "")
        names += did_you_mean(name, [device.name for device in self.devices])
        raise TopologyError(f"device {name!r} does not exist on cluster {self.name!r}; expected one of {names}")

    def route(self, source: int, target: int) -> tuple[int, ...]:
        """Link numbers from device ``source`` to device ``target``, in order; () if they are the same."""
        path = self.alike_hosts.route(source, target) if self.alike_hosts else None
        path = path or self._router.path(self.devices[source].name, self.devices[target].name)
        assert path is not None  # every device reaches every other
        return path

    def routes(self, sources: Sequence[int] | NDArray[np.int64], targets: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Routes of many pairs at once: [pair, place], padded with -1."""
        if self.alike_hosts and (found := self.alike_hosts.routes(sources, targets)) is not None:
            return found
        names = [device.name for device in self.devices]
        return self._router.paths([names[source] for source in sources], [names[target] for target in targets])

    @cached_property
    def is_tree(self) -> bool:
        """Whether there is only one path from each node to each other node."""
        joined = {frozenset((link.source, link.target)) for link in self.links}
        return len(joined) <= len(frozenset[str]().union(*joined)) and self._router.is_tree

    def route_latency_seconds(self, source: int, target: int) -> float:
        """The latencies of a route's links, added up in their order; 0 on the same device."""
        seconds = 0.0
        for link in self.route(source, target):  # not ``sum``, which rounds differently from Python 3.12 on
            seconds += self.links[link].latency_seconds
        return seconds

    def distance(self, source: int, target: int) -> int:
        """How far apart two devices are: 0 on the same device, 1 on the same host, 2 between hosts."""
        if source == target:
            return 0
        return 1 if self.devices[source].host == self.devices[target].host else 2

    @cached_property
    def hash(self) -> str:
        """Identity of devices, hosts and links (not of the cluster's name): 16 hex digits of SHA-256."""
        return identity(self)

    @cached_property
    def graph(self) -> nx.DiGraph[str]:
        """The network for graph algorithms and pictures: nodes with attribute ``device`` (number or None), edges with ``link`` (number)."""
        import networkx as nx  # imported here because it is slow to import, and planning does not need it
        graph: nx.DiGraph[str] = nx.DiGraph(name=self.name)
        graph.add_nodes_from((device.name, {"device": device.index}) for device in self.devices)
        graph.add_nodes_from((switch, {"device": None}) for switch in self.switches)
        for link in self.links:
            figures = {"bandwidth_bytes_per_second": link.bandwidth_bytes_per_second, "latency_seconds": link.latency_seconds}
            graph.add_edge(link.source, link.target, link=link.index, **figures)
        return graph

    @property
    def has_measured_links(self) -> bool:
        """Whether the links have figures measured between the cluster's ranks."""
        return bool(self.described)

    @cached_property
    def effective_bandwidths(self) -> tuple[float, ...]:
        """Bytes per second of each link that messages reach: of GPUs' links from a data sheet NCCL's share, of others what is stated."""
        named = self.has_gpus_alone and not self.measured and not self.has_measured_links
        kinds = [link.kind if named else None for link in self.links]
        stated = [link.bandwidth_bytes_per_second for link in self.links]
        return tuple(own if kind is None else own * kind.share for own, kind in zip(stated, kinds, strict=True))

    @cached_property
    def gpu_library(self) -> str:
        """What GPUs communicate by: RCCL if some link is AMD's, else NCCL."""
        return next((link.kind.library for link in self.links if link.kind is not None and link.kind.library != "NCCL"), "NCCL")

    @cached_property
    def call_seconds(self) -> float:
        """What a call of the communication library takes beside the latency of messages: nothing where links were measured, or do not name
        their interconnect, since then it is part of their latency, and on processors."""
        names = {link.interconnect for link in self.links}
        if not names or "" in names or not self.has_gpus_alone or self.measured or self.has_measured_links:
            return 0.0
        return library(self.gpu_library).call_seconds

    @cached_property
    def direct_links(self) -> Mapping[tuple[int, int], int]:
        """(device, other device of the same host) -> the link that joins them without a switch."""
        places = {device.name: device for device in self.devices}
        found = ((places.get(link.source), places.get(link.target), link.index) for link in self.links)
        return {(a.index, b.index): link for a, b, link in found if a is not None and b is not None and a.host == b.host}

    @cached_property
    def has_gpus_alone(self) -> bool:
        """Whether all devices are GPUs."""
        return all(device.type.kind == "cuda" for device in self.devices)

    @cached_property
    def link_figures(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(effective bandwidths in bytes per second, latencies in seconds) of all links."""
        import numpy as np  # imported here because it is slow to import, and reading a cluster does not need it
        bandwidths = np.array(self.effective_bandwidths, np.float64)
        return bandwidths, np.array([link.latency_seconds for link in self.links], np.float64)

    @cached_property
    def _router(self) -> Router:
        return Router(self.links)

    @cached_property
    def alike_hosts(self) -> AlikeHosts | None:
        """Its hosts, if these are many that are alike."""
        from soap.cluster.alike_hosts import AlikeHosts  # numpy

        return None if self.is_tree else AlikeHosts.find(self.devices, self.links)

    def _check_indices(self) -> None:
        for position, device in enumerate(self.devices):
            if device.index != position:
                raise TopologyError(f"device {device.name!r} has index {device.index}; expected its position {position}")
            if not 0 <= device.host < len(self.hosts):
                raise TopologyError(f"device {device.name!r} is on host {device.host}; expected 0 to {len(self.hosts) - 1}")
        for position, link in enumerate(self.links):
            if link.index != position:
                raise TopologyError(f"link {link.name!r} has index {link.index}; expected its position {position}")

    def _check_described(self) -> None:
        if self.described and [(x.source, x.target) for x in self.described] != [(x.source, x.target) for x in self.links]:
            raise TopologyError(
                f"cluster {self.name!r}: the described links connect other nodes than its links; expected the same ones with other figures"
            )

    def _check_limits(self) -> None:
        if self.limits and (len(self.limits) != len(self.devices) or min(self.limits) < 1):
            raise TopologyError(f"limits of memory {self.limits!r}; expected a positive number of bytes for each of the devices, or none")

    def _check_connected(self) -> None:
        """Check that every device reaches every other: true exactly if the first reaches all and all reach the first."""
        first = self.devices[0].name
        ahead = reachable(first, ((link.source, link.target) for link in self.links))
        back = reachable(first, ((link.target, link.source) for link in self.links))
        for device in self.devices:
            if device.name not in ahead or device.name not in back:
                pair = (first, device.name) if device.name not in ahead else (device.name, first)
                raise TopologyError(f"no route from {pair[0]!r} to {pair[1]!r} on cluster {self.name!r}; add links that connect them")


def reachable(start: str, edges: Iterable[tuple[str, str]]) -> set[str]:
    """All nodes to which edges lead from a node, and itself."""
    following: dict[str, list[str]] = {}
    for source, target in edges:
        following.setdefault(source, []).append(target)
    found, todo = {start}, [start]
    while todo:
        for node in following.get(todo.pop(), ()):
            if node not in found:
                found.add(node)
                todo.append(node)
    return found


def check_unique(what: str, names: Iterable[str]) -> None:
    """TopologyError if a name occurs twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise TopologyError(f"{what} name {name!r} occurs twice; expected unique names")
        seen.add(name)


def check_types(where: str, types: Iterable[DeviceType]) -> None:
    """TopologyError if two device types of different figures have one name, by which costs are looked up."""
    seen: dict[str, DeviceType] = {}
    for kind in types:
        known = seen.setdefault(kind.name, kind)
        if known is not kind and known.identity != kind.identity:
            raise TopologyError(f"{where}: two device types are named {kind.name!r}; rename one")


def check_positive(where: str, what: str, value: float) -> None:
    """TopologyError unless the value is finite and above 0."""
    if not (isfinite(value) and value > 0):
        raise TopologyError(f"{where}: {what} is {value!r}; expected a finite number above 0")


def check_parallel(links: Iterable[Link]) -> None:
    """TopologyError if two links lead from the same node to the same other one."""
    seen: dict[tuple[str, str], str] = {}
    for link in links:
        other = seen.setdefault((link.source, link.target), link.name)
        if other != link.name:
            raise TopologyError(
                f"links {other!r} and {link.name!r} both lead from {link.source!r} to {link.target!r}; "
                "give one link with the sum of their bandwidths"
            )


def identity(topology: Topology) -> str:
    """Of devices, hosts and links as described, not of the cluster's name: 16 hex digits of SHA-256. Figures that were measured are no
    part of it; those that the cluster's name states are."""
    described = topology.described or topology.links
    if topology.measured:
        parts: list[Any] = [[[d.name, d.host, d.type.kind] for d in topology.devices], [[x.source, x.target] for x in described]]
        if topology.stated:
            parts.append([[link, float(described[link].bandwidth_bytes_per_second)] for link in topology.stated])
    else:
        devices = [[d.name, d.host, d.type.identity] for d in topology.devices]
        hosts = [[h.name, h.cpu_cores, h.memory_bytes, *_stated(h)] for h in topology.hosts]
        links = [[x.name, x.source, x.target, float(x.bandwidth_bytes_per_second), float(x.latency_seconds)] for x in described]
        parts = [devices, hosts, links]
    if topology.servers:
        parts.append({"servers": topology.servers})
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _stated(host: Host) -> list[Any]:
    """The host's ``core`` and ``row_seconds``, where known, as plain JSON values."""
    core = None if host.core is None else host.core.identity
    return [] if core is None and host.row_seconds is None else [core, host.row_seconds]
