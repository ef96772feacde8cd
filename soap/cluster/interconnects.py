"""What links are made of, as NCCL tells it apart, and what NCCL and RCCL make of them: latencies and bandwidths by algorithm and protocol.

The figures stand in ``soap/profiles/data/nccl.json`` beside their sources. A link that names its interconnect has the bandwidth of a data
sheet, of which messages reach a share. One that names none has what messages reach, as whoever described it says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

Medium = Literal["nvlink", "pcie", "network"]
"""What NCCL's latencies depend on. xGMI counts as NVLink."""

PCIE_BANDWIDTH_BYTES_PER_SECOND = 64e9
"""A link inside a host that names no interconnect is NVLink if it is faster than PCI Express 5.0 with 16 lanes, and else PCI Express."""

Seconds = Mapping[str, Mapping[str, float]]
"""Algorithm -> protocol -> seconds (or shares)."""


@dataclass(frozen=True, slots=True)
class Interconnect:
    """``share``: of the data sheet's bandwidth, what a ring with the protocol Simple, or a message, reaches. ``latency_seconds``: of a
    message, for which the library's latency of a step stands. ``ll_bytes_per_second``: the most bus bandwidth with the protocol LL.
    ``nvls_share``: bus bandwidth with NVLink SHARP as a share of the data sheet's bandwidth; None if switches cannot add. ``plateau``: see
    ``Library``; None if it is the library's."""

    name: str
    medium: Medium
    library: str
    share: float
    latency_seconds: float
    ll_bytes_per_second: float
    nvls_share: float | None = None
    plateau: float | None = None


@dataclass(frozen=True, slots=True)
class Library:
    """``base``: seconds of a call. ``hop``: medium -> seconds of a step. ``post``: protocol -> the least seconds of a ring's step inside a
    host, if there are several. ``share``: ("one host" or "several hosts") -> share of what a ring with Simple reaches.
    ``network_ll_bytes_per_second``: most bus bandwidth of LL over two hosts, and over more. ``plateau``: by how much longer latencies of a
    ring with Simple over several hosts are. ``call_seconds``: of a call of send and receive."""

    base: Seconds
    hop: Mapping[str, Seconds]
    post: Mapping[str, float]
    share: Mapping[str, Seconds]
    network_ll_bytes_per_second: tuple[float, float]
    plateau: float
    call_seconds: float


@cache
def interconnects() -> Mapping[str, Interconnect]:
    """All known ones by name."""
    return {name: _interconnect(name, entry) for name, entry in _data()["interconnects"].items()}


@cache
def library(name: str) -> Library:
    """NCCL or RCCL."""
    entry = {key: one["value"] for key, one in _data()["libraries"][name].items()}
    first, more = entry["network_LL_bytes_per_second"]
    return Library(
        base=_seconds(entry["base_us"]),
        hop={medium: _seconds(own) for medium, own in entry["hop_us"].items()},
        post={protocol: 1e-6 * us for protocol, us in entry["post_us"].items()},
        share=entry["share"],
        network_ll_bytes_per_second=(first, more),
        plateau=entry["plateau"],
        call_seconds=1e-6 * entry["call_us"],
    )


def figures() -> Mapping[str, Any]:
    """All of the file, as plain JSON, for hashes."""
    return _data()


def unnamed(bandwidth_bytes_per_second: float) -> Interconnect:
    """What a link inside a host is taken for that names no interconnect: the slowest NVLink that has the bandwidth in a whole host."""
    if bandwidth_bytes_per_second <= PCIE_BANDWIDTH_BYTES_PER_SECOND:
        return interconnects()["pcie"]
    limits = {"nvlink2": 150e9, "nvlink3": 300e9, "nvlink4": 450e9}
    name = next((name for name, limit in limits.items() if bandwidth_bytes_per_second <= limit), "nvlink5")
    return interconnects()[name]


def _interconnect(name: str, entry: Mapping[str, Any]) -> Interconnect:
    return Interconnect(
        name=name,
        medium=entry["medium"],
        library=entry.get("library", "NCCL"),
        share=entry["share"]["value"],
        latency_seconds=1e-6 * entry["latency_us"]["value"],
        ll_bytes_per_second=entry["LL_bytes_per_second"]["value"],
        nvls_share=entry["NVLS_share"]["value"] if "NVLS_share" in entry else None,
        plateau=entry["plateau"]["value"] if "plateau" in entry else None,
    )


def _seconds(us: Mapping[str, Mapping[str, float]]) -> Seconds:
    return {algorithm: {protocol: 1e-6 * one for protocol, one in own.items()} for algorithm, own in us.items()}


@cache
def _data() -> Mapping[str, Any]:
    text = files("soap").joinpath("profiles", "data", "nccl.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found
