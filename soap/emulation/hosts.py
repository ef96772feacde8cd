"""What an emulation limits, read from a topology: each host's ranks, CPU time, and link to the other hosts.

Every host gets one network card into one switch. A cluster whose hosts are joined in another way, which this would not reproduce, is
refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from soap.cluster.emulated import FAMILY as EMULATED
from soap.cluster.emulated import device_cores
from soap.cluster.presets import LOCAL_BANDWIDTH_BYTES_PER_SECOND, family
from soap.cluster.topology import Topology
from soap.errors import RuntimeFailure, SoapWarning
from soap.units import format_rate, format_seconds

MOST_HOSTS = 250
"""At most so many hosts: the addresses of a subnet, without a few."""
HIGHEST_LATENCY_SECONDS = 500e-6
"""A larger latency gives a warning, because predictions would change without it: ten times what a message within one machine takes."""


@dataclass(frozen=True, slots=True)
class Card:
    """One direction of a host's way to the others: a link of the topology by its number, and the lowest rate on that way."""

    link: int
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class HostLimits:
    """One host. ``ranks``: numbers of its devices. ``cores``: CPU time per time of all its ranks, of which each gets an equal part.
    ``sending``, ``receiving``: None without other hosts. ``local_bytes_per_second``: the rate of all traffic between its own ranks;
    None if loopback need not be slowed down."""

    name: str
    ranks: tuple[int, ...]
    cores: float
    sending: Card | None
    receiving: Card | None
    local_bytes_per_second: float | None


def host_limits(topology: Topology, scale: float, cores: int) -> tuple[HostLimits, ...]:
    """The hosts that have devices, in order; rates and CPU time multiplied by ``scale``. ``cores``: those of this machine.
    RuntimeFailure if the cluster cannot be emulated here. A SoapWarning says what will differ from the description."""
    ranks: dict[int, list[int]] = {}
    for device in topology.devices:
        ranks.setdefault(device.host, []).append(device.index)
    if len(ranks) > MOST_HOSTS:
        raise RuntimeFailure(f"cluster {topology.name!r} has {len(ranks)} hosts; expected at most {MOST_HOSTS} to emulate")
    cards = {host: _cards(topology, host, own) for host, own in ranks.items()} if len(ranks) > 1 else {}
    _check_routes(topology, cards)
    shares = _cpu_shares(topology, {host: len(own) for host, own in ranks.items()}, scale, cores)
    found = []
    for host, own in sorted(ranks.items()):
        sending, receiving = cards.get(host, (None, None))
        local = _local_rate(topology, own, scale)
        name = topology.hosts[host].name
        found.append(HostLimits(name, tuple(own), shares[host], _scaled(sending, scale), _scaled(receiving, scale), local))
    _warn(topology, found)
    return tuple(found)


def _scaled(card: Card | None, scale: float) -> Card | None:
    return None if card is None else Card(card.link, card.bytes_per_second * scale)


def _cards(topology: Topology, host: int, own: list[int]) -> tuple[Card, Card]:
    """The links that all routes out of a host have in common, and those that all routes into it have."""
    others = [device.index for device in topology.devices if device.host != host]
    leaving = _common(topology.route(i, j) for i in own for j in others)
    entering = _common(topology.route(j, i) for i in own for j in others)
    if not leaving or not entering:
        raise RuntimeFailure(
            f"host {topology.hosts[host].name!r} of cluster {topology.name!r} reaches the others by several links; "
            "expected one network card per host, as 'network:' in a cluster.yaml makes: only that can be emulated"
        )
    return _card(topology, leaving, leaving[0]), _card(topology, entering, entering[-1])


def _common(routes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Links that are on all routes, in the order of the first."""
    first, *rest = routes
    shared = set(first).intersection(*rest)
    return tuple(link for link in first if link in shared)


def _card(topology: Topology, links: tuple[int, ...], at_host: int) -> Card:
    return Card(at_host, min(topology.links[link].bandwidth_bytes_per_second for link in links))


def _check_routes(topology: Topology, cards: dict[int, tuple[Card, Card]]) -> None:
    """RuntimeFailure if something between two hosts is slower than both cards."""
    for a in topology.devices if cards else ():
        for b in topology.devices:
            if a.host == b.host:
                continue
            narrow = min(topology.links[link].bandwidth_bytes_per_second for link in topology.route(a.index, b.index))
            card = min(cards[a.host][0].bytes_per_second, cards[b.host][1].bytes_per_second)
            if narrow < card * (1 - 1e-9):
                raise RuntimeFailure(
                    f"{a.name!r} to {b.name!r} on cluster {topology.name!r}: {format_rate(narrow)}, but the hosts' cards have "
                    f"{format_rate(card)}; expected nothing slower between two hosts than their cards: only those can be emulated"
                )


def _cpu_shares(topology: Topology, devices: dict[int, int], scale: float, cores: int) -> dict[int, float]:
    """Cores by host. Devices measured on this machine share its cores; otherwise a host's cores are cores of this machine."""
    if topology.measured:
        each = device_cores(cores, topology.device_count) if family(topology.name) == EMULATED else cores / topology.device_count
        return {host: each * count * scale for host, count in devices.items()}
    wanted = sum(topology.hosts[host].cpu_cores for host in devices)
    if wanted * scale > cores * (1 + 1e-9):
        raise RuntimeFailure(
            f"the hosts of cluster {topology.name!r} have {wanted} CPU cores in all, times {scale:g}; this machine has {cores}: "
            f"use --emulate-scale {_rounded_down(cores / wanted)} or less, which shrinks rates and CPU time alike"
        )
    return {host: topology.hosts[host].cpu_cores * scale for host in devices}


def _rounded_down(value: float) -> str:
    for digits in range(3, 9):
        rounded = int(value * 10**digits) / 10**digits
        if rounded > 0:
            return f"{rounded:g}"
    return f"{value:g}"


def _local_rate(topology: Topology, own: list[int], scale: float) -> float | None:
    """Rate of a host's loopback. All its ranks share it, so it gets the rate of one pair times the number of ranks, as in a ring of
    them."""
    if len(own) == 1 or topology.measured:  # a measured link is loopback already
        return None
    slowest = min(topology.links[link].bandwidth_bytes_per_second for i in own for j in own for link in topology.route(i, j))
    return None if slowest * scale >= LOCAL_BANDWIDTH_BYTES_PER_SECOND else slowest * scale * len(own)


def _warn(topology: Topology, hosts: list[HostLimits]) -> None:
    latency = max((topology.route_latency_seconds(0, rank) for host in hosts[1:] for rank in host.ranks), default=0.0)
    if latency > HIGHEST_LATENCY_SECONDS and not topology.measured:
        _say(f"cluster {topology.name!r}: a latency of {format_seconds(latency)} between hosts is not emulated; rates are")
    fastest = max((host.sending.bytes_per_second for host in hosts if host.sending is not None), default=0.0)
    if fastest > LOCAL_BANDWIDTH_BYTES_PER_SECOND:
        _say(
            f"cluster {topology.name!r}: links of {format_rate(fastest)} are more than processes of one machine reach, "
            f"about {format_rate(LOCAL_BANDWIDTH_BYTES_PER_SECOND)}; a smaller --emulate-scale brings them below it"
        )


def _say(text: str) -> None:
    warnings.warn(text, SoapWarning, stacklevel=4)
