"""How long tiles take on a device in the course of one simulation: as long as they do by themselves, or longer where the device was cold.

A topology brings a clock along (``Topology.device_clock``); the simulation asks it for the end of each tile and knows no more of it.
"""

from __future__ import annotations

from typing import Protocol

from soap.cluster.overheads import ColdPenalty

NEVER = 2**62
"""Nanoseconds since a device has waited that never has."""


class DeviceClock(Protocol):
    """Of all devices, for one simulation: tiles of a device are told in their order."""

    def communicated(self, device: int, *, message: bool) -> None:
        """A device was kept busy by a message, or by something that several devices do together."""

    def end_ns(self, device: int, start_ns: int, duration_ns: int) -> int:
        """When a tile ends that starts at this time, and by itself takes so long."""


class NoClock:
    """Tiles take as long as they do by themselves."""

    def communicated(self, device: int, *, message: bool) -> None:
        """Nothing."""

    def end_ns(self, device: int, start_ns: int, duration_ns: int) -> int:
        """start_ns + duration_ns."""
        return start_ns + duration_ns


class WarmUp:
    """A device that has done something else since its last tile, or nothing, is cold: ``ColdPenalty`` says how much longer what follows
    takes together, by what it last communicated. Before its first tile it is warm."""

    def __init__(self, penalty: ColdPenalty) -> None:
        self._penalty = penalty
        self._message: dict[int, bool] = {}
        self._behind_message: dict[int, bool] = {}
        self._computed_ns: dict[int, int] = {}
        self._warm_ns: dict[int, int] = {}

    def communicated(self, device: int, *, message: bool) -> None:
        """Note the last communication."""
        self._message[device] = message

    def end_ns(self, device: int, start_ns: int, duration_ns: int) -> int:
        """start_ns + duration_ns, and by how much the penalty grows meanwhile."""
        waited = start_ns > self._computed_ns.get(device, 0)
        if waited:
            self._behind_message[device] = self._message.get(device, False)
        behind_message = self._behind_message.get(device, False)
        before_ns = 0 if waited else self._warm_ns.get(device, NEVER)
        after_ns = before_ns + duration_ns
        longer_ns = [self._penalty.longer_ns(own, behind_message=behind_message) for own in (before_ns, after_ns)]
        end_ns = start_ns + duration_ns + longer_ns[1] - longer_ns[0]
        self._warm_ns[device], self._computed_ns[device] = after_ns, end_ns
        return end_ns
