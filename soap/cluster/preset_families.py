"""Presets whose names say how large they are: ``h100-8`` is one host with 8 devices, ``h100-4x8`` four such hosts, ``piz-daint-16`` sixteen
hosts of a family whose hosts have one device.

A family's data: ``type`` of the devices, ``most_devices`` of a host, ``host`` as in a cluster description, and the ``network``, if it is
known what joins such hosts. On a network of kind ``rails`` each device has a NIC, or each ``devices_per_nic``, and NICs of the same place
share a rail.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from soap.errors import TopologyError

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
