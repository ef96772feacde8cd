"""Sets of devices that sum together, with the ways in which they may, for compiled code (``state.Groups``)."""

from __future__ import annotations

import numpy as np

from soap.simulator.communication import Communication
from soap.simulator.compiled.lists import make_lists
from soap.simulator.compiled.state import Groups
from soap.simulator.compiled.tables import ClusterTables, Ints


class DeviceGroups:
    """Grows as sets are asked for. ``tables``: for compiled code, valid until the next ``add``."""

    def __init__(self, communication: Communication, cluster: ClusterTables) -> None:
        self._communication = communication
        self._sets: list[tuple[int, ...]] = []
        devices = communication.topology.device_count
        self._static: list[Ints] = [np.arange(devices, dtype=np.int32), cluster.route]
        self._size = devices + len(cluster.route)
        self._way_ptr, self._latency, self._per_byte = [0], list[float](), list[float]()
        self._resource, self._resource_n = list[int](), list[int]()
        self.tables = self._make()

    def add(self, devices: tuple[int, ...]) -> None:
        """One more set, ascending."""
        self._sets.append(devices)
        count = self._communication.topology.device_count
        for option in self._communication.allreduce_options(devices):
            self._latency.append(option.latency_seconds)
            self._per_byte.append(option.seconds_per_byte)
            self._resource.append(self._size)
            self._resource_n.append(len(option.links))
            self._static.append(np.array(option.links, np.int32) + np.int32(count))
            self._size += len(option.links)
        self._way_ptr.append(len(self._latency))
        self.tables = self._make()

    def _make(self) -> Groups:
        self._static = [np.concatenate(self._static)]
        return Groups(
            make_lists(self._sets),
            np.array(self._way_ptr, np.int64),
            np.array(self._latency, np.float64),
            np.array(self._per_byte, np.float64),
            np.array(self._resource, np.int64),
            np.array(self._resource_n, np.int32),
            self._static[0],
        )
