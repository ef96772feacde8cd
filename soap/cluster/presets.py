"""Clusters known by name, and the data of the devices in them.

The figures are in ``soap/profiles/data``. Every number there stands beside its source, as ``{"value": …, "source": …}``, and
assumptions are marked as such. A family's names say how large clusters are: ``h100-8`` is one host with 8 devices, ``h100-4x8`` four such
hosts, ``piz-daint-16`` sixteen hosts of a family whose hosts have one device. Its data: ``type`` of the devices, ``most_devices`` of a
host, ``host`` as in a cluster description, and the ``network``, if it is known what joins such hosts. On a network of kind ``rails`` each
device has a NIC, or each ``devices_per_nic``, and NICs of the same place share a rail. ``local:N`` and ``emulated:HxD@RATE`` are made from
this machine.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from soap.cluster.build import build_cluster, own_types
from soap.cluster.emulated import FAMILY as EMULATED
from soap.cluster.emulated import emulated_topology, parse_emulated
from soap.cluster.fields import Fields
from soap.cluster.topology import Device, DeviceType, Host, Link, Topology
from soap.errors import TopologyError, did_you_mean

LOCAL_BANDWIDTH_BYTES_PER_SECOND = 1e9
"""Between two processes of one machine: gloo over loopback copies through the kernel. A conservative assumption, not measured."""

LOCAL_LATENCY_SECONDS = 50e-6
"""One message between two processes: two system calls and a wake-up, with Python around them. An assumption, not measured."""

MAX_LOCAL_DEVICES = 1024
LOCAL = "local"


def preset_names() -> tuple[str, ...]:
    """The names that ``preset`` accepts. ``local:N`` is N devices, ``emulated:HxD@RATE`` H hosts with D devices each, and so is
    ``h100-[Nx]D``: of one host if N is left out."""
    return (f"{LOCAL}:N", f"{EMULATED}:HxD@RATE", *_data("clusters.json"), *family_names(families()))


def family(name: str) -> str | None:
    """``local`` or ``emulated`` if the name belongs to one of these families, which are made from this machine; else None."""
    first = name.partition(":")[0]
    return first if first in (LOCAL, EMULATED) else None


def says_all(name: str) -> bool:
    """Whether the name is a preset's, so that no file is needed."""
    try:
        sized = parse_family(name, families()) is not None
    except TopologyError:
        sized = False
    return sized or family(name) is not None or name in _data("clusters.json")


def preset(name: str) -> Topology:
    """The cluster of this name; TopologyError that lists all names if there is none."""
    if family(name) == LOCAL:
        return local_topology(_local_count(name, name.partition(":")[2]))
    if family(name) == EMULATED:
        shape = parse_emulated(name, MAX_LOCAL_DEVICES)
        return emulated_topology(shape, local_topology(shape.device_count))
    clusters = _data("clusters.json")
    if name in clusters:
        description = _plain(clusters[name], name)
        description.pop("source")
    elif (sized := parse_family(name, families())) is not None:
        description = describe_family(sized, families())
    else:
        remedy = did_you_mean(name, [*clusters, *largest_hosts(families())]) or ": or give the path of a YAML file"
        raise TopologyError(f"unknown cluster {name!r}; expected one of {', '.join(preset_names())}{remedy}")
    return build_cluster({"name": name, **description}, device_types(), f"preset {name}")


def presets_like(topology: Topology) -> tuple[str, ...]:
    """Names of other presets of as many devices, those of families with as many hosts as here that have some, none of this machine."""
    hosts, count = len({device.host for device in topology.devices}), topology.device_count
    shape = str(count) if hosts in (1, count) else f"{hosts}x{count // hosts}"
    named = [f"{name}-{shape}" for name in families()]
    return tuple(dict.fromkeys(name for name in (*_data("clusters.json"), *named) if name != topology.name and _has(name, topology)))


def _has(name: str, like: Topology) -> bool:
    """Whether there is such a preset, with as many devices."""
    try:
        return preset(name).device_count == like.device_count
    except TopologyError:
        return False


@cache
def device_types() -> Mapping[str, DeviceType]:
    """The devices whose data comes with this package, by name."""
    description = {"device_types": _plain(_data("device_types.json"), "device_types")}
    return MappingProxyType(own_types(Fields(description, "device_types.json: ")))


@cache
def families() -> Mapping[str, Mapping[str, Any]]:
    """The families of presets without the sources beside their numbers."""
    found: dict[str, Mapping[str, Any]] = _plain(_data("cluster_families.json"), "cluster_families")
    return found


def local_topology(
    n: int,
    device_type: DeviceType | None = None,
    bandwidth_bytes_per_second: float | None = None,
    latency_seconds: float | None = None,
) -> Topology:
    """N processes of this machine, each a device, joined by one switch (shared memory or loopback). ``device_type``: what one of N
    processes reaches while all compute, measured or assumed. If it is left out, a conservative core is assumed; if there are more
    processes than cores, each gets a share of one. Bandwidth and latency are those between two processes."""
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_LOCAL_DEVICES:
        raise TopologyError(f"local:{n}: expected a number of devices from 1 to {MAX_LOCAL_DEVICES}, such as 'local:4'")
    cores, memory_bytes = os.cpu_count() or 1, _machine_memory_bytes()
    chosen = device_type or _share_of_machine(n, cores, memory_bytes)
    bandwidth = LOCAL_BANDWIDTH_BYTES_PER_SECOND if bandwidth_bytes_per_second is None else bandwidth_bytes_per_second
    latency = LOCAL_LATENCY_SECONDS if latency_seconds is None else latency_seconds
    prefix = "gpu" if chosen.kind == "cuda" else "cpu"
    devices = tuple(Device(i, f"local/{prefix}{i}", 0, chosen) for i in range(n))
    links: list[Link] = []
    for device in devices if n > 1 else ():
        for source, target in ((device.name, "local/switch"), ("local/switch", device.name)):
            links.append(Link(len(links), f"{source}->{target}", source, target, bandwidth, latency / 2))
    return Topology(f"local:{n}", devices, (Host("local", cores, memory_bytes),), tuple(links), measured=True)


def _local_count(name: str, number: str) -> int:
    plain = number.isascii() and number.isdigit() and len(number) <= 6 and str(int(number)) == number
    if not plain or not 1 <= int(number) <= MAX_LOCAL_DEVICES:
        raise TopologyError(f"cluster {name!r}: {number!r} is no number of devices; expected 1 to {MAX_LOCAL_DEVICES}, such as 'local:4'")
    return int(number)


def _share_of_machine(n: int, cores: int, memory_bytes: int) -> DeviceType:
    core = device_types()["cpu-core"]
    share = min(1.0, cores / n)
    return replace(
        core,
        flops_per_second={dtype: rate * share for dtype, rate in core.flops_per_second.items()},
        memory_bandwidth_bytes_per_second=core.memory_bandwidth_bytes_per_second * share,
        memory_bytes=memory_bytes // n,
    )


def _machine_memory_bytes() -> int:
    """Main memory in whole GiB. The exact figure changes with every kernel, and the topology's hash must not."""
    try:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # this system has no sysconf
        physical = 0
    return max(1, physical // 2**30) * 2**30


@cache
def _data(name: str) -> dict[str, Any]:
    text = files("soap").joinpath("profiles", "data", name).read_text(encoding="utf-8")
    loaded = json.loads(text)
    if not isinstance(loaded, dict):
        raise TopologyError(f"{name}: expected an object by name; reinstall the package")
    return loaded


def _plain(node: Any, path: str) -> Any:
    """The description without the sources beside its numbers. A number without a source is refused."""
    if isinstance(node, dict):
        if "value" in node:
            if set(node) != {"value", "source"} or not str(node["source"]).strip():
                raise TopologyError(f"{path}: a value without its source; expected 'value' and 'source'")
            return node["value"]
        return {key: _plain(item, f"{path}.{key}") for key, item in node.items()}
    if isinstance(node, list):
        return [_plain(item, f"{path}[{i}]") for i, item in enumerate(node)]
    if not isinstance(node, str) or node[:1].isdigit():
        raise TopologyError(f"{path}: {node!r} stands alone; expected 'value' and 'source'")
    return node


MAX_FAMILY_DEVICES = 16384
"""Larger clusters are described in a file; a name with so many is taken for a typing error."""

_SIZE = re.compile(r"(?:([1-9][0-9]{0,8})x)?([1-9][0-9]{0,8})", re.ASCII)

Families = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a name of a family states."""

    family: str
    hosts: int
    devices_per_host: int


def family_names(families: Families) -> tuple[str, ...]:
    """The names of all families as help texts write them: ``h100-[Nx]D`` for N hosts (one, if left out) with D devices each."""
    return tuple(f"{family}-{'N' if _single(data) else '[Nx]D' if 'network' in data else 'D'}" for family, data in families.items())


def largest_hosts(families: Families) -> tuple[str, ...]:
    """Examples: for each family the name of one full host, or of its default."""
    return tuple(family if _single(data) else f"{family}-{data['most_devices']}" for family, data in families.items())


def parse_family(name: str, families: Families) -> Shape | None:
    """What the name states; None if it is of no family. TopologyError in one line if it is, but of an impossible size."""
    if "default_hosts" in families.get(name, {}):
        return Shape(name, families[name]["default_hosts"], 1)
    family = max((one for one in families if name.startswith(f"{one}-")), key=len, default=None)
    if family is None:
        return None
    data = families[family]
    found = _SIZE.fullmatch(name[len(family) + 1 :])
    if found is None or (_single(data) and found[1] is not None):
        raise TopologyError(f"cluster {name!r}: expected {_forms(family, data)}")
    hosts, devices = (int(found[2]), 1) if _single(data) else (int(found[1] or 1), int(found[2]))
    if devices > data["most_devices"]:
        raise TopologyError(
            f"cluster {name!r}: {devices} devices in a host; expected at most {data['most_devices']}: {_forms(family, data)}"
        )
    if hosts * devices > MAX_FAMILY_DEVICES:
        raise TopologyError(f"cluster {name!r}: {hosts * devices} devices; expected at most {MAX_FAMILY_DEVICES}: describe more in a file")
    if hosts > 1 and "network" not in data:
        raise TopologyError(f"cluster {name!r}: what joins such hosts is not known; expected {family}-D, or a file with a network")
    return Shape(family, hosts, devices)


def describe_family(shape: Shape, families: Families) -> dict[str, Any]:
    """The description of such a cluster, for ``build_cluster``; without a name."""
    data, several = families[shape.family], shape.hosts > 1
    host: dict[str, Any] = {**data["host"], "devices": {"type": data["type"], "count": shape.devices_per_host}}
    if not several:
        return {"hosts": [host]}
    host["count"] = shape.hosts
    network = dict(data["network"])
    each = network.pop("devices_per_nic", 1)
    if network.pop("kind") == "rails":
        places = range(shape.devices_per_host)
        nics = [{"devices": list(places[first : first + each])} for first in places[::each]]
        host["nics"], network["rails"] = (len(nics) if each == 1 else nics), len(nics)
    return {"hosts": [host], "network": network}


def _single(data: Mapping[str, Any]) -> bool:
    """Whether hosts of the family have one device, so that a number is one of hosts."""
    return bool(data["most_devices"] == 1)


def _forms(family: str, data: Mapping[str, Any]) -> str:
    if _single(data):
        return f"{family}-N with N hosts, such as '{family}-16'"
    one = f"{family}-D for one host with D devices, such as '{family}-{data['most_devices']}'"
    return f"{one}, or {family}-NxD for N hosts, such as '{family}-4x{data['most_devices']}'" if "network" in data else one
