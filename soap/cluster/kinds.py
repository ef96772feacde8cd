"""Clusters whose devices are of several kinds or types: what may be said of all of them at once."""

from __future__ import annotations

from soap.cluster.topology import DeviceKind, DeviceType, Topology
from soap.errors import TopologyError, asked


def run_kind(topology: Topology) -> DeviceKind:
    """The kind of all devices, by which a run opens its ranks; TopologyError in one line if there are CPUs and GPUs among them."""
    kinds = {device.type.kind: device for device in topology.devices}
    if len(kinds) > 1:
        names = " and ".join(f"{device.name!r} ({kind})" for kind, device in sorted(kinds.items()))
        raise TopologyError(
            f"cluster {topology.name!r} has {names}; expected devices of one kind to run on: say {asked('device')} cpu, or take those of "
            "one kind"
        )
    return next(iter(kinds))


def has_gpus(topology: Topology) -> bool:
    """Whether any device is a GPU."""
    return any(device.type.kind == "cuda" for device in topology.devices)


def types_of(topology: Topology) -> tuple[DeviceType, ...]:
    """The types of its devices, each once, in the order of devices."""
    return tuple(dict.fromkeys(device.type for device in topology.devices))
