"""Memory over the simulated time: what each device holds from when to when. ``memory`` bounds it for any order of the tasks.

Held all the time: parameter shards, optimizer states, the buffers of gradients that are summed over devices, the whole batch and constants.
A tile's outputs, what it saves, and the copies of its inputs live from its forward task to its own backward task and the last one (or
transfer) that reads them; a fetched region from its first arrival to the last backward task of its consumers; a gradient on its way from
the first task that gives a part of it to the backward task that takes it; what is sent until it has certainly left. While a tile's task
runs, what its calls pass to each other is there as well. Not counted are copies that a library may make of what it sums.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from soap.graph import TensorKind
from soap.regions import Box, in_one_piece, whole
from soap.simulator import memory
from soap.simulator.buckets import idle_shards
from soap.simulator.flows import box_bytes, reduced_tensor
from soap.simulator.parameter_memory import (
    COUNT_BYTES,
    assembled_regions,
    compact_parameters,
    gathered_bytes,
    kept_shards,
    operand_bytes,
    reader_bytes,
    served_gradients,
)
from soap.simulator.plan import (
    Exchange,
    Fetch,
    Message,
    Part,
    Reduction,
    exchange_name,
    gather_name,
    message_name,
    pull_name,
    push_name,
    reduce_name,
    serve_name,
)
from soap.simulator.tasks import Schedule, TaskGraph, TaskKind
from soap.simulator.transit import SENT_BYTES, copied_to_send, is_remote, received_apart

Span = tuple[int, int]
"""(start, end) of a task, in nanoseconds."""


@dataclass(frozen=True)
class MemoryCurve:
    """What one device holds: ``bytes_held[i]`` from ``times_ns[i]`` on (int64 arrays of one length; times rise from 0)."""

    times_ns: NDArray[np.int64]
    bytes_held: NDArray[np.int64]

    @property
    def peak_bytes(self) -> int:
        """The most at any time."""
        return int(self.bytes_held.max())


def memory_over_time(tasks: TaskGraph, schedule: Schedule, optimizer_states: int = 2) -> tuple[MemoryCurve, ...]:
    """The curve of each device. ``optimizer_states``: tensors of a parameter's size that the optimizer keeps for it."""
    held = _Held(tasks, schedule)
    held.always(optimizer_states)
    held.synchronized()
    held.values()
    held.fetched()
    held.summed()
    held.gradients()
    held.sent()
    return tuple(_curve(changes) for changes in held.changes)


def _curve(changes: list[tuple[int, int]]) -> MemoryCurve:
    level, points = 0, {0: 0}
    for time_ns, change in sorted(changes):  # at one time, what ends goes before what begins
        level += change
        points[time_ns] = level
    return MemoryCurve(np.array(list(points), np.int64), np.array(list(points.values()), np.int64))


class _Held:
    """Collects changes: for each device (time, bytes that come or go)."""

    def __init__(self, tasks: TaskGraph, schedule: Schedule) -> None:
        self.plan, self.end_ns = tasks.plan, schedule.makespan_ns
        self.changes: list[list[tuple[int, int]]] = [[] for _ in range(self.plan.device_count)]
        self._forward: dict[int, Span] = {}
        self._backward: dict[int, Span] = {}
        self._named: dict[str, Span] = {}
        for task, start, end in zip(tasks.tasks, schedule.start_ns.tolist(), schedule.end_ns.tolist(), strict=True):
            self._named[task.name] = (start, end)
            if task.tile is not None:
                (self._forward if task.kind is TaskKind.FORWARD else self._backward)[task.tile] = (start, end)
        self._segment = self._segments()
        self._begun: dict[int, int] = {}
        for tile, (start, _) in self._backward.items():
            self._begun[self._segment[tile]] = min(start, self._begun.get(self._segment[tile], start))
        carriers: list[Message | Exchange] = [*self.plan.messages, *self.plan.exchanges]
        self._brought: dict[Part, Span] = {}
        self._returned: dict[Part, Span] = {}
        for carrier in carriers:
            self._brought.update(dict.fromkeys(carrier.parts, self._named[self._name(carrier, gradient=False)]))
            if (back := self._named.get(self._name(carrier, gradient=True))) is not None:
                self._returned.update(dict.fromkeys(carrier.parts, back))

    def hold(self, device: int, start_ns: int, end_ns: int, size: int) -> None:
        """A device holds so many bytes for so long."""
        if size and end_ns > start_ns:
            self.changes[device] += [(start_ns, size), (end_ns, -size)]

    def always(self, optimizer_states: int) -> None:
        """Parameters, their states and gradients, and the whole batch."""
        graph = self.plan.graph
        given = [t for t in graph.tensors.values() if t.kind in (TensorKind.INPUT, TensorKind.CONSTANT)]
        batch = sum(box_bytes(self.plan, tensor.name, whole(tensor.shape)) for tensor in given)
        for device in range(self.plan.device_count):
            self.hold(device, 0, self.end_ns, batch)
        partitions = {number for served in self.plan.served for number in served.shards}
        alone = {bucket.shards[0] for bucket in self.plan.buckets if len(bucket.devices) == 1}
        summed = {*(i for bucket in self.plan.buckets for i in bucket.shards), *self.plan.gathered, *idle_shards(self.plan), *partitions}
        for number, device, size, trainable in kept_shards(self.plan):
            states = optimizer_states if trainable else 0
            self.hold(device, 0, self.end_ns, (1 + states) * size + (COUNT_BYTES if states > 1 else 0))
            if number in summed:
                uses = self.plan.shards[number].uses
                begins = [self._backward[tile][0] for tile, _ in uses if tile in self._backward] if number in alone else [0]
                self.hold(device, min(begins, default=self.end_ns), self.end_ns, size)

    def synchronized(self) -> None:
        """What devices have of parameters that servers keep, and what they exchange of these and of gathered rows."""
        for served in self.plan.served:
            begun = self._named.get(pull_name(served), (0, 0))[0] if served.sparse else 0
            done = self._named.get(push_name(served), (0, 0))[1] if served.sparse else self.end_ns
            ends = [self._last(tile) for tile, _ in served.uses]
            for device, size in reader_bytes(self.plan, served).items():
                self.hold(device, begun, max(done, *ends), 2 * size)
            if push_name(served) in self._named:
                start = self._named[push_name(served)][0]
                served_ns = [self._named[serve_name(served, index)][1] for index in range(len(served.shards))]
                for (device, size), end in zip(served_gradients(self.plan, served), served_ns, strict=True):
                    self.hold(device, start, end, size)
        for number in self.plan.gathered:
            start, _ = self._named.get(gather_name(self.plan, number), (self.end_ns, 0))
            for device in self.plan.shards[number].devices:
                self.hold(device, start, self.end_ns, gathered_bytes(self.plan, number))

    def values(self) -> None:
        """What tiles make and keep, and their copies of parts of the batch and of parameters."""
        plan, graph = self.plan, self.plan.graph
        read: dict[int, int] = {}
        for (number, place), holding in self._pieces():
            read[holding] = max(read.get(holding, 0), self._read(plan.fetches[number], (number, place)), self._answered(number, holding))
        summed: dict[tuple[int, int], int] = {}
        for reduction in plan.reductions:  # partial results wait for the gradient of their sum
            begins = self._summed_from(reduction)[0]
            summed.update({(tile, reduction.output): max(begins, self._begun.get(self._segment[tile], 0)) for tile in reduction.tiles})
        ends = {(held.tile, held.tensor): read.get(i, 0) for i, held in enumerate(plan.holdings) if held.reduction is None}
        given = {t.name for t in graph.tensors.values() if t.kind in (TensorKind.INPUT, TensorKind.CONSTANT)}
        assembled = assembled_regions(plan)
        copies: dict[tuple[int, str, Box], Span] = {}
        for number, (tile, kept) in enumerate(zip(plan.tiles, memory.kept_bytes(plan), strict=True)):
            start, last = self._forward[number][0], self._last(number)
            op = plan.operator(tile)
            for k, (out, box) in enumerate(zip(op.outputs, tile.outputs, strict=True)):
                size = box_bytes(plan, out.tensor, box)
                until = max(self._needed(number, out.tensor), ends.get((number, out.tensor), 0), summed.get((number, k), 0))
                self.hold(tile.device, start, until, size)
                kept -= size
            self.hold(tile.device, start, last, kept)
            self.hold(tile.device, *self._forward[number], memory.passing_bytes(plan, tile)[0])
            reads = [(o.tensor, box) for o, box in zip(op.inputs, tile.inputs, strict=True) if o.tensor in given]
            parameters = ((o.tensor, box) for o, box in zip(op.parameters, tile.parameters, strict=True))
            reads += [(name, box) for name, box in parameters if (tile.device, name, box) in assembled]
            for tensor, box in reads:
                own = self._needed(number, tensor)
                before = copies.get((tile.device, tensor, box), (start, own))
                copies[tile.device, tensor, box] = (min(before[0], start), max(before[1], own))
        for (device, tensor, box), (start, end) in copies.items():
            if tensor not in given or not in_one_piece(box, graph.tensors[tensor].shape):
                self.hold(device, start, end, assembled.get((device, tensor, box), box_bytes(plan, tensor, box)))

    def fetched(self) -> None:
        """Regions that are put together or received, and what comes for them apart."""
        plan = self.plan
        apart = received_apart(plan)
        for number, fetch in enumerate(plan.fetches):
            size, ends = box_bytes(plan, fetch.tensor, fetch.box), [self._needed(tile, fetch.tensor) for tile, _ in fetch.consumers]
            remote = [place for place, piece in enumerate(fetch.pieces) if is_remote(plan, fetch, piece)]
            if remote:
                arrivals = [self._brought[number, place] for place in remote]
                begun = min(start for start, _ in arrivals)
                answers = [self._returned[number, place][0] for place in remote if (number, place) in self._returned]
                self.hold(fetch.device, begun, max([*ends, *answers]), size)
                joined = min(self._forward[tile][1] for tile, _ in fetch.consumers)
                for place, (start, _) in zip(remote, arrivals, strict=True):
                    if (number, place) in apart:
                        self.hold(fetch.device, start, joined, box_bytes(plan, fetch.tensor, fetch.pieces[place].box))
            elif len(fetch.pieces) > 1:
                for (tile, _), end in zip(fetch.consumers, ends, strict=True):
                    self.hold(fetch.device, self._forward[tile][0], end, size)

    def summed(self) -> None:
        """Sums of partial results, or the cells that are left of them."""
        plan = self.plan
        ends: dict[int, int] = {}
        for (number, place), holding in self._pieces():
            summed = plan.holdings[holding].reduction
            if summed is not None:
                ends[summed] = max(ends.get(summed, 0), self._read(plan.fetches[number], (number, place)), self._answered(number, holding))
        for number, reduction in enumerate(plan.reductions):
            start, done = self._summed_from(reduction)
            boxes = reduction.cells or [reduction.box] * len(reduction.devices)
            for device, box in zip(reduction.devices, boxes, strict=True):
                size = box_bytes(plan, reduced_tensor(plan, reduction), box)
                self.hold(device, start, max(done, ends.get(number, done)), size)
                if reduction.cells:  # what the others send for the cell
                    self.hold(device, start, done, (len(boxes) - 1) * size)

    def gradients(self) -> None:
        """Gradients between operators, and those of parameters that a backward task makes while it runs."""
        plan, graph = self.plan, self.plan.graph
        begun: dict[int, int] = {}
        added: dict[int, list[tuple[Span, int]]] = {}
        for (number, place), holding in self._pieces():
            fetch = plan.fetches[number]
            spans = [self._backward[tile] for tile, _ in fetch.consumers if tile in self._backward]
            if not spans or not graph.tensors[fetch.tensor].requires_grad:
                continue
            start = min(start for start, _ in spans)
            back = self._returned.get((number, place))
            if back is not None:  # first where it was computed, then where it goes
                self.hold(fetch.device, start, back[1], box_bytes(plan, fetch.tensor, fetch.pieces[place].box))
                start = back[0]
            begun[holding] = min(begun.get(holding, start), start)
            if back is None:
                added.setdefault(holding, []).extend((span, box_bytes(plan, fetch.tensor, fetch.pieces[place].box)) for span in spans)
        for holding, parts in added.items():
            for (start, end), size in sorted(parts)[1:]:  # beside what it is added to
                self.hold(plan.holdings[holding].device, start, end, size)
        for holding, start in begun.items():
            held = plan.holdings[holding]
            makers = [held.tile] if held.reduction is None else plan.reductions[held.reduction].tiles
            own = [self._backward[tile][1] for tile in makers if plan.tiles[tile].device == held.device and tile in self._backward]
            self.hold(held.device, start, max(own, default=start), box_bytes(plan, held.tensor, held.box))
        compact = compact_parameters(plan)
        for number, (start, end) in self._backward.items():
            tile = plan.tiles[number]
            operands = zip(plan.operator(tile).parameters, tile.parameters, strict=True)
            trained = ((o.tensor, box) for o, box in operands if graph.tensors[o.tensor].requires_grad)
            made = sum(operand_bytes(plan, compact, tile, name, box) for name, box in trained)
            self.hold(tile.device, start, end, made + memory.passing_bytes(plan, tile)[1])

    def sent(self) -> None:
        """Copies that were made to send a message, until its answer is there; gradients that were sent, until others push them out."""
        plan = self.plan
        leaving: list[list[tuple[int, int]]] = [[] for _ in range(plan.device_count)]
        for message in plan.messages:
            part = message.parts[0]
            back = self._returned.get(part)
            for source, size in copied_to_send(plan, message.parts):
                self.hold(source, self._brought[part][0], self.end_ns if back is None else back[0], size)
            if back is not None:
                given = [plan.fetches[number].tensor for number, _ in message.parts]
                boxes = [plan.fetches[number].pieces[place].box for number, place in message.parts]
                wanted = [box_bytes(plan, t, box) for t, box in zip(given, boxes, strict=True) if plan.graph.tensors[t].requires_grad]
                leaving[message.target].append((back[1], sum(wanted)))
        for device, sends in enumerate(leaving):
            sends.sort()
            together = list(accumulate(size for _, size in sends))
            for i, (begin, size) in enumerate(sends):
                pushed_out = max(i + 1, bisect_right(together, together[i] - size + SENT_BYTES))
                self.hold(device, begin, sends[pushed_out][0] if pushed_out < len(sends) else self.end_ns, size)

    def _pieces(self) -> Iterator[tuple[Part, int]]:
        """Every piece of every fetch, with its holding."""
        for number, fetch in enumerate(self.plan.fetches):
            for place, piece in enumerate(fetch.pieces):
                yield (number, place), piece.holding

    def _read(self, fetch: Fetch, part: Part) -> int:
        """When a holding has been read for the last time for a piece: by tasks here, by what puts it together, or by what sends it away."""
        brought = self._brought.get(part)
        if brought is not None:
            return brought[1]
        if len(fetch.pieces) > 1:
            return max(self._forward[tile][1] for tile, _ in fetch.consumers)
        return max(self._needed(tile, fetch.tensor) for tile, _ in fetch.consumers)

    def _needed(self, number: int, tensor: str) -> int:
        """Until when a tile needs its region of one of its operands: its backward task, if autograd keeps that."""
        tile = self.plan.tiles[number]
        op = self.plan.operator(tile)
        found = memory.footprint(self.plan.graph, op, tile.intervals)
        kept = found is None or any(o.tensor == tensor for k, o in enumerate((*op.inputs, *op.parameters, *op.outputs)) if k in found.keeps)
        return self._last(number) if kept else self._forward[number][1]

    def _answered(self, number: int, holding: int) -> int:
        """Until when a holding waits for the gradient of a fetch that another segment reads: the start of its own one's backward pass."""
        held, fetch = self.plan.holdings[holding], self.plan.fetches[number]
        readers = [tile for tile, _ in fetch.consumers if tile in self._backward]
        if not readers or not self.plan.graph.tensors[held.tensor].requires_grad:
            return 0
        makers = [held.tile] if held.reduction is None else self.plan.reductions[held.reduction].tiles
        segments = {self._segment[tile] for tile in makers if self.plan.tiles[tile].device == held.device}
        if held.reduction is None and {self._segment[tile] for tile in readers} <= segments:
            return 0
        return min((self._begun.get(segment, 0) for segment in segments), default=0)

    def _segments(self) -> list[int]:
        """Tile -> the first tile of its segment: as the runtime cuts them, before what is received or summed is first read."""
        plan = self.plan
        first, current = [0] * len(plan.tiles), [-1] * plan.device_count
        reads: dict[int, list[int]] = {}
        for number, fetch in enumerate(plan.fetches):
            holdings = [plan.holdings[piece.holding] for piece in fetch.pieces]
            if any(held.device != fetch.device or held.reduction is not None for held in holdings):
                for tile, _ in fetch.consumers:
                    reads.setdefault(tile, []).append(number)
        started: set[int] = set()
        for tile in sorted(range(len(plan.tiles)), key=lambda tile: (self._forward[tile][0], tile)):
            device, new = plan.tiles[tile].device, set(reads.get(tile, ())) - started
            if new or current[device] < 0:
                current[device] = tile
            started |= new
            first[tile] = current[device]
        return first

    def _summed_from(self, reduction: Reduction) -> Span:
        """When the devices of a reduction sum; where there is but one, when its last tile runs."""
        name = reduce_name(self.plan.graph.operators[reduction.operator], reduction)
        return self._named.get(name, max((self._forward[tile] for tile in reduction.tiles), key=lambda span: span[1]))

    def _last(self, tile: int) -> int:
        """End of a tile's backward task, or of its forward task if it has none."""
        return self._backward.get(tile, self._forward[tile])[1]

    def _name(self, carrier: Message | Exchange, *, gradient: bool) -> str:
        if isinstance(carrier, Exchange):
            return exchange_name(self.plan, carrier, gradient=gradient)
        return message_name(self.plan, carrier, gradient=gradient)
