"""From a plan to timed tasks: how long each tile, message, exchange, reduction, bucket and update takes, on what, and after which tasks.

``lower`` pulls rows of sparse parameters from servers, walks the operators forward, then backward, then synchronizes the parameters
(``synchronizing``). A task's id is (phase, position, stage, a, b, c). It is made only of places in the task's own operator, parameter or
device, so editing another operator does not change it. Ids order tasks of equal ready time as the iteration does: forward operators first
to last, backward last to first, synchronization, update.

Order in the runtime. ``reference.execution_order`` gives one total order of all tiles forward, and one backward. Every rank follows it for
its own tiles (except that tiles that wait for no other run right before their first readers: ``program``).

- Forward: where devices have their own labels alone, these are counted first (``plan.samples``). A tile waits for its fetches. After the
  last tile of a group comes the group's reduction. A message leaves as soon as its pieces are ready; an exchange takes place as soon as all
  its pieces are.
- A second run (``second_runs``) comes when the backward pass first needs what it makes, and so does what was offloaded.
- Backward: the reduction of a group's gradient comes before the group's first tile in that order. Once the last consumer of a message or
  exchange has run, the gradients travel back. Once the last use of its shards has run, a bucket is summed. The optimizer runs once, at the
  end.

The runtime joins consecutive tiles between which nothing arrives or leaves (``program``), and then waits for all gradients that the joined
tiles need. The simulator takes tile by tile; predicted memory is that of joined ones (``memory.rank_times``).

With micro-batches each device runs its passes one after the other in a given order (``Plan.order``): each waits for the one before. If the
order has backward passes in two (``strategy.division``), weight gradients wait for input gradients, and what keeps parameters in step for
the weight gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any

from soap.cluster.topology import Topology
from soap.model.regions import Box
from soap.plan.delivery import box_bytes, exchange_rounds, partial_bytes, reduced_tensor, scatter_rounds
from soap.plan.division import weights_name
from soap.plan.marks.seam import Row, Takes
from soap.plan.pass_order import Pass
from soap.plan.plan import (
    AGAIN,
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
    reduce_name,
    remote_parts,
    tile_task_name,
)
from soap.plan.planning import PlanBuilder, build_plan
from soap.plan.recomputation import keeps_outputs
from soap.plan.samples import COUNT_BYTES, count_name
from soap.plan.tiling import Tile
from soap.simulator.communication.prices import Communication
from soap.simulator.communication.synchronizing import Synchronization
from soap.simulator.costs import ROW_NS, CostModel
from soap.simulator.second_runs import Need, SecondRuns
from soap.simulator.task_list import BACKWARD, COUNT, FORWARD, GATHER, SUM, WEIGHTS, TaskList
from soap.simulator.tasks import GRADIENTS, TaskGraph, TaskKind, TaskPlaces

__all__ = ["PlanBuilder", "build_plan", "lower"]

Gathering = Callable[[int], Iterable[tuple[int, int]]]
"""``Synchronization.gather`` of one kind of passes."""


def lower(
    plan: Plan, topology: Topology, costs: CostModel, communication: Communication | None = None, *, pull_together: bool = True
) -> TaskGraph:
    """The timed tasks of one training iteration, predecessors first. ``communication``: prices of this topology, to reuse its answers.

    ``pull_together``: with local aggregation a host's devices also pull through their leader, as the runtime does. Without it each device
    pulls for itself, to simulate systems that do so.
    """
    tasks = TaskList(communication or Communication(topology))
    lowering = _Lowering(plan, costs, tasks)
    synchronization = Synchronization(plan, costs, tasks, pull_together=pull_together)
    lowering.forward(synchronization.pull(), partial(synchronization.gather, backward=False))
    lowering.backward(partial(synchronization.gather, backward=True))
    lowering.keep_order()
    synchronization.synchronize(lowering.forward_tasks, lowering.backward_tasks | lowering.weights_tasks)
    ordered, places = tasks.in_order()
    return TaskGraph(plan, topology, ordered, lowering.places(places))


PASSES = TaskKind.FORWARD, TaskKind.BACKWARD
FORWARDS, BACKWARDS, RETURNS = (1, 0), (0, 1), (-1, 1)
"""What overlaps (``Operator.overlaps``): with what a tile reads or sums, its forward pass, also when it is gathered again, before the input
gradients; with the gradient of a sum its backward pass; with gradients that return of this the rest, the weight gradients."""

NAMES = {
    TaskKind.FORWARD: forward_name,
    TaskKind.BACKWARD: backward_name,
    TaskKind.WEIGHTS: weights_name,
}
"""Names of a tile's passes, but for second runs."""
STAGES = {TaskKind.FORWARD: 1, TaskKind.BACKWARD: 1, TaskKind.WEIGHTS: WEIGHTS}
"""Their stages, the third part of a task's id."""


class _Lowering:
    """The state of one lowering.

    ``forward_tasks``, ``backward_tasks``, ``weights_tasks``: tile -> its task. ``_reduced``: reduction -> the tasks that its sum is ready
    after. ``_brought``: part -> the task that brings it. ``_returned``: first part of a carrier -> the task of its gradients,
    ``_gathered``: that of its second time. ``_sums``:
    reduction -> its task, and that of its gradients. ``_arrivals``: tile -> the tasks that bring what it reads; ``_arrivals_back``: to its
    backward pass, of parameters. ``_gradients``: holding -> the tasks that make or bring parts of its gradient; empty if it gets none.
    """

    def __init__(self, plan: Plan, costs: CostModel, tasks: TaskList) -> None:
        self.plan, self.costs, self._list = plan, costs, tasks
        self.forward_tasks: list[int] = []
        self.backward_tasks: dict[int, int] = {}
        self.weights_tasks: dict[int, int] = {}
        self._reduced: dict[int, tuple[int, ...]] = {}
        self._gradients: list[list[int]] = [[] for _ in plan.holdings]
        self._brought: dict[Part, int] = {}
        self._returned: dict[Part, int] = {}
        self._gathered: dict[Part, int] = {}
        self._summed_again: dict[int, int] = {}
        self._sums: tuple[dict[int, int], dict[int, int]] = {}, {}
        self._arrivals: list[list[int]] = [[] for _ in plan.tiles]
        self._arrivals_back: dict[int, list[int]] = {}
        self._index = PlanPlaces(plan)
        self._second = SecondRuns(plan, tasks, self.backward_tasks, self._compute_again, self._row_ns)

    def forward(self, pulled: Iterable[tuple[int, int]], gather: Gathering) -> None:
        """Transfers, tiles and reductions, operator by operator. ``pulled``: (tile, a task that brings what it reads of parameters)."""
        for tile, task in pulled:
            self._arrivals[tile].append(task)
        for position in range(len(self.plan.graph.operators)):
            for tile, task in gather(position):
                self._arrivals[tile].append(task)
            for carrier in self._index.carriers[position]:
                self._carry(carrier)
            for fetch in self._index.fetches[position]:
                self._fetch(fetch)
            self._count_labels(position)
            for own in self._tiles(position):
                self.forward_tasks.append(self._compute(own, TaskKind.FORWARD, self._arrivals[self._place(own)]))
            for place in self._index.reductions[position]:
                self._reduce(place)

    def backward(self, gather: Gathering) -> None:
        """Gradient reductions, tiles and gradient transfers, last operator first."""
        graph = self.plan.graph
        for position in range(len(graph.operators) - 1, -1, -1):
            for tile, task in gather(position):
                self._arrivals_back.setdefault(tile, []).append(task)
            if graph.needs_backward(graph.operators[position]):
                self._backward_tiles(position)
            for fetch in self._index.fetches[position]:  # listed at the first reader, which may have no backward pass itself
                self._keep_gradient(self.plan.fetches[fetch])
                self._second.note_fetch(fetch)
            for carrier in self._index.carriers[position]:
                self._return_gradient(carrier)
        self._second.link()
        again = self.plan.gathered_again
        for carrier in chain.from_iterable(self._index.carriers) if again else ():
            if self._maker(carrier.parts[0]).operator in again:
                self._gather_again(carrier)
        if self.plan.summed_again:
            self._sum_again()

    def keep_order(self) -> None:
        """With micro-batches, let each pass wait for the one before it on its device (``Plan.order``)."""
        if self.plan.order is None:
            return
        last = len(self.plan.graph.operators) - 1
        by_device: dict[int, list[tuple[int, int, int, int]]] = {}
        passes: tuple[tuple[Pass, Iterable[tuple[int, int]]], ...] = (
            ("F", enumerate(self.forward_tasks)),
            ("B", self.backward_tasks.items()),
            ("W", self.weights_tasks.items()),
        )
        for kind, own in passes:
            for number, task in own:
                tile = self.plan.tiles[number]
                position = tile.operator if kind == "F" else last - tile.operator
                by_device.setdefault(tile.device, []).append((self.plan.rank(tile, kind), position, tile.index, task))
        for found in by_device.values():
            for (*_, before), (*_, after) in pairwise(sorted(found)):
                self._list.wait_also(after, (before,))

    def places(self, order: Sequence[int]) -> TaskPlaces:
        """Which task is for what. ``order``: by task, where it is in the end."""
        found: tuple[Mapping[Any, int], ...] = (self._brought, self._returned, self._gathered, *self._sums, self._summed_again)
        own = ({key: order[task] for key, task in each.items()} for each in (*found, *self._second.rows.values()))
        brought, returned, gathered, summed, back, again, *rows = own
        return TaskPlaces(brought, returned, gathered, summed, back, again, dict(zip(self._second.rows, rows, strict=True)))

    def _backward_tiles(self, position: int) -> None:
        arrivals: dict[int, list[int]] = {}
        claims: dict[int, list[Need]] = {}
        for place in self._index.reductions[position]:
            reduced = self._reduced_gradient(place)
            held = self._index.of_reduction[place]
            several = len(self.plan.reductions[place].devices) > 1
            several &= position not in self.plan.summed_again
            claimed = self._second.summed(held, *reduced) if several and reduced else self._second.claims(held)
            for index in self.plan.reductions[place].tiles:
                arrivals.setdefault(index, []).extend(reduced)
                claims.setdefault(index, []).extend(claimed)
        for tile in self._tiles(position):
            index, start = self._place(tile), self._loss_start(tile)
            own = [task for held in self._index.of_tile[index] for task in self._gradients[held]]
            gradient = [*own, *arrivals.get(index, ()), *start]
            if gradient:
                claimed = [*self._second.claims(self._index.of_tile[index]), *claims.get(index, ()), *map(self._second.start, start)]
                values = self._arrivals_back.get(index, ())
                again = self._second.run(tile, index, [self.forward_tasks[index], *values], claimed)
                after = [self.forward_tasks[index], *again, *gradient, *values]
                self.backward_tasks[index] = self._compute(tile, TaskKind.BACKWARD, after)
                if position in self.plan.divided:
                    self.weights_tasks[index] = self._compute(tile, TaskKind.WEIGHTS, (self.backward_tasks[index],))

    def _tiles(self, position: int) -> Sequence[Tile]:
        first = self.plan.first_tile
        stop = first[position + 1] if position + 1 < len(first) else len(self.plan.tiles)
        return self.plan.tiles[first[position] : stop]

    def _place(self, tile: Tile) -> int:
        return self.plan.first_tile[tile.operator] + tile.index

    def _bytes(self, tensor: str, box: Box) -> int:
        return box_bytes(self.plan, tensor, box)

    def _ready(self, held: int) -> tuple[int, ...]:
        holding = self.plan.holdings[held]
        return (self.forward_tasks[holding.tile],) if holding.reduction is None else self._reduced[holding.reduction]

    def _fetch(self, number: int) -> None:
        """Make a fetch's consumers wait for the tasks that bring its remote pieces, and for those that make its local ones."""
        fetch = self.plan.fetches[number]
        after: list[int] = []
        for place, piece in enumerate(fetch.pieces):
            brought = self._brought.get((number, place))
            after.extend(self._ready(piece.holding) if brought is None else (brought,))
        for tile, _ in fetch.consumers:
            self._arrivals[tile].extend(after)

    def _keep_gradient(self, fetch: Fetch) -> None:
        """Give a fetched region's gradient to the holdings of its local pieces."""
        after = self._after_consumers(fetch)
        for piece in fetch.pieces if after else ():
            if self.plan.holdings[piece.holding].device == fetch.device:
                self._gradients[piece.holding].extend(after)

    def _after_consumers(self, fetch: Fetch) -> list[int]:
        """The backward tasks that complete a region's gradient; empty if it has none."""
        if not self.plan.graph.tensors[fetch.tensor].requires_grad:
            return []
        return [self.backward_tasks[tile] for tile, _ in fetch.consumers if tile in self.backward_tasks]

    def _carry(self, carrier: Message | Exchange) -> None:
        """Add the task of a message or exchange."""
        after = {task for *_, holding in remote_parts(self.plan, carrier.parts) for task in self._ready(holding)}
        task = self._carrier_task(carrier, carrier.parts, after, gradient=False)
        self._brought.update(dict.fromkeys(carrier.parts, task))

    def _gather_again(self, carrier: Message | Exchange) -> None:
        """Add the task of a message or exchange that travels a second time: once the first of its readers is needed, and what it brings
        has been made again, if it is. All its readers wait for it before they run again, or backward."""
        fetches = dict.fromkeys(number for number, _ in carrier.parts)
        readers = [tile for number in fetches for tile, _ in self.plan.fetches[number].consumers if tile in self.backward_tasks]
        after = self._second.first_needs(readers)
        if not after:
            return
        again = self._second.rows.get("again", {})
        makers = (self.plan.holdings[holding].tile for *_, holding in remote_parts(self.plan, carrier.parts))
        after |= {again[maker] for maker in makers if maker in again and not keeps_outputs(self.plan, maker)}
        task = self._gathered[carrier.parts[0]] = self._carrier_task(carrier, carrier.parts, after, gradient=False, again=True)
        for tile in readers:
            self._list.wait_also(again.get(tile, self.backward_tasks[tile]), (task,))

    def _sum_again(self) -> None:
        """Add the sums that are made a second time, of what second runs make, and let second runs that read them wait for them."""
        again, summed = self._second.rows["again"], dict[int, int]()
        for place, reduction in enumerate(self.plan.reductions):
            if reduction.operator in self.plan.summed_again and all(tile in again for tile in reduction.tiles):
                after = tuple(again[tile] for tile in reduction.tiles)
                summed[place] = self._reduce_task(reduction, after, gradient=False, again=True)
        for fetch in self.plan.fetches:
            found = [self.plan.holdings[piece.holding].reduction for piece in fetch.pieces]
            for tile, _ in fetch.consumers if any(own in summed for own in found) else ():
                if tile in again:
                    self._list.wait_also(again[tile], (summed[own] for own in found if own is not None))
        self._summed_again = summed

    def _maker(self, part: Part) -> Tile:
        fetch, piece = part
        return self.plan.tiles[self.plan.holdings[self.plan.fetches[fetch].pieces[piece].holding].tile]

    def _return_gradient(self, carrier: Message | Exchange) -> None:
        """Add the task that takes gradients back the way the values came, once all consumers have computed them."""
        found = {number: self._after_consumers(self.plan.fetches[number]) for number, _ in carrier.parts}
        active = tuple(part for part in carrier.parts if found[part[0]])
        if not active:
            return
        if isinstance(carrier, Exchange) and carrier.pattern is Pattern.BROADCAST:
            active = carrier.parts  # a device without a gradient takes part with zeros
        after = {task for tasks in found.values() for task in tasks}
        task = self._carrier_task(carrier, active, after, gradient=True)
        self._returned[carrier.parts[0]] = task
        holdings = [holding for *_, holding in remote_parts(self.plan, active)]
        for holding in holdings:
            self._gradients[holding].append(task)
        self._second.note_return((number for number, tasks in found.items() if tasks), holdings, task)

    def _carrier_task(
        self, carrier: Message | Exchange, parts: Sequence[Part], after: Iterable[int], *, gradient: bool, again: bool = False
    ) -> int:  # fmt: skip
        number, piece = carrier.parts[0]
        fetch = self.plan.fetches[number]
        first, operand = fetch.consumers[0]
        tile = self.plan.tiles[first]
        stage = GATHER if again else 2 if gradient else 0
        place = self._id(tile.operator, stage, tile.index, operand, piece, gradient=gradient or again)
        readers = [self.plan.tiles[own] for own, _ in fetch.consumers]
        overlapped_ns = self._overlapped_ns(readers, len(fetch.pieces), RETURNS if gradient else FORWARDS)
        if isinstance(carrier, Exchange):
            rounds = exchange_rounds(self.plan, carrier, parts, gradient=gradient)
            name = exchange_name(self.plan, carrier, gradient=gradient) + AGAIN * again
            if carrier.pattern is Pattern.BROADCAST:
                return self._list.tree(place, name, TaskKind.EXCHANGE, rounds, after)
            overlapped_ns = overlapped_ns if carrier.pattern is Pattern.ALL_GATHER else 0
            return self._list.exchange(place, name, TaskKind.EXCHANGE, rounds, after, overlapped_ns=overlapped_ns)
        source, target = (carrier.target, carrier.source) if gradient else (carrier.source, carrier.target)
        moved = remote_parts(self.plan, parts)
        size = sum(self._bytes(self.plan.fetches[n].tensor, box) for (n, _), (_, _, box, _) in zip(parts, moved, strict=True))
        name = message_name(self.plan, carrier, gradient=gradient) + AGAIN * again
        return self._list.message(place, name, TaskKind.TRANSFER, source, target, size, after, overlapped_ns=overlapped_ns)

    def _row_ns(self, tile: Tile, takes: Takes) -> int:
        device = self._list.topology.devices[tile.device].type
        return ROW_NS[takes](self.costs, self.plan.graph, self.plan.as_run(tile), device)

    def _compute_again(self, tile: Tile, row: Row, after: Iterable[int]) -> int:
        return self._compute(tile, TaskKind.RECOMPUTE, after, row)

    def _compute(self, tile: Tile, kind: TaskKind, after: Iterable[int], row: Row | None = None) -> int:
        graph, device, asked = self.plan.graph, self._list.topology.devices[tile.device].type, self.plan.as_run(tile)
        op, gradient, duration = self.plan.operator(tile), kind in GRADIENTS, self._tile_ns(tile, kind, row)
        name, stage = (tile_task_name(row.verb, op, tile), row.stage) if row is not None else (NAMES[kind](op, tile), STAGES[kind])
        place = self._id(tile.operator, stage, tile.index, gradient=kind is not TaskKind.FORWARD)
        launch = self.costs.launch_ns(graph, asked, device, backward=gradient)
        return self._list.add(place, name, kind, (tile.device,), duration, after, tile=self._place(tile), launch_ns=launch)

    def _tile_ns(self, tile: Tile, kind: TaskKind, row: Row | None = None) -> int:
        graph, device, asked = self.plan.graph, self._list.topology.devices[tile.device].type, self.plan.as_run(tile)
        if kind not in GRADIENTS:
            return self._row_ns(tile, Takes.PASS if row is None else row.takes)
        if tile.operator in self.plan.divided:
            return self.costs.half_ns(graph, asked, device, "I" if kind is TaskKind.BACKWARD else "W")
        return self.costs.backward_ns(graph, asked, device)

    def _overlapped_ns(self, tiles: Iterable[Tile], peers: int, passes: tuple[int, int]) -> int:
        """How much of a collective of so many devices is over while these tiles of one of them run, of those that overlap: a device begins
        with its own part, and computes on each other part while the next one travels. ``passes``: how often a forward and a backward pass
        of a tile count."""
        own = [tile for tile in tiles if self.plan.operator(tile).overlaps]
        times = ([times * self._tile_ns(tile, kind) if times else 0 for times, kind in zip(passes, PASSES, strict=True)] for tile in own)
        return (peers - 1) * sum(max(0, sum(each)) for each in times) // peers

    def _reduce(self, place: int) -> None:
        """Sum partial results. A single device does that while it runs the tiles, without a task."""
        reduction = self.plan.reductions[place]
        after = tuple(self.forward_tasks[tile] for tile in reduction.tiles)
        self._reduced[place] = after
        if len(reduction.devices) > 1:
            self._sums[0][place] = task = self._reduce_task(reduction, after, gradient=False)
            self._reduced[place] = (task,)

    def _reduced_gradient(self, place: int) -> tuple[int, ...]:
        """The tasks that give every tile of the group the gradient of the sum; empty if there is no gradient."""
        reduction = self.plan.reductions[place]
        after = tuple(task for held in self._index.of_reduction[place] for task in self._gradients[held])
        if len(reduction.devices) > 1 and after:
            self._sums[1][place] = task = self._reduce_task(reduction, after, gradient=True)
            return (task,)
        return after

    def _count_labels(self, position: int) -> None:
        """Where devices are given their own labels alone, sum how many count, when the step begins."""
        for place in self._index.reductions[position] if self.plan.own_samples else ():
            reduction = self.plan.reductions[place]
            if self.plan.graph.operators[position].own_inputs and len(reduction.devices) > 1:
                first = self.plan.tiles[reduction.tiles[0]].index
                own = self._id(position, COUNT, first, reduction.output, gradient=False)
                name = count_name(self.plan.graph, reduction)
                task = self._list.all_reduce(own, name, TaskKind.REDUCE, COUNT_BYTES, reduction.devices, ())
                for tile in reduction.tiles:
                    self._arrivals[tile].append(task)

    def _reduce_task(self, reduction: Reduction, after: Iterable[int], *, gradient: bool, again: bool = False) -> int:
        op = self.plan.graph.operators[reduction.operator]
        first = self.plan.tiles[reduction.tiles[0]].index
        place = self._id(reduction.operator, SUM if again else 0 if gradient else 2, first, reduction.output, gradient=gradient or again)
        name = reduce_name(op, reduction, gradient=gradient) + AGAIN * again
        if reduction.cells:
            tiles, rounds = [self.plan.tiles[reduction.tiles[0]]], scatter_rounds(self.plan, reduction, gradient=gradient)
            overlapped_ns = self._overlapped_ns(tiles, len(reduction.devices), BACKWARDS if gradient else FORWARDS)
            return self._list.exchange(place, name, TaskKind.REDUCE, rounds, after, overlapped_ns=overlapped_ns)
        if gradient:
            size = self._bytes(reduced_tensor(self.plan, reduction), reduction.box)
        else:
            size = partial_bytes(self.plan, reduction, reduction.box)
        return self._list.all_reduce(place, name, TaskKind.REDUCE, size, reduction.devices, after)

    def _loss_start(self, tile: Tile) -> tuple[int, ...]:
        """The tasks after which a tile of the loss starts the backward pass with gradient 1: those that make the loss. Replica 0 only.
        With micro-batches its own part of the loss, or of a term of it, is enough, as the gradient of a sum is known."""
        graph = self.plan.graph
        if self.plan.order is not None:
            return (self.forward_tasks[self._place(tile)],) if tile.operator in graph.known_gradients and tile.replica == 0 else ()
        producer, output = graph.producers.get(graph.loss, (-1, 0))
        if tile.operator != producer or tile.replica != 0:
            return ()
        for place in self._index.reductions[producer]:
            reduction = self.plan.reductions[place]
            if reduction.output == output and self._place(tile) in reduction.tiles:
                return self._reduced[place]
        return (self.forward_tasks[self._place(tile)],)

    def _id(self, position: int, stage: int, a: int, b: int = 0, c: int = 0, *, gradient: bool) -> tuple[int, ...]:
        if gradient:
            return (BACKWARD, len(self.plan.graph.operators) - 1 - position, stage, a, b, c)
        return (FORWARD, position, stage, a, b, c)


class PlanPlaces:
    """Which fetches, carriers, reductions and holdings belong to which operator, tile or reduction.

    ``fetches``, ``carriers``: operator -> the fetches, and the messages and exchanges, that it is the first operator to need.
    ``reductions``: operator -> its reductions. ``of_tile``, ``of_reduction``: tile or reduction -> the holdings that it makes; a tile that
    only contributes to sums makes none.
    """

    def __init__(self, plan: Plan) -> None:
        self.fetches: list[list[int]] = [[] for _ in plan.graph.operators]
        self.carriers: list[list[Message | Exchange]] = [[] for _ in plan.graph.operators]
        self.reductions: list[list[int]] = [[] for _ in plan.graph.operators]
        self.of_tile: list[list[int]] = [[] for _ in plan.tiles]
        self.of_reduction: list[list[int]] = [[] for _ in plan.reductions]
        for number, fetch in enumerate(plan.fetches):
            self.fetches[plan.tiles[fetch.consumers[0][0]].operator].append(number)
        carriers: list[Message | Exchange] = [*plan.messages, *plan.exchanges]
        for carrier in carriers:
            first = min(plan.fetches[number].consumers[0][0] for number, _ in carrier.parts)
            self.carriers[plan.tiles[first].operator].append(carrier)
        for place, reduction in enumerate(plan.reductions):
            self.reductions[reduction.operator].append(place)
        for place, holding in enumerate(plan.holdings):
            if holding.reduction is None:
                self.of_tile[holding.tile].append(place)
            else:
                self.of_reduction[holding.reduction].append(place)
