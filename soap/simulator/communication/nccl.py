"""All-reduces, all-gathers and reduce-scatters between GPUs by NCCL (or RCCL): by each algorithm and protocol, linear in the bytes.

After NCCL's own model, by which it chooses among them (``src/graph/tuning.cc``; figures and sources in ``interconnects``). A protocol says
how a receiver learns that bytes are there: *LL* flags every 4 bytes, *LL128* every 120, *Simple* synchronizes by chunk. The first has the
least latency and half the bandwidth, the last the most of both. With n devices on h hosts, L and N the latency of a step inside a host and
between hosts, and c that of a call, the latency is

- ring: c + 2(n-h) L + 2(h-1) N;
- tree: c + 2((n/h - 1) L + floor(log2 h) N);
- NVLS: c + L; NVLS tree: c + L + 2 floor(log2 h) N.

Bytes take as long as on the busiest link (``loads``), at its effective bandwidth, times the share of it that the protocol reaches; with LL
at least what 2(n-1)/n of them take at its limit. Through NVLink SHARP
2(n-1)/n of them take as long as at the switch's bus bandwidth, and no less than a device's link takes for what it carries, (1 + 1/n).

All-gathers and reduce-scatters of equal parts take one turn of the ring instead of two: half of its steps, half of its bytes, at the same
bandwidth (``nsteps``, ``nInterSteps`` and ``ratio`` in ``ncclTopoTuneModel``); the plateau of its latency is all-reduces' alone
(``ncclTopoGetAlgoTime``). Trees do not do them. NVLS over several hosts takes switches in the network that add (``collNetSupport``), and on
one host NCCL expects less of it than of the ring: 0.85 (n-1)/n of the link's bandwidth. PAT is for one GPU on each host, and is left out.

On measured links there are no protocols: steps have the measured latencies, times a measured factor, and bytes the measured bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from soap.cluster.interconnects import Interconnect, Library, interconnects, library, unnamed
from soap.cluster.topology import Topology
from soap.simulator.communication.algorithms import Algorithm, AllReduceOption, by_host, steps, undominated
from soap.simulator.communication.loads import latency_seconds, loads, step_shares
from soap.simulator.communication.ring_orders import Orders, ring_orders

SIMPLE, LL = "Simple", "LL"


def nccl_algorithms(topology: Topology, devices: Sequence[int]) -> tuple[Algorithm, ...]:
    """What NCCL has for these GPUs. NVLink SHARP needs a switch that adds, and two devices on each host."""
    groups = _groups(topology, devices)
    found = (Algorithm.RING, Algorithm.TREE)
    if topology.has_measured_links or any(_sharp_bandwidth(topology, own) is None for own in groups):
        return found
    return (*found, Algorithm.NVLS if len(groups) == 1 else Algorithm.NVLS_TREE)


def nccl_options(topology: Topology, devices: Sequence[int]) -> tuple[AllReduceOption, ...]:
    """The algorithms and protocols that are the fastest for some number of bytes."""
    members = sorted(set(devices))
    if len(members) < 2:
        return (AllReduceOption(Algorithm.RING, 0.0, 0.0, ()),)
    sums = _Sums.of(topology, members)
    found = [option for algorithm in nccl_algorithms(topology, members) for option in sums.options(algorithm)]
    return undominated(found)


def nccl_parted_options(topology: Topology, devices: Sequence[int]) -> tuple[AllReduceOption, ...]:
    """The same for an all-gather, or a reduce-scatter, of equal parts over several GPUs. Bytes are those of all parts."""
    return undominated(_Sums.of(topology, sorted(set(devices)), turns=1).options(Algorithm.RING))


@dataclass(frozen=True)
class _Way:
    """Steps inside hosts, or between them: the slowest interconnects that they use, and how much longer than for these, or how long by
    itself (``route_seconds``), a message takes."""

    kinds: tuple[Interconnect, ...]
    route_seconds: float

    @property
    def longer_seconds(self) -> float:
        return max(0.0, self.route_seconds - max(kind.latency_seconds for kind in self.kinds))


@dataclass(frozen=True)
class _Sums:
    """All-reduces over one group. ``inside``, ``across``: steps inside hosts and between them, None if there are none. ``turns``: how often
    the bytes go round a ring, 1 for all-gathers and reduce-scatters, which know no other algorithm."""

    topology: Topology
    groups: list[list[int]]
    orders: Orders
    hosts: Mapping[int, int]
    inside: _Way | None
    across: _Way | None
    library: Library
    turns: int = 2

    @staticmethod
    def of(topology: Topology, members: Sequence[int], turns: int = 2) -> _Sums:
        hosts = {device: topology.devices[device].host for device in members}
        orders, groups = ring_orders(topology, members), _groups(topology, members)
        hops = [hop for step in steps(Algorithm.RING, members, orders)[:1] for hop in step.hops]
        near = [(a, b) for a, b in hops if hosts[a] == hosts[b]]
        far = [(a, b) for a, b in hops if hosts[a] != hosts[b]]
        return _Sums(
            topology,
            groups,
            orders,
            hosts,
            _way(topology, near, across=False) if near else None,
            _way(topology, far, across=True) if far else None,
            library(topology.gpu_library),
            turns,
        )

    @property
    def count(self) -> int:
        return len(self.hosts)

    @property
    def bus_share(self) -> float:
        """Bus bandwidth is this many times the bytes, by the time."""
        return self.turns * (self.count - 1) / self.count

    def options(self, algorithm: Algorithm) -> list[AllReduceOption]:
        todo = steps(algorithm, sorted(self.hosts), self.orders, self.hosts)
        todo = todo[: self.turns] if algorithm is Algorithm.RING else todo
        shares, parts = step_shares(self.topology, todo, self.topology.direct_links)
        links = tuple(shares)
        if self.topology.has_measured_links:
            factor = self.topology.latency_factor.of_all_reduce(self.count)
            latency = self._steps_seconds(algorithm, self._route(self.inside), self._route(self.across)) * factor
            return [AllReduceOption(algorithm, latency, self._busiest(shares, parts, algorithm), links)]
        several = "one host" if self.across is None else "several hosts"
        busiest = self._busiest(shares, parts, algorithm)
        reached = self.library.share[several].get(algorithm.value, {SIMPLE: 1.0} if algorithm is Algorithm.NVLS else {})
        return [
            AllReduceOption(algorithm, self._latency(algorithm, protocol), self._per_byte(protocol, busiest / share), links, protocol)
            for protocol, share in reached.items()
        ]

    def _busiest(self, shares: Mapping[int, int], parts: int, algorithm: Algorithm) -> float:
        """Seconds per byte of the busiest link; through switches that add, of these."""
        bandwidths, sharp = self.topology.effective_bandwidths, algorithm in (Algorithm.NVLS, Algorithm.NVLS_TREE)
        inside = {link for own in self.groups for link in _links_of(self.topology, own)} if sharp else set()
        found = max((share / parts / bandwidths[link] for link, share in shares.items() if link not in inside), default=0.0)
        if not sharp:
            return found
        slowest = min(_sharp_bandwidth(self.topology, own) or 0.0 for own in self.groups)
        rates = {link: self.topology.links[link].bandwidth_bytes_per_second for link in inside & shares.keys()}
        carried = max((shares[link] / parts / rate for link, rate in rates.items()), default=0.0)
        return max(found, carried, self.bus_share / slowest)  # of two or three devices the links decide, not the switch

    def _per_byte(self, protocol: str, seconds: float) -> float:
        if protocol != LL:
            return seconds
        limits = [kind.ll_bytes_per_second for kind in (self.inside.kinds if self.inside and self.across is None else ())]
        if self.across is not None:
            limits.append(self.library.network_ll_bytes_per_second[len(self.groups) > 2])
        return max(seconds, self.bus_share / min(limits))

    def _latency(self, algorithm: Algorithm, protocol: str) -> float:
        known, name = self.library, algorithm.value
        alone = self.inside is None  # a device on each host: what NCCL takes for its rings as well then
        inside = self._step(self.inside, name, protocol)
        across = self._step(self.across, Algorithm.TREE.value if alone and algorithm is Algorithm.RING else name, protocol)
        if algorithm is Algorithm.RING and self.across is not None:
            inside = max(inside, known.post[protocol])
        seconds = known.base[name][protocol] + self._steps_seconds(algorithm, inside, across)
        if algorithm is Algorithm.RING and protocol == SIMPLE and self.across is not None and self.turns > 1:
            own = [kind.plateau for kind in (self.inside.kinds if self.inside else ()) if kind.plateau is not None]
            seconds *= max(own, default=known.plateau)
        return seconds

    def _step(self, way: _Way | None, algorithm: str, protocol: str) -> float:
        if way is None:
            return 0.0
        known = [self.library.hop[kind.medium].get(algorithm, {}).get(protocol, 0.0) for kind in way.kinds]
        return max(known) + way.longer_seconds

    def _steps_seconds(self, algorithm: Algorithm, inside: float, across: float) -> float:
        hosts, most = len(self.groups), max(map(len, self.groups))
        height = hosts.bit_length() - 1
        match algorithm:
            case Algorithm.RING:
                return self.turns * ((self.count - hosts) * inside + (hosts - 1) * across)
            case Algorithm.TREE:
                return 2 * ((most - 1) * inside + height * across)
            case Algorithm.NVLS:
                return inside
            case Algorithm.NVLS_TREE:
                return inside + 2 * height * across

    @staticmethod
    def _route(way: _Way | None) -> float:
        return 0.0 if way is None else way.route_seconds


def _groups(topology: Topology, devices: Sequence[int]) -> list[list[int]]:
    members = sorted(set(devices), key=lambda device: (topology.devices[device].host, device))
    return by_host(members, {device: topology.devices[device].host for device in members})


def _way(topology: Topology, hops: Sequence[tuple[int, int]], *, across: bool) -> _Way:
    """What NCCL takes hops inside a host for, or between hosts. Of the latter it counts no links that are named as those inside."""
    if across and not topology.has_measured_links:
        network = interconnects()["network"]
        routes = ([link for link in topology.route(*hop) if topology.links[link].kind in (None, network)] for hop in hops)
        return _Way((network,), max(latency_seconds(topology, route) for route in routes))
    used = loads(topology, hops, topology.direct_links)
    if across:
        return _Way((interconnects()["network"],), used.latency_seconds)
    links = [topology.links[link] for link in used.crossings]
    kinds = {link.kind or unnamed(link.bandwidth_bytes_per_second) for link in links}
    return _Way(tuple(sorted(kinds, key=lambda kind: kind.name)), used.latency_seconds)


def _links_of(topology: Topology, devices: Sequence[int]) -> set[int]:
    return {link for a, b in zip(devices, (*devices[1:], devices[0]), strict=True) if a != b for link in topology.route(a, b)}


def _sharp_bandwidth(topology: Topology, devices: Sequence[int]) -> float | None:
    """Bus bandwidth through the switch between devices of one host; None if none of it adds."""
    if len(devices) < 2:
        return None
    links = [topology.links[link] for link in _links_of(topology, devices)]
    names = {topology.devices[device].name for device in devices}
    joined = {link.target if link.source in names else link.source for link in links}
    if len(joined) != 1 or joined & names or any(link.kind is None or link.kind.nvls_share is None for link in links):
        return None
    return min(link.bandwidth_bytes_per_second * (link.kind.nvls_share or 0.0) for link in links if link.kind is not None)
