"""From the description of a cluster (nested mappings, see ``yaml_file``) to a ``Topology``: hosts are unrolled and wired.

Node names: devices ``HOST/gpu0`` or ``HOST/cpu0``, a host's switch ``HOST/switch``, its NICs that serve several devices ``HOST/nic0``; the
switch between hosts ``network``, or ``network/rail0``, … and ``network/spine`` (``nics``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import permutations

from soap.cluster.fields import Fields
from soap.cluster.interconnects import interconnects
from soap.cluster.memory_budget import left_by_process
from soap.cluster.price import CURRENCY, PRICE, read_price
from soap.cluster.topology import DEVICE_KINDS, Device, DeviceType, Host, Link, Topology
from soap.errors import TopologyError, did_you_mean

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


MESH = "mesh"
"""The kind of such wiring in a cluster description."""

MOST_LINKS = 64
"""Between two devices; more is taken for a typing error."""


def joined_pairs(intra: Fields, count: int) -> list[tuple[int, int, int]]:
    """Read ``joined``: (place in the host, another place, number of links between them), first place < second. Pairs of places beyond the
    host's devices are left out, so that one description serves smaller hosts. TopologyError for a pair that is joined twice."""
    found: dict[tuple[int, int], int] = {}
    for item, path in intra.items("joined", required=True):
        if not isinstance(item, list) or len(item) not in (2, 3) or not all(type(x) is int for x in item):
            raise TopologyError(f"{path}: {item!r:.60}; expected two places in the host, and the number of links if it is not 1: [0, 3, 2]")
        (first, second), links = sorted(item[:2]), item[2] if len(item) == 3 else 1
        if first < 0 or first == second or not 1 <= links <= MOST_LINKS:
            raise TopologyError(f"{path}: {item!r:.60}; expected two different places from 0 on, and 1 to {MOST_LINKS} links")
        if (first, second) in found:
            raise TopologyError(f"{path}: devices {first} and {second} are joined above; expected each pair once, with its number of links")
        found[first, second] = links
    return [(first, second, links) for (first, second), links in sorted(found.items()) if second < count]


CLUSTER_KEYS = ("name", "device_types", "hosts", "network", "switches", "links", PRICE, CURRENCY)
TOTAL_MEMORY = "total_memory"
TYPE_KEYS = ("kind", "flops", "memory_bandwidth", "memory", TOTAL_MEMORY, "kernel_overhead", "source")
SERVER = "server"
HOST_KEYS = ("name", "count", "devices", "cpu_cores", "memory", "links", "nics", SERVER, PRICE)
LINK_KEYS = ("name", "from", "to", "bandwidth", "latency", "duplex", INTERCONNECT)
INTRA_KINDS = ("switch", "full", "ring", "pairs", MESH)
DTYPES = (
    "float64", "float32", "tf32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "complex64", "complex128",
    "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
"""Names under which a compute rate may be given: torch's, without the prefix, and ``tf32``: products of float32 matrices that tensor cores
make of rounded operands."""

SHORT_DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}
"""How data sheets write some of them."""

MAX_DEVICES = 65536
MAX_FULL_MESH = 256
"""A count above one of these is taken for a typing error: a full mesh has n² links."""


def build_cluster(description: object, known_types: Mapping[str, DeviceType], where: str) -> Topology:
    """Make the topology that a description states. ``where`` (a file's or a preset's name) begins every error message."""
    try:
        fields = Fields(description, f"{where}: ", CLUSTER_KEYS)
        wiring = _Wiring(fields, {**known_types, **own_types(fields)})
        for item, path in fields.items("hosts", required=True):
            wiring.add_hosts(Fields(item, path, HOST_KEYS))
        wiring.add_spine()
        wiring.add_free_links()
        parts = tuple(wiring.devices), tuple(wiring.hosts), tuple(wiring.links)
        return Topology(fields.text("name", "cluster"), *parts, price=read_price(fields))
    except TopologyError as error:  # these errors come from the topology itself, which does not know the file
        raise TopologyError(str(error) if str(error).startswith(f"{where}: ") else f"{where}: {error}") from None


def own_types(fields: Fields) -> dict[str, DeviceType]:
    """Read the device types that a description defines."""
    if "device_types" not in fields:
        return {}
    section = fields.section("device_types")
    return {name: device_type(name, section.section(name, TYPE_KEYS)) for name in section.keys}


def device_type(name: str, fields: Fields) -> DeviceType:
    """Read one device type from its figures with units."""
    given = fields.value("flops")
    for short in [key for key in given if key in SHORT_DTYPES] if isinstance(given, dict) else []:
        meant = SHORT_DTYPES[short]
        raise TopologyError(f"{fields.at('flops')}.{short}: unknown key; expected torch's name of the type: write {meant!r}")
    rates = fields.section("flops", DTYPES)
    if "float32" not in rates:
        raise TopologyError(f"{rates.at('float32')}: missing; expected a compute rate such as '9.3 TFLOP/s': other dtypes fall back to it")
    kind = fields.choice("kind", DEVICE_KINDS)
    if "memory" in fields and TOTAL_MEMORY in fields:
        raise TopologyError(f"{fields.at(TOTAL_MEMORY)}: there is also memory; expected what plans may use, or what the driver reports")
    return DeviceType(
        name=name,
        kind="cuda" if kind == "cuda" else "cpu",
        flops_per_second={dtype: rates.flops(dtype) for dtype in rates.keys},
        memory_bandwidth_bytes_per_second=fields.bandwidth("memory_bandwidth"),
        memory_bytes=left_by_process(fields.size_bytes(TOTAL_MEMORY)) if TOTAL_MEMORY in fields else fields.size_bytes("memory"),
        kernel_seconds=fields.seconds("kernel_overhead"),
        source=fields.text("source", "given in the cluster description"),
    )


class _Wiring:
    """Collects hosts, devices and links while a description is read."""

    def __init__(self, fields: Fields, types: Mapping[str, DeviceType]) -> None:
        self.fields, self.types = fields, types
        self.hosts: list[Host] = []
        self.devices: list[Device] = []
        self.links: list[Link] = []
        self.network: Network | None = read_network(fields) if "network" in fields else None
        self.on_rails: list[tuple[int, str]] = []

    def add_hosts(self, fields: Fields) -> None:
        base, count = fields.text("name", "host"), fields.whole("count", 1, most=MAX_DEVICES)
        numbered = "count" in fields or "name" not in fields
        for number in range(count):
            name = f"{base}{number}" if numbered else base
            memory_bytes = fields.size_bytes("memory") if "memory" in fields else None
            self.hosts.append(Host(name, fields.whole("cpu_cores"), memory_bytes, server=fields.flag(SERVER, False)))
            names = self._add_devices(fields, name)
            self._wire_host(fields, name, names)

    def _add_devices(self, fields: Fields, host: str) -> list[str]:
        """Read devices given by type and count, or one by one with names of their own."""
        if isinstance(fields.value("devices"), list):
            listed = [Fields(item, path, ("name", "type")) for item, path in fields.items("devices")]
            named = [(one.text("name"), self._type(one)) for one in listed]
        else:
            section = fields.section("devices", ("type", "count"))
            chosen, count = self._type(section), section.whole("count", 1, most=MAX_DEVICES)
            prefix = "gpu" if chosen.kind == "cuda" else "cpu"
            named = [(f"{host}/{prefix}{i}", chosen) for i in range(count)]
        if len(self.devices) + len(named) > MAX_DEVICES:
            raise TopologyError(f"{fields.at('devices')}: more than {MAX_DEVICES} devices in all; lower the counts")
        self.devices += [Device(len(self.devices) + i, name, len(self.hosts) - 1, chosen) for i, (name, chosen) in enumerate(named)]
        return [name for name, _ in named]

    def _type(self, fields: Fields) -> DeviceType:
        name = fields.text("type")
        if name not in self.types:
            known, near = ", ".join(sorted(self.types)), did_you_mean(name, self.types)
            remedy = f"{near} Else add it to device_types" if near else ": or add it to device_types"
            raise TopologyError(f"{fields.at('type')}: unknown device type {name!r}; expected one of {known}{remedy}")
        return self.types[name]

    def _wire_host(self, fields: Fields, host: str, names: list[str]) -> None:
        """Add the links inside the host, and its NICs. A switch's latency is given from end to end: each of the two links gets half."""
        hub = f"{host}/switch"
        nics = read_nics(fields, len(names), self.network)
        if "links" in fields:
            section = fields.section("links", ("intra", "host"))
            self._wire_inside(section, hub, names, has_nics=nics is not None)
        elif nics is None and self.network is not None and len(names) == 1:
            hub = names[0]  # a single device sits at the NIC itself
        elif nics is None and self.network is not None and names:
            raise TopologyError(f"{fields.at('links')}: missing; expected links.intra, by which {len(names)} devices reach the network")
        if nics is not None and self.network is not None:
            self._wire_nics(self.network, host, names, nics)
        elif self.network is not None and names:
            way = self.network.way
            self._add_pair(hub, NETWORK, way.bandwidth_bytes_per_second, way.latency_seconds / 2, way.interconnect)

    def _wire_nics(self, network: Network, host: str, names: list[str], nics: tuple[Nic, ...]) -> None:
        """Add each NIC's link to its switch. A device with a NIC of its own sits at it; others reach theirs at its bandwidth. These links
        come after those inside the host: of equally fast ways to another rail, routes take the one whose first hop is inside the host
        (as NCCL's PXN), because its links have lower numbers."""
        for number, nic in enumerate(nics):
            card = names[nic.devices[0]] if len(nic.devices) == 1 else f"{host}/nic{number}"
            for place in nic.devices if len(nic.devices) > 1 else ():
                self._add_pair(names[place], card, nic.way.bandwidth_bytes_per_second, 0.0, nic.way.interconnect)
            way, switch = nic.way, network.switch(nic.rail)
            self._add_pair(card, switch, way.bandwidth_bytes_per_second, way.latency_seconds / 2, way.interconnect)
            self.on_rails += [(nic.rail, host)] if nic.rail is not None else []

    def add_spine(self) -> None:
        """Check that each rail joins hosts, and add the links between rails."""
        network = self.network
        if network is None:
            return
        network.check_rails(self.on_rails)
        if (spine := network.spine) is not None:
            for rail in range(network.rails or 0):
                ends = network.switch(rail), network.spine_switch
                self._add_pair(*ends, spine.bandwidth_bytes_per_second, spine.latency_seconds / 2, spine.interconnect)

    def _wire_inside(self, section: Fields, hub: str, names: list[str], *, has_nics: bool) -> None:
        intra = section.section("intra", ("bandwidth", "latency", "kind", "joined", INTERCONNECT))
        kind = intra.choice("kind", INTRA_KINDS, "switch")
        bandwidth, latency, made_of = intra.bandwidth("bandwidth"), intra.seconds("latency"), interconnect_of(intra)
        if "joined" in intra and kind != MESH:
            raise TopologyError(f"{intra.at('joined')}: not used with kind {kind!r}; remove it or write 'kind: {MESH}'")
        if kind == "switch":
            self._star(hub, names, bandwidth, latency / 2, made_of)
        elif kind == "pairs":
            self._pairs(hub, names, bandwidth, latency / 2, made_of)
        else:
            self._direct(intra, kind, names, bandwidth, latency, made_of)
        if "host" in section and has_nics:
            raise TopologyError(f"{section.at('host')}: not used with nics, at which the devices sit; remove it")
        if "host" in section and kind in ("switch", "pairs"):
            raise TopologyError(f"{section.at('host')}: not used with kind {kind!r}, whose switch has the network card; remove it")
        if kind in ("full", "ring", MESH) and not has_nics and (self.network is not None or "host" in section):
            if "host" in section:
                to_card = section.section("host", ("bandwidth", "latency", INTERCONNECT))
                bandwidth, latency, made_of = to_card.bandwidth("bandwidth"), 2 * to_card.seconds("latency"), interconnect_of(to_card)
            self._star(hub, names, bandwidth, latency / 2, made_of)

    def _star(self, hub: str, names: list[str], bandwidth: float, latency: float, made_of: str) -> None:
        for name in names:
            self._add_pair(name, hub, bandwidth, latency, made_of)

    def _pairs(self, hub: str, names: list[str], bandwidth: float, latency: float, made_of: str) -> None:
        """Give each pair of neighbours a switch of their own (a PCIe tree), so that their messages do not load the host's switch."""
        for first in range(0, len(names), 2):
            local = f"{hub}{first // 2}"
            self._star(local, names[first : first + 2], bandwidth, latency, made_of)
            self._add_pair(local, hub, bandwidth, latency, made_of)

    def _direct(self, intra: Fields, kind: str, names: list[str], bandwidth: float, latency: float, made_of: str) -> None:
        if kind == MESH:
            for one, other, count in joined_pairs(intra, len(names)):
                self._add_pair(names[one], names[other], count * bandwidth, latency, made_of)
            return
        if kind == "full" and len(names) > MAX_FULL_MESH:
            raise TopologyError(f"{intra.at('kind')}: a full mesh of {len(names)} devices; expected at most {MAX_FULL_MESH}: use switch")
        count = len(names)
        ring = {(i, (i + step) % count) for i in range(count) for step in (1, -1) if count > 1}
        for i, j in sorted(ring) if kind == "ring" else permutations(range(count), 2):
            self._add(names[i], names[j], bandwidth, latency, made_of)

    def add_free_links(self) -> None:
        """Add the links that the description lists one by one, between devices, declared switches and the switches made here."""
        nodes = {device.name for device in self.devices} | {end for link in self.links for end in (link.source, link.target)}
        for item, path in self.fields.items("switches"):
            if not isinstance(item, str) or not item or item in nodes:
                raise TopologyError(f"{path}: {item!r}; expected the name of a further switch, used by nothing else")
            nodes.add(item)
        for item, path in self.fields.items("links"):
            link = Fields(item, path, LINK_KEYS)
            for end in ("from", "to"):
                if link.text(end) not in nodes:
                    raise TopologyError(f"{link.at(end)}: unknown node {link.text(end)!r}; expected a device or a listed switch")
            source, target = link.text("from"), link.text("to")
            bandwidth, latency, made_of = link.bandwidth("bandwidth"), link.seconds("latency"), interconnect_of(link)
            self._add(source, target, bandwidth, latency, made_of, link.text("name", f"{source}->{target}"))
            if link.flag("duplex", True):
                back = f"{link.text('name')} back" if "name" in link else f"{target}->{source}"
                self._add(target, source, bandwidth, latency, made_of, back)

    def _add_pair(self, a: str, b: str, bandwidth: float, latency: float, made_of: str) -> None:
        self._add(a, b, bandwidth, latency, made_of)
        self._add(b, a, bandwidth, latency, made_of)

    def _add(self, source: str, target: str, bandwidth: float, latency: float, made_of: str, name: str | None = None) -> None:
        self.links.append(Link(len(self.links), name or f"{source}->{target}", source, target, bandwidth, latency, made_of))
