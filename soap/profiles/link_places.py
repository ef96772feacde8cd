"""Where links were measured, and how their timings are written as plain JSON values. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from soap.cluster.topology import Topology
from soap.measure.link_probes import MOST_TIMES, LinkTiming, Operation, Probe
from soap.measure.this_machine import cpu_cores, cpu_model
from soap.profiles.keys import digest, torch_version

VERSION = 11
"""Version of the measurement and of its format; part of every place. Since 2 with freed memory kept (``malloc``); since 3 collectives
after a computation, and with ``gloo_threads.calm_gloo``; since 4 emulated hosts' sums are prompt; since 5 with the scale; since 6 the
cold penalty by itself; since 7 devices compute by even time (``reference_work``); since 8 exchanges within steps, cold penalties of three
sizes, and chains that read two values; since 9 with reference work that is the same in all processes; since 10 messages and exchanges of
two sizes within steps, which send the last of theirs while gradients are summed; since 11 emulated hosts have one congestion control."""
MOST_SECONDS = 10**6


@dataclass(frozen=True)
class LinkPlace:
    """A cluster and how its ranks talked. Measurements of another place are never used. ``cluster``: the topology's hash. ``name``: its
    name, for people only. ``devices``: names of its device types. ``machine``: processor and cores of this machine if all hosts are on
    it; otherwise empty, because a described cluster is where its description says. ``emulated``: whether on the hosts that
    ``--emulate`` makes."""

    cluster: str
    name: str = field(compare=False)
    devices: str
    machine: str
    backend: str
    emulated: bool
    torch: str
    version: int = VERSION

    @property
    def hash(self) -> str:
        """Hash of everything except the name: 16 hex digits."""
        return digest({key: value for key, value in asdict(self).items() if key != "name"})

    @property
    def text(self) -> str:
        """The place as one line."""
        on = f" on {self.machine}" if self.machine else ""
        return f"{self.name}{on}{', emulated hosts' if self.emulated else ''}, {self.backend}, torch {self.torch}"


def link_place(topology: Topology, backend: str, *, emulated: bool, torch: str | None = None) -> LinkPlace:
    """The place of a cluster whose ranks talk by this backend (gloo or nccl). ``torch``: the version, if not the installed one."""
    return LinkPlace(
        cluster=topology.hash,
        name=topology.name,
        devices=" + ".join(sorted({device.type.name for device in topology.devices})),
        machine=f"{cpu_model()} with {cpu_cores()} cores" if emulated or topology.measured else "",
        backend=backend,
        emulated=emulated,
        torch=torch_version() if torch is None else torch,
    )


def link_places(topology: Topology) -> list[LinkPlace]:
    """Places whose measurements a plan for this cluster may use, best first: by the backend that its devices take by default, and on
    its own hosts before emulated ones."""
    cuda = topology.devices[0].type.kind == "cuda"
    backends = ("nccl", "gloo") if cuda else ("gloo",)
    return [link_place(topology, backend, emulated=emulated) for emulated in ((False,) if cuda else (False, True)) for backend in backends]


def probe_text(probe: Probe) -> str:
    """The probe as one word."""
    return f"{probe.operation}:{'-'.join(map(str, probe.devices))}:{probe.size_bytes}"


def encode_timing(timing: LinkTiming) -> dict[str, Any]:
    """The timing as plain JSON values, with times in whole nanoseconds, as TIMING_SCHEMA describes them; ``decode_timing`` reads them."""
    return {
        "operation": timing.probe.operation.value,
        "devices": list(timing.probe.devices),
        "size_bytes": timing.probe.size_bytes,
        "times_ns": [max(1, round(1e9 * one)) for one in timing.seconds],
        "cpu_ns": max(0, round(1e9 * timing.cpu_seconds)),
        "measured_at": timing.measured_at,
        "scale": timing.scale,
    }


def decode_timing(record: Mapping[str, Any]) -> LinkTiming:
    """Read a timing from values that TIMING_SCHEMA allows."""
    probe = Probe(Operation(record["operation"]), tuple(record["devices"]), record["size_bytes"])
    return LinkTiming(probe, tuple(one / 1e9 for one in record["times_ns"]), record["cpu_ns"] / 1e9, record["measured_at"], record["scale"])


_LONGEST_NS = MOST_SECONDS * 10**9
_NS: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": _LONGEST_NS}
_PROPERTIES: dict[str, Any] = {
    "operation": {"enum": [operation.value for operation in Operation]},
    "devices": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**20}, "minItems": 2, "uniqueItems": True},
    "size_bytes": {"type": "integer", "minimum": 1, "maximum": 2**62},
    "times_ns": {"type": "array", "items": _NS, "minItems": 1, "maxItems": MOST_TIMES},
    "cpu_ns": {"type": "integer", "minimum": 0, "maximum": _LONGEST_NS},
    "measured_at": {"type": "string", "maxLength": 40},
    "scale": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
}
TIMING_SCHEMA: dict[str, Any] = {
    "type": "object", "properties": _PROPERTIES, "required": list(_PROPERTIES), "additionalProperties": False,
}  # fmt: skip
"""JSON schema of an encoded timing."""
