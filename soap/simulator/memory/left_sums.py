"""Sums that a device takes part in but does not read: until when it keeps them.

Ranks never wait for such a sum (``Communicator.leave``), and others may come to it later than simulated. It is over for certain when a
device runs something that follows from it, over whatever other devices: who read the sum had it, so all had joined it. The device lets go
of it when it sends something from then on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from soap.plan.plan import Exchange, Pattern, reduce_name, remote_parts
from soap.simulator.memory.task_spans import TaskSpans
from soap.simulator.tasks import Schedule, TaskGraph


class LeftSums:
    """``left``: (reduction, device) of such sums."""

    def __init__(self, tasks: TaskGraph, schedule: Schedule, spans: TaskSpans, left: Sequence[tuple[int, int]]) -> None:
        self._followed = _followed(tasks, schedule, left)
        self._looks = _looks(spans) if self._followed else []

    def over(self, number: int, device: int, otherwise: int) -> int:
        """Until when a device keeps a sum; ``otherwise``: at the latest, and if nothing follows from it there."""
        begun = self._followed.get((number, device), otherwise)
        times = self._looks[device] if begun < otherwise else []
        place = bisect_left(times, begun)
        return min(otherwise, times[place]) if place < len(times) else otherwise


def _followed(tasks: TaskGraph, schedule: Schedule, left: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """(reduction, device) -> start of the first of the device's passes that follows from the sum; left out if none does."""
    plan, found = tasks.plan, dict[tuple[int, int], int]()
    bits = {number: 1 << place for place, number in enumerate(dict.fromkeys(number for number, _ in left))}
    asked = [0] * plan.device_count
    for number, device in left:
        asked[device] |= bits[number]
    named = {reduce_name(plan.graph.operators[plan.reductions[own].operator], plan.reductions[own]): bit for own, bit in bits.items()}
    behind: list[int] = []  # for each task, the bits of the sums that it follows from
    for place, task in enumerate(tasks.tasks if left else ()):
        own = 0
        for other in task.predecessors:
            own |= behind[other]
        behind.append(own | named.get(task.name, 0))
        if task.tile is not None and own & asked[plan.tiles[task.tile].device]:
            here, start = plan.tiles[task.tile].device, int(schedule.start_ns[place])
            for number, bit in bits.items():
                if own & asked[here] & bit:
                    found[number, here] = min(start, found.get((number, here), start))
    return found


def _looks(spans: TaskSpans) -> list[list[int]]:
    """For each device, when it looks what is over: as it sends a message, in either pass, or its part of an exchange."""
    plan = spans.plan
    times: list[set[int]] = [set() for _ in range(plan.device_count)]
    for carrier in spans.carriers():
        if isinstance(carrier, Exchange) and carrier.pattern is Pattern.BROADCAST:
            continue
        for source, target, _, _ in remote_parts(plan, carrier.parts):
            times[source].add(spans.brought[carrier.parts[0]][0])
            if carrier.parts[0] in spans.returned:
                times[target].add(spans.returned[carrier.parts[0]][0])
    return [sorted(own) for own in times]
