"""Kinds and types of devices: what may be said of all of a cluster's at once, and which data sheet belongs to a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

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


_SAYS_NOTHING = re.compile(r"NVIDIA|TESLA|GEFORCE|QUADRO|AMD|INSTINCT|SXM\d*|HBM\d*E?|\d+GB")
"""Words that need no counterpart in the name of a device type: brands, the usual socket, and memory where there is only one size."""


def known_gpu(name: str, known: Iterable[str]) -> str | None:
    """The device type, of those in ``known``, that a GPU of this name is, as its driver gives it: ``NVIDIA A100-SXM4-80GB`` is
    ``a100-80gb``. None if none of them is sure to be it.

    Each part of the type's name (``a100``, ``pcie``, ``80gb``) must be a word of the GPU's, or two neighbours written together (``TITAN
    V``). No word of the GPU's may be left over that might mean other figures, such as ``NVL``, ``Laptop`` or ``SUPER``.
    """
    words = [word for word in re.split(r"[\s\-_]+", name.upper()) if word]
    fitting = {kind: parts for kind in known if (parts := _parts_found(words, kind.upper().split("-")))}
    sure = [kind for kind, parts in fitting.items() if all(word in parts or _SAYS_NOTHING.fullmatch(word) for word in words)]
    return max(sure, key=lambda kind: len(fitting[kind]), default=None)


def _parts_found(words: list[str], parts: list[str]) -> set[str]:
    """The words that a type's parts stand for; none if a part is missing."""
    found: set[str] = set()
    for part in parts:
        two = next((pair for pair in pairwise(words) if "".join(pair) == part), None)
        if part not in words and two is None:
            return set()
        found.update([part] if part in words else two or ())
    return found
