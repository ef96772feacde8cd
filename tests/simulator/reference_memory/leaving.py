"""How long what devices send to others in the forward pass, and sums that they do not read, are there.

A part in one piece of memory leaves from where it lies, without a copy, and keeps all of what it is a part of.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from soap.model.regions import Box, volume
from soap.plan.delivery import box_bytes, partial_bytes
from soap.plan.plan import Exchange, Part, Pattern, Plan, Reduction, local_pieces, reduce_name, remote_parts
from soap.simulator.memory.footprint import shares_of
from soap.simulator.memory.transit import lies_in_one_piece
from soap.simulator.tasks import Schedule, TaskGraph
from tests.simulator.reference_memory.ledger import Ledger
from tests.simulator.reference_memory.moving import Stay, lands_in_place, packs_together
from tests.simulator.reference_memory.sizes import told_parts
from tests.simulator.reference_memory.task_spans import TaskSpans


class Leaving:
    """Writes into a ledger what is sent in the forward pass. ``gone``: (tile, tensor that it makes) or (reduction, device) -> when its
    readers on its device have let that go."""

    def __init__(self, spans: TaskSpans, ledger: Ledger, gone: Mapping[tuple[int, str | int], int]) -> None:
        self.spans, self.ledger, self.plan, self._gone = spans, ledger, spans.plan, gone

    def sent(self) -> None:
        """What devices send in the forward pass, until it has left."""
        plan = self.plan
        for message in plan.messages:
            part = message.parts[0]
            sent = remote_parts(plan, message.parts)
            start, told = self.spans.brought[part][0], self.spans.left_by(message, gradient=False, otherwise=self.spans.end_ns)
            if part in self.spans.returned:  # known when the first of its gradients is added up
                told = max(self.spans.returned[part][1], min(self.spans.wanted(holding)[0] for *_, holding in sent))
            self._send(parcels(plan, message.parts), start, told)
            self._send_again(parcels(plan, message.parts), part, told)
        for exchange in plan.exchanges:
            span = self.spans.brought[exchange.parts[0]]
            if exchange.pattern is Pattern.BROADCAST:
                self._send(parcels(plan, told_parts(exchange)), *span)
                self._send_again(parcels(plan, told_parts(exchange)), exchange.parts[0])
                continue
            by_source: dict[int, list[Parcel]] = {}
            for parcel in (*parcels(plan, exchange.parts), *given_to_itself(plan, exchange)):
                by_source.setdefault(parcel.source, []).append(parcel)
            for source, own in by_source.items():
                self._send(own, span[0], self.ledger.arrived(source, span[1]))
                self._send_again(own, exchange.parts[0])

    def _send_again(self, leaving: Sequence[Parcel], part: Part, told_ns: int | None = None) -> None:
        """What one device sends a second time with this part, if it is: it counts as copied. ``told_ns``: when it knows that the first
        time is over, and so, if it is a message, the second."""
        if (span := self.spans.gathered.get(part)) is not None:
            source, size = leaving[0].source, sum(parcel.size_bytes for parcel in leaving)
            end = self.ledger.arrived(source, span[1]) if told_ns is None else max(told_ns, span[1])
            self.ledger.send(source, span[0], end, size, held=size, copied=True)

    def _send(self, leaving: Sequence[Parcel], start_ns: int, end_ns: int) -> None:
        """What one device sends at once, until ``end_ns`` or later sends: copies, and what leaves from where it lies."""
        size = copied = 0
        stays, source = [], -1
        for parcel in leaving:
            source, size = parcel.source, size + parcel.size_bytes
            lies = Lying(-1, True) if len(leaving) > 1 and packs_together(self.plan, source) else lying(self.plan, parcel)
            if lies.of < 0:
                copied += parcel.size_bytes
            else:
                held = self.plan.holdings[lies.of]
                gone = self._gone[held.tile, held.tensor] if held.reduction is None else self._gone[held.reduction, held.device]
                whole = box_bytes(self.plan, held.tensor, held.box)
                stays.append(Stay(lies.of, gone, whole, 0 if lies.surely else parcel.size_bytes))
        self.ledger.send(source, start_ns, end_ns, size, held=copied, copied=True, stays=stays)


class Parcel(NamedTuple):
    """Parts of values that a device sends to one other, or to itself, at once: (holding, region) each, in ``size_bytes``."""

    source: int
    parts: Sequence[tuple[int, Box]]
    size_bytes: int


def parcels(plan: Plan, parts: Sequence[Part]) -> list[Parcel]:
    """What is sent of these parts, by source and target."""
    found: dict[tuple[int, int], list[tuple[int, Box]]] = {}
    for source, target, box, holding in remote_parts(plan, parts):
        found.setdefault((source, target), []).append((holding, box))
    return [_parcel(plan, source, own) for (source, _), own in found.items()]


def given_to_itself(plan: Plan, exchange: Exchange) -> Iterator[Parcel]:
    """What devices send to themselves: own pieces of the only region that comes, if they send these values to others as well and all
    pieces then arrive in their places (``Arrivals``)."""
    shared: dict[int, set[int]] = {}
    received: dict[int, set[int]] = {}
    for (number, _), (source, target, _, holding) in zip(exchange.parts, remote_parts(plan, exchange.parts), strict=True):
        shared.setdefault(source, set()).add(holding)
        received.setdefault(target, set()).add(number)
    for device, (number, *others) in received.items():
        fetch = plan.fetches[number]
        mine = local_pieces(plan, fetch)
        there = {piece.holding for piece in mine} <= shared.get(device, set())
        if mine and there and not others and lands_in_place(plan, fetch):
            yield _parcel(plan, device, [(piece.holding, piece.box) for piece in mine])


def _parcel(plan: Plan, source: int, parts: Sequence[tuple[int, Box]]) -> Parcel:
    return Parcel(source, parts, sum(box_bytes(plan, plan.holdings[holding].tensor, box) for holding, box in parts))


class Lying(NamedTuple):
    """How a parcel leaves. ``of``: the holding that stays, as it leaves from there; -1 if it is a copy. ``surely``: it is no copy."""

    of: int
    surely: bool


def lying(plan: Plan, parcel: Parcel) -> Lying:
    """Whether a parcel leaves from where it lies. Several parts are always copied together."""
    ((holding, box), *others) = parcel.parts
    held = plan.holdings[holding]
    if others or not lies_in_one_piece(box, held.box):
        return Lying(-1, True)
    return Lying(holding, lies_in_rows(plan, holding))


def lies_in_rows(plan: Plan, holding: int) -> bool:
    """Whether a holding certainly lies in memory row by row, as sums do."""
    held = plan.holdings[holding]
    if held.reduction is not None:
        return True
    tile = plan.tiles[held.tile]
    op = plan.operator(tile)
    first = len(op.inputs) + len(op.parameters)
    rows = shares_of(plan.graph, op, tile.intervals).in_rows
    return any(first + k in rows for k, out in enumerate(op.outputs) if out.tensor == held.tensor)


def sent_of_sum(plan: Plan, reduction: Reduction, device: int) -> int:
    """Bytes that a device holds to send others their cells of its own sum: copies, or all of the sum where a cell leaves from there. With
    micro-batches copies, as in ``Leaving``."""
    others = [cell for own, cell in zip(reduction.devices, reduction.cells, strict=True) if own != device and volume(cell)]
    apart = plan.order is not None or (len(others) > 1 and packs_together(plan, device))
    lie = [not apart and lies_in_one_piece(cell, reduction.box) for cell in others]
    copied = sum(partial_bytes(plan, reduction, cell) for cell, lies in zip(others, lie, strict=True) if not lies)
    return copied + (partial_bytes(plan, reduction, reduction.box) if any(lie) else 0)


class LeftSums:
    """Until when devices keep sums that they take part in but do not read. ``left``: (reduction, device) of these.

    Ranks never wait for such a sum (``Communicator.leave``), and others may come to it later than simulated. It is over for certain when a
    device runs something that follows from it, over whatever other devices: who read the sum had it, so all had joined it. What ranks do
    not wait for, though the tasks do, proves nothing. The device lets go of it when it sends something from then on.
    """

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
            own |= behind[other] if schedule.end_ns[other] <= schedule.start_ns[place] else 0
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
