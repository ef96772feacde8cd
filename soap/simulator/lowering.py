"""From a plan to timed tasks: what each tile, message, exchange, reduction, bucket and update takes, where, and after what.

``lower`` walks the operators forward, then backward, then the buckets, then the devices. Task ids are (phase, position, stage, a, b, c),
made only of places in the operator, parameter or device that a task belongs to, so that editing another operator leaves them alone; they
order tasks of equal ready time as the iteration does: forward operators first to last, backward last to first, synchronization, update.

Order in the runtime. ``reference.execution_order`` gives one total order of all tiles, which every rank follows for its own part of it.
Forward: before a tile its fetches that are not there yet, and after the last tile of a group its reduction; a message leaves as soon as
its pieces are there, an exchange takes place as soon as all of its pieces are. Backward: the tiles in reverse; before the first tile of a
group (in that reverse order) the reduction of its gradient; after the last consumer of what a message or exchange has brought (in that
reverse order) the gradients travel back; after the last use of its shards a bucket is summed. The optimizer runs once, at the end.
The simulator, where a device takes what is ready first, may swap backward tiles that do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from soap.regions import Box
from soap.simulator.buckets import bucket_bytes, idle_shards, shard_bytes
from soap.simulator.collectives import Flow, flow_links
from soap.simulator.communication import Communication
from soap.simulator.costs import CostModel
from soap.simulator.flows import Round, box_bytes, exchange_rounds, reduced_tensor, scatter_rounds
from soap.simulator.places import PlanPlaces
from soap.simulator.plan import (
    Exchange,
    Fetch,
    Message,
    Part,
    Pattern,
    Plan,
    Reduction,
    backward_name,
    exchange_name,
    forward_name,
    message_name,
    pull_name,
    push_name,
    reduce_name,
    remote_parts,
    serve_name,
    sync_name,
    update_name,
)
from soap.simulator.planning import PlanBuilder, build_plan
from soap.simulator.servers import Partition, core_type, partitions, serve_ns
from soap.simulator.tasks import Task, TaskGraph, TaskKind
from soap.simulator.tiling import Tile
from soap.topology import Topology

__all__ = ["PlanBuilder", "build_plan", "lower"]

FORWARD, BACKWARD, SYNC, UPDATE = range(4)
"""Phases, the first part of a task's id."""


def lower(plan: Plan, topology: Topology, costs: CostModel, communication: Communication | None = None) -> TaskGraph:
    """The timed tasks of one training iteration, predecessors first. ``communication``: of this topology, to keep its answers."""
    lowering = _Lowering(plan, costs, communication or Communication(topology))
    lowering.forward()
    lowering.backward()
    lowering.synchronize()
    return TaskGraph(plan, topology, tuple(lowering.tasks))


class _Lowering:
    """The state of one lowering. Tasks are named by their positions in ``tasks``.

    ``_forward``, ``_backward``: tile -> its task. ``_reduced``: reduction -> the tasks after which its sum is there. ``_brought``: part ->
    the task that brings it. ``_arrivals``: tile -> the tasks that bring its inputs. ``_gradients``: holding -> the tasks that bring a
    part of its gradient; empty if nobody sends one.
    """

    def __init__(self, plan: Plan, costs: CostModel, communication: Communication) -> None:
        self.plan = plan
        self.topology = communication.topology
        self.costs = costs
        self.communication = communication
        self.tasks: list[Task] = []
        self._forward: list[int] = []
        self._backward: dict[int, int] = {}
        self._reduced: dict[int, tuple[int, ...]] = {}
        self._gradients: list[list[int]] = [[] for _ in plan.holdings]
        self._brought: dict[Part, int] = {}
        self._arrivals: list[list[int]] = [[] for _ in plan.tiles]
        self._exchange_links: dict[frozenset[tuple[int, int]], tuple[int, ...]] = {}
        self._index = PlanPlaces(plan)

    def forward(self) -> None:
        """Transfers, tiles and reductions, operator by operator."""
        for position in range(len(self.plan.graph.operators)):
            for carrier in self._index.carriers[position]:
                self._carry(carrier)
            for fetch in self._index.fetches[position]:
                self._fetch(fetch)
            for tile in self._tiles(position):
                task = self._compute(tile, TaskKind.FORWARD, self._arrivals[self._place(tile)])
                self._forward.append(task)
            for place in self._index.reductions[position]:
                self._reduce(place)

    def backward(self) -> None:
        """Gradient reductions, tiles and gradient transfers, last operator first."""
        graph = self.plan.graph
        for position in range(len(graph.operators) - 1, -1, -1):
            if graph.needs_backward(graph.operators[position]):
                self._backward_tiles(position)
            for fetch in self._index.fetches[position]:  # the first reader's place, which may itself be without backward
                self._keep_gradient(self.plan.fetches[fetch])
            for carrier in self._index.carriers[position]:
                self._return_gradient(carrier)

    def _backward_tiles(self, position: int) -> None:
        arrivals: dict[int, list[int]] = {}
        for place in self._index.reductions[position]:
            reduced = self._reduced_gradient(place)
            for index in self.plan.reductions[place].tiles:
                arrivals.setdefault(index, []).extend(reduced)
        for tile in self._tiles(position):
            index = self._place(tile)
            own = [task for held in self._index.of_tile[index] for task in self._gradients[held]]
            gradient = [*own, *arrivals.get(index, ()), *self._loss_start(tile)]
            if gradient:
                self._backward[index] = self._compute(tile, TaskKind.BACKWARD, [self._forward[index], *gradient])

    def synchronize(self) -> None:
        """One all-reduce per bucket that several devices share, then one update per device, as the optimizer makes it."""
        positions = {tensor.name: position for position, tensor in enumerate(self.plan.graph.parameters)}
        ready: list[list[int]] = [[] for _ in range(self.plan.device_count)]
        for tile, task in self._backward.items():
            ready[self.plan.tiles[tile].device].append(task)
        for bucket in self.plan.buckets:
            if len(bucket.devices) == 1:
                continue
            first = self.plan.shards[bucket.shards[0]]
            after = [self._backward[tile] for i in bucket.shards for tile, _ in self.plan.shards[i].uses if tile in self._backward]
            place, size = (SYNC, positions[first.parameter], 0, first.index, 0, 0), bucket_bytes(self.plan, bucket)
            task = self._all_reduce(place, sync_name(self.plan, bucket), TaskKind.SYNC, size, bucket.devices, after)
            for device in bucket.devices:
                ready[device].append(task)
        self._serve(positions)
        for device, duration in self._updates().items():
            self._add((UPDATE, device, 0, 0, 0, 0), update_name(device), TaskKind.UPDATE, (device,), duration, ready[device])

    def _serve(self, positions: Mapping[str, int]) -> None:
        """Push, update and pull of what parameter servers keep."""
        plan = self.plan
        todo: dict[int, list[Partition]] = {}
        for part in partitions(plan, self.topology):
            todo.setdefault(part.served, []).append(part)
        for number, served in enumerate(plan.served):
            shard = plan.shards[served.shard]
            place, home = (positions[shard.parameter], shard.index), shard.devices[0]
            size = shard_bytes(plan.graph, shard)
            pushed: dict[int, list[int]] = {}
            for tile, _ in shard.uses:
                if tile in self._backward:
                    pushed.setdefault(plan.tiles[tile].device, []).append(self._backward[tile])
            for device in sorted(pushed.keys() - {home}):
                name = push_name(plan, served, device)
                pushed[device] = [self._move((SYNC, place[0], 1, place[1], 0, device), name, device, home, size, pushed[device])]
            arrived = [task for tasks in pushed.values() for task in tasks]
            updates = []
            for part in todo[number]:
                duration = serve_ns(self.costs, part.size, len(pushed), core_type(self.topology, part.host))
                own = (SYNC, place[0], 2, place[1], 0, part.index)
                updates.append(self._add(own, serve_name(plan, served, part.index), TaskKind.UPDATE, (part.resource,), duration, arrived))
            for device in shard.devices[1:]:
                self._move((SYNC, place[0], 3, place[1], 0, device), pull_name(plan, served, device), home, device, size, updates)

    def _move(self, place: tuple[int, ...], name: str, source: int, target: int, size: int, after: Iterable[int]) -> int:
        """A message that keeps parameters in step."""
        resources = self._link_resources(self.topology.route(source, target))
        return self._add(place, name, TaskKind.SYNC, resources, self.communication.transfer_ns(size, source, target), after, size)

    def _updates(self) -> dict[int, int]:
        """Device -> how long the updates of its shards take together, where there are any."""
        found: dict[int, int] = {}
        for device, size in device_updates(self.plan):
            found[device] = found.get(device, 0) + self.costs.update_ns(size, self.topology.devices[device].type)
        return dict(sorted(found.items()))

    def _tiles(self, position: int) -> tuple[Tile, ...]:
        first = self.plan.first_tile
        stop = first[position + 1] if position + 1 < len(first) else len(self.plan.tiles)
        return self.plan.tiles[first[position] : stop]

    def _place(self, tile: Tile) -> int:
        return self.plan.first_tile[tile.operator] + tile.index

    def _bytes(self, tensor: str, box: Box) -> int:
        return box_bytes(self.plan, tensor, box)

    def _ready(self, held: int) -> tuple[int, ...]:
        holding = self.plan.holdings[held]
        return (self._forward[holding.tile],) if holding.reduction is None else self._reduced[holding.reduction]

    def _fetch(self, number: int) -> None:
        """What a fetch's consumers wait for: the tasks that bring what is elsewhere, and those that make what is here."""
        fetch = self.plan.fetches[number]
        after: list[int] = []
        for place, piece in enumerate(fetch.pieces):
            brought = self._brought.get((number, place))
            after.extend(self._ready(piece.holding) if brought is None else (brought,))
        for tile, _ in fetch.consumers:
            self._arrivals[tile].extend(after)

    def _keep_gradient(self, fetch: Fetch) -> None:
        """Hand a fetched region's gradient to the holdings on its own device."""
        after = self._after_consumers(fetch)
        for piece in fetch.pieces if after else ():
            if self.plan.holdings[piece.holding].device == fetch.device:
                self._gradients[piece.holding].extend(after)

    def _after_consumers(self, fetch: Fetch) -> list[int]:
        """The tasks after which the region's gradient is complete; empty if it has none."""
        if not self.plan.graph.tensors[fetch.tensor].requires_grad:
            return []
        return [self._backward[tile] for tile, _ in fetch.consumers if tile in self._backward]

    def _carry(self, carrier: Message | Exchange) -> None:
        """The task of a message or exchange."""
        after = {task for *_, holding in remote_parts(self.plan, carrier.parts) for task in self._ready(holding)}
        task = self._carrier_task(carrier, carrier.parts, after, gradient=False)
        self._brought.update(dict.fromkeys(carrier.parts, task))

    def _return_gradient(self, carrier: Message | Exchange) -> None:
        """Send gradients back the way that the values came, once all their consumers have computed them."""
        found = {number: self._after_consumers(self.plan.fetches[number]) for number, _ in carrier.parts}
        active = tuple(part for part in carrier.parts if found[part[0]])
        if not active:
            return
        if isinstance(carrier, Exchange) and carrier.pattern is Pattern.BROADCAST:
            active = carrier.parts  # who has no gradient adds zeros
        after = {task for tasks in found.values() for task in tasks}
        task = self._carrier_task(carrier, active, after, gradient=True)
        for *_, holding in remote_parts(self.plan, active):
            self._gradients[holding].append(task)

    def _carrier_task(self, carrier: Message | Exchange, parts: Sequence[Part], after: Iterable[int], *, gradient: bool) -> int:
        number, piece = carrier.parts[0]
        fetch = self.plan.fetches[number]
        first, operand = fetch.consumers[0]
        tile = self.plan.tiles[first]
        place = self._id(tile.operator, 2 if gradient else 0, tile.index, operand, piece, gradient=gradient)
        if isinstance(carrier, Exchange):
            rounds = exchange_rounds(self.plan, carrier, parts, gradient=gradient)
            name = exchange_name(self.plan, carrier, gradient=gradient)
            return self._exchange(place, name, TaskKind.EXCHANGE, rounds, after)
        source, target = (carrier.target, carrier.source) if gradient else (carrier.source, carrier.target)
        moved = remote_parts(self.plan, parts)
        size = sum(self._bytes(self.plan.fetches[n].tensor, box) for (n, _), (_, _, box, _) in zip(parts, moved, strict=True))
        resources = self._link_resources(self.topology.route(source, target))
        duration = self.communication.transfer_ns(size, source, target)
        return self._add(place, message_name(self.plan, carrier, gradient=gradient), TaskKind.TRANSFER, resources, duration, after, size)

    def _exchange(self, place: tuple[int, ...], name: str, kind: TaskKind, rounds: Sequence[Round], after: Iterable[int]) -> int:
        flows = tuple(flow for own, _ in rounds for flow in own)
        duration = sum(self.communication.exchange_ns(own, reduced) for own, reduced in rounds)
        pairs = frozenset((source, target) for source, target, _ in flows)
        if pairs not in self._exchange_links:
            self._exchange_links[pairs] = self._link_resources(flow_links(self.topology, flows))
        return self._add(place, name, kind, self._exchange_links[pairs], duration, after, sum(size for *_, size in flows), flows=flows)

    def _compute(self, tile: Tile, kind: TaskKind, after: Iterable[int]) -> int:
        graph, device = self.plan.graph, self.topology.devices[tile.device].type
        if kind is TaskKind.FORWARD:
            name, duration = forward_name(self.plan.operator(tile), tile), self.costs.forward_ns(graph, tile, device)
        else:
            name, duration = backward_name(self.plan.operator(tile), tile), self.costs.backward_ns(graph, tile, device)
        place = self._id(tile.operator, 1, tile.index, gradient=kind is TaskKind.BACKWARD)
        return self._add(place, name, kind, (tile.device,), duration, after, tile=self._place(tile))

    def _reduce(self, place: int) -> None:
        """Sum partial results; on a single device that is part of running its tiles."""
        reduction = self.plan.reductions[place]
        after = tuple(self._forward[tile] for tile in reduction.tiles)
        self._reduced[place] = after
        if len(reduction.devices) > 1:
            self._reduced[place] = (self._reduce_task(reduction, after, gradient=False),)

    def _reduced_gradient(self, place: int) -> tuple[int, ...]:
        """The tasks after which every tile of the group has the gradient of the sum; empty if there is none."""
        reduction = self.plan.reductions[place]
        after = tuple(task for held in self._index.of_reduction[place] for task in self._gradients[held])
        if len(reduction.devices) > 1 and after:
            return (self._reduce_task(reduction, after, gradient=True),)
        return after

    def _reduce_task(self, reduction: Reduction, after: Iterable[int], *, gradient: bool) -> int:
        op = self.plan.graph.operators[reduction.operator]
        first = self.plan.tiles[reduction.tiles[0]].index
        place = self._id(reduction.operator, 0 if gradient else 2, first, reduction.output, gradient=gradient)
        name = reduce_name(op, reduction, gradient=gradient)
        if reduction.cells:
            return self._exchange(place, name, TaskKind.REDUCE, scatter_rounds(self.plan, reduction, gradient=gradient), after)
        size = self._bytes(reduced_tensor(self.plan, reduction), reduction.box)
        return self._all_reduce(place, name, TaskKind.REDUCE, size, reduction.devices, after)

    def _loss_start(self, tile: Tile) -> tuple[int, ...]:
        """The task after which a tile of the loss starts the backward pass with gradient 1: the loss itself. Replica 0 only."""
        graph = self.plan.graph
        producer, output = graph.producers.get(graph.loss, (-1, 0))
        if tile.operator != producer or tile.replica != 0:
            return ()
        for place in self._index.reductions[producer]:
            reduction = self.plan.reductions[place]
            if reduction.output == output and self._place(tile) in reduction.tiles:
                return self._reduced[place]
        return (self._forward[self._place(tile)],)

    def _all_reduce(
        self, place: tuple[int, ...], name: str, kind: TaskKind, size: int, devices: tuple[int, ...], after: Iterable[int]
    ) -> int:
        duration, links = self.communication.allreduce(size, devices)
        return self._add(place, name, kind, self._link_resources(links), duration, after, self.communication.allreduce_bytes(size, devices))

    def _link_resources(self, links: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.plan.device_count + link for link in links)

    def _id(self, position: int, stage: int, a: int, b: int = 0, c: int = 0, *, gradient: bool) -> tuple[int, ...]:
        if gradient:
            return (BACKWARD, len(self.plan.graph.operators) - 1 - position, stage, a, b, c)
        return (FORWARD, position, stage, a, b, c)

    def _add(
        self,
        place: tuple[int, ...],
        name: str,
        kind: TaskKind,
        resources: tuple[int, ...],
        duration_ns: int,
        after: Iterable[int],
        size: int = 0,
        tile: int | None = None,
        flows: tuple[Flow, ...] = (),
    ) -> int:
        self.tasks.append(Task(place, name, kind, resources, duration_ns, tuple(sorted(set(after))), size, tile, flows))
        return len(self.tasks) - 1


def device_updates(plan: Plan) -> Iterator[tuple[int, int]]:
    """(device, bytes) of every shard that a device's optimizer updates."""
    for i in (*(i for bucket in plan.buckets for i in bucket.shards), *idle_shards(plan)):
        for device in plan.shards[i].devices:
            yield device, shard_bytes(plan.graph, plan.shards[i])
