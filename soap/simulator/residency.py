"""Memory over the simulated time: what each device holds from when to when. ``memory`` bounds it for any order of the tasks.

Held all the time: parameter shards, optimizer states, the buffers of gradients that are summed over devices, the whole batch and constants.
A tile's outputs, what it saves, and the copies of its inputs live from its forward task to its own backward task and the last one (or
transfer) that reads them; a fetched region from its first arrival to the last backward task of its consumers; a gradient on its way from
the first task that gives a part of it to the backward task that takes it; what is sent until it has certainly left. While a tile's task
runs, what its calls pass to each other is there as well. Not counted are copies that a library may make of what it sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from soap.graph import TensorKind
from soap.regions import Box, in_one_piece, whole
from soap.simulator import memory
from soap.simulator.buckets import idle_shards
from soap.simulator.flows import box_bytes, reduced_tensor
from soap.simulator.memory import MemoryUse
from soap.simulator.parameter_memory import (
    COUNT_BYTES,
    assembled_regions,
    compact_parameters,
    gathered_bytes,
    kept_shards,
    operand_bytes,
    reader_bytes,
    served_gradients,
    updating_bytes,
)
from soap.simulator.plan import (
    Exchange,
    Fetch,
    Message,
    Part,
    Pattern,
    Reduction,
    exchange_name,
    gather_name,
    message_name,
    pull_name,
    push_name,
    reduce_name,
    remote_parts,
    serve_name,
    update_name,
)
from soap.simulator.tasks import Schedule, TaskGraph, TaskKind
from soap.simulator.transit import Send, copied_to_send, is_remote, packed_by_source, received_apart, send_spans

Span = tuple[int, int]
"""(start, end) of a task, in nanoseconds."""

ENDS, EARLY, LATE, BEGINS = range(4)
"""In which order things happen at one time."""


ALLOWANCE = 0.06
"""So much more may be held than at the simulated times: where nothing depends on it, tasks run in another order (a library lets go of what
it has summed when its thread comes to it, segments run backward one after the other). As measured: ``docs/accuracy.md``."""


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
    held.assembled()
    held.fetched()
    held.summed()
    held.gradients()
    held.sent()
    held.updated(optimizer_states)
    return tuple(_curve(changes) for changes in held.changes)


def expected_peaks(curves: Iterable[MemoryCurve], bounds: Iterable[MemoryUse]) -> tuple[int, ...]:
    """Each device's peak, with an allowance for what is not simulated, but not above the bound for any order."""
    pairs = zip(curves, bounds, strict=True)
    return tuple(min(bound.total, round((1 + ALLOWANCE) * curve.peak_bytes)) for curve, bound in pairs)


def _curve(changes: list[tuple[int, int, int]]) -> MemoryCurve:
    level, points = 0, {0: 0}
    for time_ns, together in groupby(sorted(changes), key=itemgetter(0)):
        most = 0
        for _, order, change in together:
            level += change
            if order == EARLY:
                most = level
        points[time_ns] = max(level, most)
    return MemoryCurve(np.array(list(points), np.int64), np.array(list(points.values()), np.int64))


class _Held:
    """Collects changes: for each device (time, bytes that come or go)."""

    def __init__(self, tasks: TaskGraph, schedule: Schedule) -> None:
        self.plan, self.end_ns = tasks.plan, schedule.makespan_ns
        self._sends: dict[int, list[Send]] = {}
        self.changes: list[list[tuple[int, int, int]]] = [[] for _ in range(self.plan.device_count)]
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

    def hold(self, device: int, start_ns: int, end_ns: int, size: int, *, early: bool = False, late: bool = False) -> None:
        """A device holds so many bytes for so long. At one time ends come before beginnings; but what begins ``early`` is made from what
        ends ``late``."""
        if size and end_ns >= start_ns + (not (early or late)):
            ends = LATE if late or end_ns == start_ns else ENDS
            self.changes[device] += [(start_ns, EARLY if early else BEGINS, size), (end_ns, ends, -size)]

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
        """What tiles make and keep, and their copies of parts of the batch."""
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
        copies: dict[tuple[int, str, Box], Span] = {}
        for number, (tile, kept) in enumerate(zip(plan.tiles, memory.kept_bytes(plan), strict=True)):
            start, last = self._forward[number][0], self._last(number)
            op = plan.operator(tile)
            for k, (out, box) in enumerate(zip(op.outputs, tile.outputs, strict=True)):
                size = box_bytes(plan, out.tensor, box)
                until = max(self._needed(number, out.tensor), ends.get((number, out.tensor), 0), summed.get((number, k), 0))
                self.hold(tile.device, start, until, size, late=True)
                kept -= size
            self.hold(tile.device, start, last, kept)
            self.hold(tile.device, *self._forward[number], memory.passing_bytes(plan, tile)[0])
            reads = [(o.tensor, box) for o, box in zip(op.inputs, tile.inputs, strict=True) if o.tensor in given]
            for tensor, box in reads:
                own = self._needed(number, tensor)
                before = copies.get((tile.device, tensor, box), (start, own))
                copies[tile.device, tensor, box] = (min(before[0], start), max(before[1], own))
        for (device, tensor, box), (start, end) in copies.items():
            if not in_one_piece(box, graph.tensors[tensor].shape):
                self.hold(device, start, end, box_bytes(plan, tensor, box))

    def assembled(self) -> None:
        """Regions of parameters that are put together of several shards, or of rows."""
        compact = compact_parameters(self.plan)
        copies: dict[tuple[int, str, Box], tuple[int, int, int]] = {}
        for tile, tensor, box, size in assembled_regions(self.plan):
            key = (tile if tensor in compact else self._segment[tile], tensor, box)
            start, own = self._forward[tile][0], self._needed(tile, tensor)
            first, last, _ = copies.get(key, (start, own, size))
            copies[key] = (min(first, start), max(last, own), size)
        for (tile, _, _), (start, end, size) in copies.items():
            self.hold(self.plan.tiles[tile].device, start, end, size)

    def fetched(self) -> None:
        """Regions that are put together or received, and what comes for them apart."""
        plan, graph = self.plan, self.plan.graph
        apart = received_apart(plan)
        for number, fetch in enumerate(plan.fetches):
            size, ends = box_bytes(plan, fetch.tensor, fetch.box), [self._needed(tile, fetch.tensor) for tile, _ in fetch.consumers]
            remote = [place for place, piece in enumerate(fetch.pieces) if is_remote(plan, fetch, piece)]
            if remote:
                arrivals = [self._brought[number, place] for place in remote]
                begun = min(start for start, _ in arrivals)
                taken = self._taken(number) if any(tile in self._backward for tile, _ in fetch.consumers) else 0
                self.hold(fetch.device, begun, max([*ends, taken if graph.tensors[fetch.tensor].requires_grad else 0]), size, late=True)
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
                self.hold(device, start, max(done, ends.get(number, done)), size, early=True, late=True)  # of partial results
                if reduction.cells:  # what is summed, what others are sent of it, and what they send for the cell
                    total = box_bytes(plan, reduced_tensor(plan, reduction), reduction.box)
                    self.hold(device, start, start, total, early=True)
                    self._send(device, start, self._arrived(device, (start, done)), total - size)
                    self.hold(device, start, done, (len(boxes) - 1) * size, early=True)

    def gradients(self) -> None:
        """Gradients between operators, and of parameters."""
        plan, graph = self.plan, self.plan.graph
        made: dict[int, int] = {}
        added: dict[int, list[tuple[Span, int]]] = {}
        apart: set[int] = set()
        for number, fetch in enumerate(plan.fetches):
            spans = [self._backward[tile] for tile, _ in fetch.consumers if tile in self._backward]
            if not spans or not graph.tensors[fetch.tensor].requires_grad:
                continue
            start = min(start for start, _ in spans)
            if any(is_remote(plan, fetch, piece) for piece in fetch.pieces):  # a leaf as a whole, until all have had their parts
                self.hold(fetch.device, start, self._taken(number), box_bytes(plan, fetch.tensor, fetch.box), late=True)
                apart |= {piece.holding for piece in fetch.pieces}
                continue
            for piece in fetch.pieces:
                made[piece.holding] = min(made.get(piece.holding, start), start)
                added.setdefault(piece.holding, []).extend((span, box_bytes(plan, fetch.tensor, piece.box)) for span in spans)
        for holding, parts in added.items():
            for (start, end), size in sorted(parts)[1:]:  # beside what it is added to
                self.hold(plan.holdings[holding].device, start, end, size)
        for holding in made.keys() | apart:
            self._collected(holding, made.get(holding), holding in apart)
        for summed in dict.fromkeys(held.reduction for i, held in enumerate(plan.holdings) if i in made or i in apart):
            if summed is not None:
                self._summed_gradient(summed)
        self._returns()
        self._parameter_gradients()

    def _parameter_gradients(self) -> None:
        """Those that a backward task makes, and what autograd adds up of a segment's tasks. What a single device keeps is counted from the
        first one on (``always``): the first gradient is itself what is kept, unless it is a view, as those of transposed weights."""
        plan, graph = self.plan, self.plan.graph
        compact = compact_parameters(plan)
        kept = {i for bucket in plan.buckets if len(bucket.devices) == 1 for i in bucket.shards}
        alone = {(plan.shards[i].parameter, plan.shards[i].box) for i in kept}
        shared: dict[tuple[int, str, Box], list[tuple[Span, int]]] = {}
        for number, (start, end) in self._backward.items():
            tile = plan.tiles[number]
            for o, box in zip(plan.operator(tile).parameters, tile.parameters, strict=True):
                if graph.tensors[o.tensor].requires_grad:
                    size = operand_bytes(plan, compact, tile, o.tensor, box)
                    shared.setdefault((self._segment[number], o.tensor, box), []).append(((start, end), size))
            self.hold(tile.device, start, end, memory.passing_bytes(plan, tile)[1])
        for (segment, name, box), uses in shared.items():
            device = plan.tiles[segment].device
            uses.sort()
            for (start, end), size in uses[1 if (name, box) in alone and name in graph.sparse else 0 :]:
                self.hold(device, start, end, size)
            for ((_, begun), _), ((_, end), size) in pairwise(uses if (name, box) not in alone else ()):
                self.hold(device, begun, end, size)
            if len(uses) > 1 and name not in graph.sparse:  # the first sum of views is a third tensor
                self.hold(device, *uses[1][0], uses[1][1])

    def _collected(self, holding: int, made: int | None, apart: bool) -> None:
        """A holding's gradient: as its readers here leave it on a leaf, from ``made`` on; if others give parts of it (``apart``), these are
        added up in another tensor, when it is wanted."""
        held = self.plan.holdings[holding]
        wanted, end = self._wanted(holding)
        size = box_bytes(self.plan, held.tensor, held.box)
        if not apart:
            self.hold(held.device, wanted if made is None else made, end, size)
            return
        if made is not None:
            self.hold(held.device, made, wanted, size, late=True)
        self.hold(held.device, wanted, end, size, early=True)

    def _summed_gradient(self, number: int) -> None:
        """What the members of a sum bring together of its gradient."""
        plan, reduction = self.plan, self.plan.reductions[number]
        name = reduce_name(plan.graph.operators[reduction.operator], reduction, gradient=True)
        if name not in self._named:
            return
        start, tensor = self._named[name][0], reduced_tensor(plan, reduction)
        size = box_bytes(plan, tensor, reduction.box)
        for place, device in enumerate(reduction.devices):
            tiles = [tile for tile in reduction.tiles if plan.tiles[tile].device == device and tile in self._backward]
            begun = min((self._begun[self._segment[tile]] for tile in tiles), default=start)
            self.hold(device, start, max((self._backward[tile][1] for tile in tiles), default=start), size, early=True)
            if reduction.cells:
                self._send(device, start, self.end_ns, len(reduction.cells) * box_bytes(plan, tensor, reduction.cells[place]))
                self.hold(device, start, begun, size, late=True)  # where the others' cells land

    def _returns(self) -> None:
        """Gradients that come back from other devices: where each is received, and where they land together; and what is sent for that."""
        plan = self.plan
        carriers: list[Message | Exchange] = [*plan.messages, *plan.exchanges]
        for carrier in carriers:
            back = self._returned.get(carrier.parts[0])
            if back is None:
                continue
            rooms: dict[int, list[tuple[int, int]]] = {}
            leaving: dict[int, int] = {}
            told = carrier.parts[:1] if isinstance(carrier, Exchange) and carrier.pattern is Pattern.BROADCAST else carrier.parts
            for source, target, box, holding in remote_parts(plan, carrier.parts):
                size = box_bytes(plan, plan.holdings[holding].tensor, box)
                leaving[target] = leaving.get(target, 0) + size
                rooms.setdefault(source, []).append((holding, size))
            for source, own in rooms.items():
                own = own[: len(told)]
                for holding, size in own:
                    self.hold(source, back[0], self._wanted(holding)[0], size, late=True)
                if len(own) > 1:
                    first = min(self._wanted(holding)[0] for holding, _ in own)
                    self.hold(source, back[0], first, sum(size for _, size in own), late=True)
            for target, size in leaving.items():
                self._send(target, back[0], self._arrived(target, back), size)

    def _wanted(self, holding: int) -> Span:
        """When a holding's gradient is added up, and until when it is there."""
        held = self.plan.holdings[holding]
        makers = [held.tile] if held.reduction is None else self.plan.reductions[held.reduction].tiles
        own = [tile for tile in makers if self.plan.tiles[tile].device == held.device and tile in self._backward]
        begun = min((self._begun[self._segment[tile]] for tile in own), default=self.end_ns)
        end = max((self._backward[tile][1] for tile in own), default=self.end_ns)
        if held.reduction is not None:
            reduction = self.plan.reductions[held.reduction]
            name = reduce_name(self.plan.graph.operators[reduction.operator], reduction, gradient=True)
            if name in self._named:
                start = self._named[name][0]
                return start, start
        return begun, end

    def _taken(self, number: int) -> int:
        """When the last of those that take parts of a fetched region's gradient has had them."""
        fetch = self.plan.fetches[number]
        remote = [self._returned[number, k][0] for k in range(len(fetch.pieces)) if (number, k) in self._returned]
        local = [self._wanted(piece.holding)[0] for piece in fetch.pieces if not is_remote(self.plan, fetch, piece)]
        return max([*remote, *local], default=0)

    def sent(self) -> None:
        """What devices give away in the forward pass, and what is on its way out."""
        plan = self.plan
        for message in plan.messages:
            part = message.parts[0]
            back = self._returned.get(part)
            start, told = self._brought[part][0], self.end_ns if back is None else back[0]
            size = sum(box_bytes(plan, plan.holdings[holding].tensor, box) for _, _, box, holding in remote_parts(plan, message.parts))
            self._send(message.source, start, told, size, sum(held for _, held in copied_to_send(plan, message.parts)))
        for exchange in plan.exchanges:
            span = self._brought[exchange.parts[0]]
            if exchange.pattern is Pattern.BROADCAST:
                for source, size in copied_to_send(plan, exchange.parts[:1]):
                    self._send(source, span[0], span[1], size)
                continue
            for source, size in packed_by_source(plan, exchange).items():
                self._send(source, span[0], self._arrived(source, span), size)
        for device, sends in self._sends.items():
            for start, end, size in send_spans(sends):
                self.hold(device, start, end, size)

    def _arrived(self, device: int, span: Span) -> int:
        """When it is seen that what was sent in this time has left: libraries for CPUs cannot tell before they are asked."""
        return span[1] if device in self.plan.accelerators else self.end_ns

    def _send(self, device: int, start_ns: int, answer_ns: int, size: int, held: int | None = None) -> None:
        self._sends.setdefault(device, []).append(Send(start_ns, answer_ns, size, size if held is None else held))

    def updated(self, optimizer_states: int) -> None:
        """What the optimizer makes for its step, which begins when all gradients are there, of partitions as well. On CPUs those of
        ``soap-run`` make nothing."""
        spans: dict[int, Span] = {}
        for served in self.plan.served:
            for index, number in enumerate(served.shards):
                device = self.plan.shards[number].devices[0]
                spans[device] = max(spans.get(device, (0, 0)), self._named.get(serve_name(served, index), (0, 0)))
        sizes = updating_bytes(self.plan, optimizer_states)
        for device in self.plan.accelerators:
            size = sizes[device]
            self.hold(device, *self._named.get(update_name(device), spans.get(device, (0, 0))), size)

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
