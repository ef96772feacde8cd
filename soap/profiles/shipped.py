"""Measurements that come with this package, for the devices of presets: used for what the user has not measured on such a device.

A preset's device type (``h200``) is the device that was measured (``NVIDIA H200``) if that name is known to be its (``known_gpu``), and if
its figures are the package's own. They were measured under another version of torch than the user's, perhaps, and say so. What launching
took is left out: that is work of the processor beside the device, and clusters of which no measurements come along know no launches either.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

from soap.cluster.kinds import known_gpu
from soap.cluster.presets import device_types
from soap.cluster.topology import DeviceType, Topology
from soap.profiles.entries import Entry, decode
from soap.profiles.exchange import shipped_profiles
from soap.profiles.keys import VERSIONS, Environment


def shipped_entries(topology: Topology) -> dict[str, tuple[Environment, tuple[Entry, ...]]]:
    """Device type's name -> where it was measured, and the measurements; without types of which none come along."""
    if topology.measured:  # this machine: what was measured on another one says nothing of its processor
        return {}
    kinds = {device.type.name: device.type for device in topology.devices}
    found = {name: _measured_as(kind) for name, kind in kinds.items()}
    return {name: own for name, own in found.items() if own is not None}


def _measured_as(kind: DeviceType) -> tuple[Environment, tuple[Entry, ...]] | None:
    if device_types().get(kind.name) != kind:
        return None
    return next((own for own in _all() if known_gpu(own[0].device, device_types()) == kind.name), None)


@cache
def _all() -> tuple[tuple[Environment, tuple[Entry, ...]], ...]:
    found = []
    for path in shipped_profiles().values():
        for profile in json.loads(path.read_text("utf-8"))["profiles"]:
            environment = Environment(**profile["environment"])
            if environment.version == VERSIONS[environment.kind]:
                found.append((environment, tuple(replace(decode(entry), launch_ns=None) for entry in profile["entries"])))
    return tuple(found)
