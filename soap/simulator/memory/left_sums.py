"""Until when devices keep sums that they take part in but do not read.

Ranks never wait for such a sum (``Communicator.leave``), and others may come to it later than simulated. It is over for certain when a
device runs something that follows from it, over whatever other devices: who read the sum had it, so all had joined it. The device lets go
of it when it sends something from then on.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from soap.simulator.memory.grouped import Longs
from soap.simulator.memory.plan_arrays import BROADCAST, PlanArrays
from soap.simulator.memory.played import NONE, Played
from soap.simulator.memory.spans import NEVER, Spans


def left_until(arrays: PlanArrays, spans: Spans, played: Played, rows: Longs, otherwise: Longs) -> Longs:
    """Until when devices keep these sums. ``rows``: of ``SumDevices``; ``otherwise``: at the latest, and if nothing follows from it there.
    ``played``: when ranks run the tasks; what they do not wait for, though the tasks do, proves nothing."""
    looks, device, scale = _looks(arrays, spans), arrays.sum_devices.device[rows], spans.end + 1
    keys = looks.device * scale + looks.time
    last = np.searchsorted(keys, device * scale + otherwise) - 1
    there = (last >= 0) & (np.append(looks.device, NEVER)[last] == device)
    latest = np.where(there, np.append(looks.time, NEVER)[last], NEVER)
    own = np.flatnonzero(latest >= spans.summed_end[arrays.sum_devices.sum[rows]])
    begun = _followed(arrays, played, rows[own], latest[own]) if len(own) else NONE
    found = otherwise.copy()
    found[own] = np.where(begun == NONE, otherwise[own], looks.time[np.searchsorted(keys, device[own] * scale + begun)])
    return found


def _followed(arrays: PlanArrays, played: Played, rows: Longs, latest: Longs) -> Longs:
    """By row: the start of the first of the device's passes that follows from the sum, or NONE if none starts until ``latest``."""
    found = np.full(len(rows), NONE)
    asked: dict[int, dict[int, int]] = {}
    tasks, devices = played.summed[arrays.sum_devices.sum[rows]], arrays.sum_devices.device[rows]
    for place, (task, device) in enumerate(zip(tasks.tolist(), devices.tolist(), strict=True)):
        asked.setdefault(task, {})[device] = place
    asked.pop(NONE, None)
    if not asked:
        return found
    after = _After(played, np.where(played.tile == NONE, NONE, arrays.tiles.device[played.tile]))
    for task, places in asked.items():
        for device, start in after.first_passes(task, places, max(int(latest[place]) for place in places.values())).items():
            found[places[device]] = start if start <= latest[places[device]] else NONE
    return found


class _After:
    """Finds the passes that follow from a task."""

    def __init__(self, played: Played, devices: Longs) -> None:
        """``devices``: by task that of a pass, or NONE."""
        waiting, waits = played.waits_of(np.arange(len(played.tile)))
        kept = played.end[waits] <= played.start[waiting]
        order = np.argsort(waits[kept], kind="stable")
        self._followers = waiting[kept][order].tolist()
        self._begins = np.searchsorted(waits[kept][order], np.arange(len(played.tile) + 1)).tolist()
        self._starts, self._devices = played.start.tolist(), devices.tolist()

    def first_passes(self, task: int, devices: Mapping[int, int], latest: int) -> dict[int, int]:
        """Device -> start of the first pass there that follows from ``task``, by these devices that have one until ``latest``."""
        found: dict[int, int] = {}
        queue, seen = [(self._starts[task], task)], {task}
        while queue and len(found) < len(devices):
            start, own = heappop(queue)
            device = self._devices[own]
            if device in devices and device not in found:
                found[device] = start
            for other in self._followers[self._begins[own] : self._begins[own + 1]]:
                if other not in seen and self._starts[other] <= latest:
                    seen.add(other)
                    heappush(queue, (self._starts[other], other))
        return found


class _Looks(NamedTuple):
    """When devices look what is over, by device and time: as they send a message, in either pass, or their part of an exchange."""

    device: Longs
    time: Longs


def _looks(arrays: PlanArrays, spans: Spans) -> _Looks:
    pieces, carrier = arrays.pieces, arrays.pieces.carrier
    own = np.flatnonzero((carrier >= 0) & (np.append(arrays.carriers.pattern, BROADCAST)[carrier] != BROADCAST))
    there, back = spans.brought_start[carrier[own]], spans.returned_start[carrier[own]]
    source, target = arrays.holdings.device[pieces.holding[own]], arrays.fetches.device[pieces.fetch[own]]
    device, time = np.concatenate([source, target[back != NEVER]]), np.concatenate([there, back[back != NEVER]])
    order = np.lexsort((time, device))
    return _Looks(device[order], time[order])
