"""Machines around a switch, and work of given durations, for simulations whose outcome is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from soap.cluster.topology import Device, DeviceType, Host, Link, Topology
from soap.elastic.layout import Place
from soap.elastic.simulation.design import Lane
from tests.strategies import CPU


def star(types: int | Sequence[DeviceType], bytes_per_second: float = 1e15, latency_seconds: float = 0.0) -> Topology:
    """A host for each device; each has a cable to a switch. A message of some bytes takes 1 ns by default."""
    kinds = [CPU] * types if isinstance(types, int) else [*types]
    hosts = [Host(f"host{i}", 1, None) for i in range(len(kinds))]
    devices = [Device(i, f"d{i}", i, kind) for i, kind in enumerate(kinds)]
    links = [
        Link(2 * i + back, f"l{i}{back}", *(("switch", f"d{i}") if back else (f"d{i}", "switch")), bytes_per_second, latency_seconds / 2)
        for i in range(len(kinds))
        for back in (0, 1)
    ]
    return Topology("star", tuple(devices), tuple(hosts), tuple(links))


@dataclass(frozen=True)
class Fixed:
    """``Work`` that takes so many nanoseconds. ``slower``: by a lane's device, a factor of its own work."""

    front: int = 1000
    rest: int = 2000
    look_up: int = 300
    gradient: int = 400
    count: int = 500
    update: int = 600
    pull: int = 100
    control_ns: int = 0
    slower: dict[int, int] = field(default_factory=dict)

    def front_ns(self, lane: Lane) -> int:
        return self.front * self.slower.get(lane.front, 1)

    def rest_ns(self, lane: Lane) -> int:
        return self.rest * self.slower.get(lane.rest, 1)

    def look_up_ns(self, place: Place) -> int:
        return self.look_up

    def gradient_ns(self, place: Place) -> int:
        return self.gradient

    def count_ns(self, place: Place) -> int:
        return self.count

    def update_ns(self, place: Place) -> int:
        return self.update

    def pull_ns(self, place: Place) -> int:
        return self.pull
