"""``emulated:HxD@RATE``: H hosts with D devices each, all on this machine; ``emulated:HxD+S@RATE``: and S more that are servers. The
devices share this machine's cores, except for a reserve. ``soap-run --emulate`` makes what it describes. The links between hosts have the
rate that the name states; all else is measured on this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from soap.cluster.topology import Device, DeviceType, Host, Link, Topology
from soap.errors import TopologyError
from soap.units import parse_bandwidth

FAMILY = "emulated"
DEFAULT_RATE = "1 Gbit/s"
SWITCH = "network"
REST = 0.25
"""Share of the cores that no device gets. Threads that communicate (``emulation.placement``), the kernel's network and other programs
need it; a device that was promised it would lack it."""
_SHAPE = re.compile(r"emulated:([1-9][0-9]{0,5})x([1-9][0-9]{0,5})(?:\+([1-9][0-9]{0,5}))?(?:@(.*))?")


@dataclass(frozen=True, slots=True)
class EmulatedShape:
    """What the name of an emulated cluster states. ``servers``: of the hosts, the last ones are servers."""

    name: str
    hosts: int
    devices_per_host: int
    bytes_per_second: float
    servers: int = 0

    @property
    def device_count(self) -> int:
        """Devices in all."""
        return self.hosts * self.devices_per_host


def parse_emulated(name: str, most_devices: int) -> EmulatedShape:
    """Parse such a name; TopologyError if it is not of this form."""
    found = _SHAPE.fullmatch(name)
    servers = int(found[3] or 0) if found is not None else 0
    if found is None or (int(found[1]) + servers) * int(found[2]) > most_devices:
        raise TopologyError(
            f"cluster {name!r}: expected emulated:HOSTSxDEVICES or emulated:HOSTSxDEVICES@RATE with at most {most_devices} devices, "
            "such as 'emulated:4x1@200Mbit/s', or 'emulated:4x1+1@200Mbit/s' with a further host that is a server"
        )
    rate = parse_bandwidth(DEFAULT_RATE if found[4] is None else found[4], f"cluster {name!r}: rate")
    return EmulatedShape(name, int(found[1]) + servers, int(found[2]), rate, servers)


def device_cores(cores: int, devices: int) -> float:
    """Cores of this machine that each emulated device gets."""
    return (1 - REST) * cores / devices


def emulated_topology(shape: EmulatedShape, local: Topology) -> Topology:
    """The cluster of this shape, made of the devices of ``local:N`` with as many devices: each has what one of those reaches while all
    work, less the reserve. A message between hosts takes as long as one within the machine, plus its bytes at the stated rate. Of all
    figures only that rate is part of the cluster's identity."""
    device_type, machine = _slowed(local.devices[0].type), local.hosts[0]
    memory = None if machine.memory_bytes is None else max(1, machine.memory_bytes // shape.hosts)
    hosts = [
        Host(f"host{i}", max(1, machine.cpu_cores // shape.hosts), memory, server=i >= shape.hosts - shape.servers)
        for i in range(shape.hosts)
    ]
    devices = [Device(i, f"host{i // shape.devices_per_host}/cpu{i % shape.devices_per_host}", i // shape.devices_per_host, device_type)
               for i in range(shape.device_count)]  # fmt: skip
    links: list[Link] = []
    stated: list[int] = []

    def connect(a: str, b: str, bytes_per_second: float, seconds: float) -> None:
        for source, target in ((a, b), (b, a)):
            links.append(Link(len(links), f"{source}->{target}", source, target, bytes_per_second, seconds))

    for number, host in enumerate(hosts if local.links else ()):
        own = [device.name for device in devices if device.host == number]
        hub, seconds = (own[0], local.links[0].latency_seconds) if len(own) == 1 else (f"{host.name}/switch", 0.0)
        for name in own if hub not in own else ():
            connect(name, hub, local.links[0].bandwidth_bytes_per_second, local.links[0].latency_seconds)
        if shape.hosts > 1:
            stated += [len(links), len(links) + 1]
            connect(hub, SWITCH, shape.bytes_per_second, seconds)
    return Topology(shape.name, tuple(devices), tuple(hosts), tuple(links), measured=True, stated=tuple(stated))


def _slowed(local: DeviceType) -> DeviceType:
    """A process of this machine that gets ``device_cores``. The type has a name of its own, because what is measured on it holds for no
    other."""
    part = 1 - REST
    return replace(
        local,
        name=f"{local.name}, emulated",
        flops_per_second={dtype: rate * part for dtype, rate in local.flops_per_second.items()},
        memory_bandwidth_bytes_per_second=local.memory_bandwidth_bytes_per_second * part,
        kernel_seconds=local.kernel_seconds / part,
    )
