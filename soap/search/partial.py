"""A lower bound of the iteration time of every strategy that begins with certain configurations, in the order of the graph's operators.

Three times are added up; they follow one chain of dependent tasks through the whole iteration.

- *Head*: when the forward results of the last decided operator are there. Each tile waits for what it reads.
- *Middle*: from there through the undecided operators to the loss, and back to where its gradient is there. Of each operator the
  configuration counts that gives the least, by a table made from the last operator to the first.
- *Tail*: its backward pass, that of the decided operators before it, the sums of their gradients, and on the device where that ends all
  updates of what it is known to keep.

What has to come from another device takes at least a message of so many bytes over the best way there: collectives and joint messages
are not quicker. Where a value has replicas the best one counts. What devices compute is the second bound, divided among all of them for
operators that are undecided. Waiting for devices and links is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from soap.graph import Operand
from soap.regions import Box, volume
from soap.search.bounds import always_covered, certain_gradients, is_partitioned
from soap.search.durations import TileDurations
from soap.search.space import Space
from soap.simulator.communication import Communication
from soap.simulator.costs import CostModel
from soap.simulator.tiling import tiles_of
from soap.strategy import OpConfig
from soap.topology import Topology

NEVER = -(2**62)
"""Nanoseconds until what need not be waited for."""


@dataclass(slots=True)
class _Holding:
    """Tiles of one replica that have one part of the outputs, or a sum for it, which takes ``sum_ns`` at least."""

    part: int
    tiles: list[int]
    devices: set[int]
    sum_ns: int = 0


@dataclass(slots=True)
class Choice:
    """One configuration of an operator. ``forward``, ``backward``: nanoseconds by tile. ``finish``: by tile and device, what lies at least
    between its backward pass and the device's update. ``updates``, ``load``: by device, the latter with updates."""

    config: OpConfig
    devices: list[int]
    forward: list[int]
    backward: list[int]
    finish: list[Longs]
    updates: Longs
    boxes: list[list[Box]]
    reads: list[list[Box]]
    parts: int
    holdings: list[_Holding]
    load: Longs


Longs = list[int]
Ready = dict[int, int]
"""Device -> nanoseconds; -1: anywhere."""


@dataclass(slots=True)
class State:
    """A decided operator. By part of its outputs: when it is there, and what lies between its gradient and each device's update.
    ``updates`` and ``load``: by device, of all operators so far."""

    head: list[Ready]
    tail: list[dict[int, Longs]]
    updates: Longs
    load: Longs
    bound_ns: int


@dataclass(frozen=True, slots=True)
class _Edge:
    producer: int
    output: int
    operand: int
    itemsize: int
    gradient: bool
    partitioned: bool


@dataclass(slots=True)
class _Flow:
    """Tile ``tile`` reads ``part``; ``delay_ns`` if that comes from elsewhere, else -1."""

    tile: int
    part: int
    delay_ns: int


@dataclass
class PartialBound:
    """Bounds for one space on one cluster; parameters are synchronized by all-reduces."""

    space: Space
    topology: Topology
    costs: CostModel
    choices: list[list[Choice]] = field(init=False)

    def __post_init__(self) -> None:
        self.graph = self.space.graph
        self.communication = Communication(self.topology)
        self._durations = TileDurations(self.graph, self.topology, self.costs)
        self._certain = certain_gradients(self.graph)
        self._nowhere = [NEVER] * self.topology.device_count
        self._messages: dict[tuple[int, int], int] = {}
        self._flows: dict[tuple[int, int, int, int], list[_Flow]] = {}
        self._edges = [list(self._edges_of(position)) for position in range(len(self.graph.operators))]
        self.choices = [
            [self._choice(position, config) for config in own.structured()] for position, own in enumerate(self.space.operators)
        ]
        least = [min(sum(choice.load) for choice in own) for own in self.choices]
        self._rest = [sum(least[position:]) for position in range(len(least) + 1)]
        self._middle: list[list[int]] = [[] for _ in self.choices]
        for position in range(len(self.choices) - 1, -1, -1):
            self._middle[position] = self._middles(position)

    def assign(self, states: list[State], chosen: list[int], choice: int) -> State:
        """The next operator gets one of its choices; ``states`` and ``chosen``: those of the operators before it."""
        position = len(states)
        own = self.choices[position][choice]
        arrive, leave = [0] * len(own.devices), list(own.finish)
        for number, edge in enumerate(self._edges[position]):
            before = states[edge.producer]
            certain = edge.gradient and self._certain[edge.producer]
            for flow in self._flow(position, number, chosen[edge.producer], choice):
                where, delay_ns = (-1, flow.delay_ns) if flow.delay_ns >= 0 else (own.devices[flow.tile], 0)
                arrive[flow.tile] = max(arrive[flow.tile], before.head[flow.part][where] + delay_ns)
                if certain:
                    leave[flow.tile] = _later(leave[flow.tile], before.tail[flow.part][where], delay_ns)
        head: list[Ready] = [{} for _ in range(own.parts)]
        tail: list[dict[int, Longs]] = [{} for _ in range(own.parts)]
        back_ns = 0 if self._is_loss(position) else 1
        for holding in own.holdings:
            there = max(arrive[t] + own.forward[t] for t in holding.tiles) + holding.sum_ns
            after = self._nowhere
            for t in holding.tiles:
                after = _later(after, leave[t], own.backward[t] + back_ns * holding.sum_ns)
            for device in (*holding.devices, -1):
                head[holding.part][device] = min(there, head[holding.part].get(device, there))
                known = tail[holding.part].get(device)
                tail[holding.part][device] = after if known is None else [min(a, b) for a, b in zip(known, after, strict=True)]
        last = states[-1] if states else State([], [], [0] * self.topology.device_count, [0] * self.topology.device_count, 0)
        updates = [a + b for a, b in zip(last.updates, own.updates, strict=True)]
        path_ns = max(ready[-1] for ready in head)
        if self._certain[position]:
            rest = max(a + b for ready in tail for a, b in zip(ready[-1], updates, strict=True))
            path_ns += self._middle[position][choice] + max(0, rest)
        load = [a + b for a, b in zip(last.load, own.load, strict=True)]
        shared_ns = -(-(sum(load) + self._rest[position + 1]) // len(load))
        return State(head, tail, updates, load, max(path_ns, shared_ns, *load, last.bound_ns))

    def _is_loss(self, position: int) -> bool:
        return any(out.tensor == self.graph.loss for out in self.graph.operators[position].outputs)

    def _edges_of(self, position: int) -> Iterator[_Edge]:
        for number, operand in enumerate(self.graph.operators[position].inputs):
            if operand.tensor in self.graph.producers:
                producer, output = self.graph.producers[operand.tensor]
                tensor, out = self.graph.tensors[operand.tensor], self.graph.operators[producer].outputs[output]
                whole = is_partitioned(self.graph, producer, out)
                yield _Edge(producer, output, number, tensor.itemsize, tensor.requires_grad, whole)

    def _choice(self, position: int, config: OpConfig) -> Choice:
        """What a configuration means, as far as it depends on nothing else."""
        op, tiles = self.graph.operators[position], tiles_of(self.graph, position, config)
        devices = [tile.device for tile in tiles]
        table = self._durations(position, config.degrees)
        cells = len(tiles) // config.replicas
        times = [[int(table[self._durations.type_of[d], way, t % cells]) for t, d in enumerate(devices)] for way in (0, 1)]
        if not self.graph.needs_backward(op):
            times[1] = [0] * len(tiles)
        parts: dict[tuple[tuple[int, int], ...], int] = {}
        holdings: dict[tuple[int, int], _Holding] = {}
        boxes: list[list[Box]] = []
        for t, tile in enumerate(tiles):
            kept = tuple(own for own, factor in zip(tile.intervals, op.factors, strict=True) if not factor.summed)
            part = parts.setdefault(kept, len(parts))
            if part == len(boxes):
                boxes.append(list(tile.outputs))
            holding = holdings.setdefault((part, tile.replica), _Holding(part, [], set()))
            holding.tiles.append(t)
            holding.devices.add(tile.device)
        for holding in holdings.values():
            if len(holding.devices) > 1:
                outputs = zip(op.outputs, boxes[holding.part], strict=True)
                share = -(-min(volume(box) * self.graph.tensors[o.tensor].itemsize for o, box in outputs) // len(holding.devices))
                holding.sum_ns = min(self._message_ns(share, device) for device in holding.devices)
        finish, load = self._finish(position, config)
        updates = list(load)
        for t, device in enumerate(devices):
            load[device] += times[0][t] + (times[1][t] if self._certain[position] and config.replicas == 1 else 0)
        reads = [list(tile.inputs) for tile in tiles]
        return Choice(config, devices, times[0], times[1], finish, updates, boxes, reads, len(parts), list(holdings.values()), load)

    def _finish(self, position: int, config: OpConfig) -> tuple[list[Longs], Longs]:
        """By tile and device, the least time from the end of a backward pass to the device's update: sums of gradients over all copies.
        By device, the least time of the updates. A parameter of several operators counts at the first one, and only the update."""
        op, tiles = self.graph.operators[position], tiles_of(self.graph, position, config)
        finish, updates = [list(self._nowhere) for _ in tiles], [0] * self.topology.device_count
        for t, tile in enumerate(tiles):
            finish[t][tile.device] = 0
        for k, operand in enumerate(op.parameters):
            tensor = self.graph.tensors[operand.tensor]
            users = sorted({user for user, _ in self.graph.parameter_users[operand.tensor]})
            once = sum(other.tensor == operand.tensor for other in op.parameters) == 1
            if not tensor.requires_grad or users[0] != position or not once or not _cut_cleanly(operand):
                continue
            copies: dict[Box, set[int]] = {}
            for tile in tiles:
                copies.setdefault(tile.parameters[k], set()).add(tile.device)
            for box, devices in copies.items():
                for device in devices if volume(box) else ():
                    updates[device] += self.costs.update_ns(volume(box) * tensor.itemsize, self.topology.devices[device].type)
            for t, tile in enumerate(tiles if len(users) == 1 else ()):
                box = tile.parameters[k]
                devices = copies[box]
                if volume(box) and len(devices) > 1:
                    sum_ns = self.communication.allreduce(volume(box) * tensor.itemsize, tuple(sorted(devices)))[0]
                    finish[t] = [max(own, sum_ns) if d in devices else own for d, own in enumerate(finish[t])]
        return finish, updates

    def _message_ns(self, size: int, target: int) -> int:
        """The least time in which so many bytes come to a device from any other one."""
        key = (size, target)
        if key not in self._messages:
            others = [d for d in range(self.topology.device_count) if d != target]
            self._messages[key] = min(self.communication.transfer_ns(size, d, target) for d in others) - 1  # rounding
        return self._messages[key]

    def _flow(self, position: int, number: int, before: int, choice: int) -> list[_Flow]:
        """Who reads what on an edge, if both operators have these choices."""
        key = (position, number, before, choice)
        found = self._flows.get(key)
        if found is None:
            found = self._flows[key] = list(self._find_flow(self._edges[position][number], position, before, choice))
        return found

    def _find_flow(self, edge: _Edge, position: int, before: int, choice: int) -> Iterator[_Flow]:
        source, own = self.choices[edge.producer][before], self.choices[position][choice]
        held: list[set[int]] = [set() for _ in range(source.parts)]
        for holding in source.holdings:
            held[holding.part] |= holding.devices
        for tile, device in enumerate(own.devices):
            region = own.reads[tile][edge.operand]
            for part, boxes in enumerate(source.boxes):
                size = edge.itemsize * _common(region, boxes[edge.output])
                if size and device in held[part]:
                    yield _Flow(tile, part, -1)
                elif size:
                    yield _Flow(tile, part, self._message_ns(size, device) if edge.partitioned else 0)

    def _middles(self, position: int) -> list[int]:
        """By choice, the least from when all of the operator's results are there to when any of its parts has its gradient."""
        found = [0] * len(self.choices[position])
        if not self._certain[position]:
            return found
        for out in self.graph.operators[position].outputs:
            for reader, operand in self.graph.consumers.get(out.tensor, ()):
                if not self._certain[reader] or not always_covered(self.graph, reader, self.graph.operators[reader].inputs[operand]):
                    continue
                number = next(n for n, edge in enumerate(self._edges[reader]) if edge.operand == operand)
                edge = self._edges[reader][number]
                if not edge.gradient or not edge.partitioned:
                    continue
                for before in range(len(found)):
                    through = min(
                        self._through(reader, number, before, choice) + self._middle[reader][choice]
                        for choice in range(len(self.choices[reader]))
                    )
                    found[before] = max(found[before], through)
        return found

    def _through(self, reader: int, number: int, before: int, choice: int) -> int:
        """The least from an operator's results to those of its reader, and from the reader's gradients to its own."""
        own = self.choices[reader][choice]
        source = self.choices[self._edges[reader][number].producer][before]
        delays: list[dict[int, int]] = [{} for _ in range(source.parts)]
        for flow in self._flow(reader, number, before, choice):
            delays[flow.part][flow.tile] = max(0, flow.delay_ns)
        there, back = [], []
        for reading in delays:
            forward: Ready = {}
            backward: Ready = {}
            for holding in own.holdings:
                tiles = [t for t in holding.tiles if t in reading]
                if tiles:
                    ahead = max(reading[t] + own.forward[t] for t in tiles) + holding.sum_ns
                    behind = max(reading[t] + own.backward[t] for t in tiles) + (0 if self._is_loss(reader) else holding.sum_ns)
                    forward[holding.part] = min(ahead, forward.get(holding.part, ahead))
                    backward[holding.part] = min(behind, backward.get(holding.part, behind))
            there.append(max(forward.values(), default=0))
            worst = max if source.config.replicas == 1 else min  # a replica may have the gradients of one reader alone
            back.append(worst(backward.values(), default=0))
        return min(there) + min(back)


def _later(a: Sequence[int], b: Sequence[int], delay_ns: int) -> Longs:
    """Element by element, the larger of a and b + delay."""
    return [max(own, other + delay_ns) for own, other in zip(a, b, strict=True)]


def _common(a: Box, b: Box) -> int:
    """Elements that two regions have in common."""
    common = 1
    for (start, stop), (other_start, other_stop) in zip(a, b, strict=True):
        common *= max(0, min(stop, other_stop) - max(start, other_start))
    return common


def _cut_cleanly(operand: Operand) -> bool:
    """Whether tiles have either the same part of a parameter, or parts without common elements."""
    return all(dim.exact or (dim.factor is None and dim.scale != 0) for dim in operand.dims)
