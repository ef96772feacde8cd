"""Network cards (NICs) of hosts and what joins the hosts: one switch, or *rails*. NIC i of every host leads to switch i, its rail, so that
devices with the same place in their hosts talk without meeting others' messages. A *spine* may join the rails."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from soap.cluster.fields import Fields
from soap.cluster.interconnects import interconnects
from soap.errors import TopologyError

NETWORK = "network"
MAX_RAILS = 1024
INTERCONNECT = "interconnect"
NIC_KEYS = ("devices", "rail", "bandwidth", "latency")


@dataclass(frozen=True, slots=True)
class Way:
    """A bandwidth per direction, and a latency from end to end. ``interconnect``: see ``Link``."""

    bandwidth_bytes_per_second: float
    latency_seconds: float
    interconnect: str = ""


@dataclass(frozen=True, slots=True)
class Network:
    """What joins the hosts. ``way``: that of a NIC to another host, if the NIC says nothing else. ``rails``: how many there are, None if
    one switch joins all. ``spine``: from one rail's switch to another's; None if rails are apart."""

    path: str
    way: Way
    rails: int | None
    spine: Way | None

    def switch(self, rail: int | None) -> str:
        """Name of the switch that NICs of this rail lead to."""
        return NETWORK if rail is None else f"{NETWORK}/rail{rail}"

    @property
    def spine_switch(self) -> str:
        """Name of the switch that joins the rails."""
        return f"{NETWORK}/spine"

    def check_rails(self, joined: Iterable[tuple[int, str]]) -> None:
        """TopologyError if some rail leads nowhere. ``joined``: (rail, name of a host whose NIC leads to it)."""
        hosts: dict[int, set[str]] = {rail: set() for rail in range(self.rails or 0)}
        for rail, host in joined:
            hosts[rail].add(host)
        for rail, names in hosts.items():
            if not names:
                raise TopologyError(f"{self.path}.rails: rail {rail} joins no host; expected a NIC on each rail: lower the number of rails")
            if len(names) == 1 and self.spine is None:
                raise TopologyError(
                    f"{self.path}.rails: rail {rail} leads nowhere, since {next(iter(names))!r} alone has a NIC on it; "
                    "expected two hosts on each rail: correct their nics, or add network.spine"
                )


@dataclass(frozen=True, slots=True)
class Nic:
    """One NIC of a host. ``devices``: places in the host of those that it serves. ``rail``: None on a network of one switch."""

    devices: tuple[int, ...]
    rail: int | None
    way: Way


def read_network(fields: Fields) -> Network:
    """Read ``network``, a section of a cluster description."""
    network = fields.section("network", ("bandwidth", "latency", "kind", "rails", "spine", INTERCONNECT))
    network.choice("kind", ("switch",), "switch")
    rails = network.whole("rails", most=MAX_RAILS) if "rails" in network else None
    if "spine" in network and rails is None:
        raise TopologyError(f"{network.at('spine')}: not used without rails, which it joins; remove it or add network.rails")
    made_of = interconnect_of(network)
    spine = replace(_way(network.section("spine", ("bandwidth", "latency"))), interconnect=made_of) if "spine" in network else None
    return Network(network.path, replace(_way(network), interconnect=made_of), rails, spine)


def read_nics(host: Fields, device_count: int, network: Network | None) -> tuple[Nic, ...] | None:
    """Read ``nics`` of a host with so many devices; None if it says nothing: its devices then share one way to the network. TopologyError
    if a NIC serves a device that is not there, two NICs serve one, or a rail is not there."""
    if not device_count:
        return None
    if "nics" not in host:
        if network is not None and network.rails is not None:
            raise TopologyError(f"{host.at('nics')}: missing; expected the host's NICs, which network.rails joins: write such as 'nics: 8'")
        return None
    if network is None:
        raise TopologyError(f"{host.at('nics')}: not used without a network; remove it or add network")
    if not isinstance(host.value("nics"), list):
        return _equal_nics(host, device_count, network)
    nics = tuple(_listed_nic(item, path, i, device_count, network) for i, (item, path) in enumerate(host.items("nics", required=True)))
    serving: dict[int, int] = {}
    for number, nic in enumerate(nics):
        for device in nic.devices:
            other = serving.setdefault(device, number)
            if other != number or nic.devices.count(device) > 1:
                raise TopologyError(
                    f"{host.at('nics')}[{number}].devices: device {device} is served by nics[{other}] already; expected one NIC per device"
                )
    return nics


def _equal_nics(host: Fields, device_count: int, network: Network) -> tuple[Nic, ...]:
    """So many equal NICs, which serve equal parts of the devices, in order."""
    if isinstance(host.value("nics"), dict):
        section = host.section("nics", ("count", "bandwidth", "latency"))
        count, path, way = section.whole("count", device_count), section.at("count"), _way(section, network.way)
    else:
        count, path, way = host.whole("nics"), host.at("nics"), network.way
    if device_count % count:
        raise TopologyError(f"{path}: {count} NICs for {device_count} devices; expected equal parts: list the NICs with their devices")
    each = device_count // count
    rails = [_rail(i, path, network) if network.rails is not None else None for i in range(count)]
    return tuple(Nic(tuple(range(i * each, (i + 1) * each)), rail, way) for i, rail in enumerate(rails))


def _listed_nic(item: object, path: str, number: int, device_count: int, network: Network) -> Nic:
    nic = Fields(item, path, NIC_KEYS)
    devices = tuple(_device(one, where, device_count) for one, where in nic.items("devices", required=True))
    if network.rails is None and "rail" in nic:
        raise TopologyError(f"{nic.at('rail')}: not used on a network without rails; remove it or add network.rails")
    rail = None if network.rails is None else _rail(nic.value("rail") if "rail" in nic else number, nic.at("rail"), network)
    return Nic(devices, rail, _way(nic, network.way))


def _device(value: object, path: str, count: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise TopologyError(f"{path}: {value!r:.60}; expected the place of a device in its host, from 0 to {count - 1}")
    return value


def _rail(value: object, path: str, network: Network) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < (network.rails or 0):
        most = (network.rails or 0) - 1
        raise TopologyError(f"{path}: there is no rail {value!r:.60}; expected 0 to {most}: raise network.rails, or lead the NIC elsewhere")
    return value


def _way(fields: Fields, given: Way | None = None) -> Way:
    """Bandwidth and latency of a section; those of ``given`` where it has none."""
    bandwidth = fields.bandwidth("bandwidth") if given is None or "bandwidth" in fields else given.bandwidth_bytes_per_second
    latency = fields.seconds("latency") if given is None or "latency" in fields else given.latency_seconds
    return Way(bandwidth, latency, "" if given is None else given.interconnect)


def interconnect_of(fields: Fields) -> str:
    """What links are made of, if a section says so; else nothing."""
    return fields.choice(INTERCONNECT, tuple(interconnects())) if INTERCONNECT in fields else ""
