"""Where links were measured. Without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated

from soap.cluster.topology import Topology
from soap.measure.this_machine import cpu_cores, cpu_model
from soap.model.json_text import Schema
from soap.profiles.keys import Few, Word, digest, torch_version

VERSION = 12
"""Version of the measurement and of its format; part of every place. Since 2 with freed memory kept (``malloc``); since 3 collectives after
a computation, and with ``calm_gloo``; since 4 emulated hosts' sums are prompt; since 5 with the scale; since 6 the cold
penalty by itself; since 7 devices compute by even time (``reference_work``); since 8 exchanges within steps, cold penalties of three
sizes, and chains that read two values; since 9 with reference work that is the same in all processes; since 10 messages and exchanges of
two sizes within steps, which send the last of theirs while gradients are summed; since 11 emulated hosts have one congestion control;
since 12 cold penalties behind messages apart from those behind sums."""


@dataclass(frozen=True)
class LinkPlace:
    """A cluster and how its ranks talked. Measurements of another place are never used. ``cluster``: the topology's hash. ``name``: its
    name, for people only. ``devices``: names of its device types. ``machine``: processor and cores of this machine if all hosts are on
    it; otherwise empty, because a described cluster is where its description says. ``emulated``: whether on the hosts that
    ``--emulate`` makes."""

    cluster: Word
    name: Annotated[str, Schema(maxLength=1000)] = field(compare=False)
    devices: Annotated[str, Schema(maxLength=10**4)]
    machine: Annotated[str, Schema(maxLength=200)]
    backend: Word
    emulated: bool
    torch: Word
    version: Few = VERSION

    @property
    def hash(self) -> str:
        """Hash of everything except the name: 16 hex digits."""
        return digest({key: value for key, value in asdict(self).items() if key != "name"})

    @property
    def text(self) -> str:
        """The place as one line."""
        on = f" on {self.machine}" if self.machine else ""
        return f"{self.name}{on}{', emulated hosts' if self.emulated else ''}, {self.backend}, torch {self.torch}"


def link_place(topology: Topology, backend: str, *, emulated: bool) -> LinkPlace:
    """The place of a cluster whose ranks talk by this backend (gloo or nccl)."""
    return LinkPlace(
        cluster=topology.hash,
        name=topology.name,
        devices=" + ".join(sorted({device.type.name for device in topology.devices})),
        machine=f"{cpu_model()} with {cpu_cores()} cores" if emulated or topology.measured else "",
        backend=backend,
        emulated=emulated,
        torch=torch_version(),
    )


def link_places(topology: Topology) -> list[LinkPlace]:
    """Places whose measurements a plan for this cluster may use, best first: by the backend that its devices take by default, and on
    its own hosts before emulated ones."""
    cuda = topology.has_gpus_alone
    backends = ("nccl", "gloo") if cuda else ("gloo",)
    return [link_place(topology, backend, emulated=emulated) for emulated in ((False,) if cuda else (False, True)) for backend in backends]
