"""Sets of devices that sum together, and the all-reduces that they may use, for compiled code (``state.Groups``)."""

from __future__ import annotations

import numpy as np

from soap.cluster.topology import Topology
from soap.simulator.chunks import shortest_chunk_ns
from soap.simulator.communication.offloading import names_behind_links
from soap.simulator.communication.prices import Communication
from soap.simulator.compiled.graph_arrays import ClusterTables, Ints
from soap.simulator.compiled.growing import Growing, are_same
from soap.simulator.compiled.lists import GrowingLists
from soap.simulator.compiled.state import Groups


class DeviceGroups:
    """Grows as compiled code asks for sets. ``cluster``: of tasks that are lowered; those that are only played know what they hold."""

    def __init__(self, communication: Communication, cluster: ClusterTables | None = None) -> None:
        self._communication = communication
        self._sets, self._numbers = GrowingLists(), dict[tuple[int, ...], int]()
        self._static = Growing(np.int32)
        self._static.add(np.arange(communication.topology.device_count))
        for known in () if cluster is None else (cluster.route, cluster.lift):
            self._static.add(known)
        self._members, self._way_ptr = Growing(np.int32), Growing(np.int64)
        self._latency, self._per_byte = Growing(np.float64), Growing(np.float64)
        self._resource, self._resource_n = Growing(np.int64), Growing(np.int32)
        self._way_ptr.add([0])
        self._port_device = _port_devices(communication.topology)
        self._shortest_chunk_ns = np.array([shortest_chunk_ns(communication.topology)], np.int64)
        cold = communication.topology.cold_penalty
        self._cold_penalty, self._cold_behind_messages = (
            np.array([(0, 0), *cold.points_behind(message=message)], np.int64).ravel() for message in (False, True)
        )
        self._arrays: Groups | None = None
        for devices in communication.groups:
            self.add(devices)

    def number(self, devices: tuple[int, ...], *, parted: bool = False) -> int:
        """The number of a set of devices, ascending, for sums; or, ``parted``, of devices that gather and scatter equal parts."""
        entry = (self._communication.topology.device_count, *devices) if parted else devices
        if entry not in self._numbers:
            self.add(entry)
        return self._numbers[entry]

    def add(self, devices: tuple[int, ...]) -> None:
        """Add a set that is not there yet; behind the number of all devices as a mark, one that gathers and scatters equal parts."""
        self._sets.add(devices)
        self._numbers[devices] = len(self._numbers)
        count = self._communication.topology.device_count
        self._members.add([self._communication.members(devices)])
        if devices[0] == count:
            options = self._communication.parted_options(devices[1:])
        else:
            options = self._communication.allreduce_options(devices) if len(devices) > 1 else ()
        for option in options:
            self._latency.add([option.latency_seconds])
            self._per_byte.add([option.seconds_per_byte])
            self._resource.add([self._static.add(np.array(option.links, np.int32) + np.int32(count))])
            self._resource_n.add([len(option.links)])
        self._way_ptr.add([self._latency.size])

    def arrays(self) -> Groups:
        """The tables for compiled code, with room behind what is there: the same ones until that is full."""
        found = Groups(
            sets=self._sets.arrays(),
            members=self._members.room,
            way_ptr=self._way_ptr.room,
            latency_seconds=self._latency.room,
            seconds_per_byte=self._per_byte.room,
            resource=self._resource.room,
            resource_n=self._resource_n.room,
            static=self._static.room,
            port_device=self._port_device,
            shortest_chunk_ns=self._shortest_chunk_ns,
            cold_penalty=self._cold_penalty,
            cold_behind_messages=self._cold_behind_messages,
        )
        if self._arrays is None or not are_same(self._arrays, found):
            self._arrays = found
        return self._arrays


def _port_devices(topology: Topology) -> Ints:
    """For each resource, the device of its port, or -1."""
    device = np.full(topology.device_count + len(topology.links) + len(names_behind_links(topology)), -1, np.int32)
    for port in topology.ports:
        device[topology.device_count + port.link] = -1 if port.device is None else port.device
    return device
