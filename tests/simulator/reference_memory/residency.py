"""Memory over simulated time: how much each device holds when. ``any_order`` is a bound of it for any order of the tasks.

Held all the time: parameter shards, optimizer states, the buffers of gradients that are summed over devices, the batch (or, with
``Plan.own_samples``, the samples of it that the device reads) and constants.
Held for a part of the step:

- a tile's outputs, what it saves, and copies of its inputs: from its forward task to its backward task and the last task (or transfer)
  that reads them; of an offloading one, to the copy to its host, and again from the copy back on;
- of a recomputed tile, for its readers in the forward pass alone, and again from its second run on; if it keeps its outputs, these and
  what its products have made stay;
- a fetched region: from its first arrival to the last backward task of its consumers;
- a gradient between operators: from the first task that makes a part of it to the backward task that takes it; if that is in two, to the
  end of the weight gradients, and so all that the tile keeps;
- what is sent: until it has certainly left;
- what a tile's calls pass to each other: while its task runs.

Not counted are copies that a library may make of what it sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from soap.model.graph import TensorKind
from soap.model.regions import Box, in_one_piece
from soap.plan.delivery import box_bytes, partial_bytes
from soap.plan.memory_kinds import MemoryKind
from soap.plan.plan import Part, Pattern, Plan, Reduction, ShardSync, update_name
from soap.plan.syncs.amounts import COUNT_BYTES
from soap.plan.syncs.bucketing import idle_shards, sums_of_one
from soap.plan.syncs.seam import Hold, method_for
from soap.simulator.memory.curves import MemoryCurve
from soap.simulator.memory.sizes import away_bytes, batch_bytes
from soap.simulator.tasks import Schedule, TaskGraph
from tests.simulator.reference_memory.as_run import as_run
from tests.simulator.reference_memory.gradient_residency import GradientResidency, Sum
from tests.simulator.reference_memory.leaving import Leaving, LeftSums, sent_of_sum
from tests.simulator.reference_memory.ledger import Ledger
from tests.simulator.reference_memory.sizes import (
    assembled_regions,
    compact_parameters,
    host_copies,
    is_away,
    is_remote,
    kept_shards,
    updating_bytes,
)
from tests.simulator.reference_memory.task_spans import Span, TaskSpans


def memory_over_time(tasks: TaskGraph, schedule: Schedule, optimizer_states: int = 2) -> tuple[MemoryCurve, ...]:
    """The curve of each device. ``optimizer_states``: tensors of a parameter's size that the optimizer keeps for it."""
    run = as_run(tasks, schedule)
    spans = TaskSpans(tasks, run)
    ledger = Ledger(tasks.plan, run.schedule.makespan_ns)
    held = _Values(spans, ledger)
    held.always(optimizer_states)
    held.synchronized()
    held.values()
    held.assembled()
    held.fetched()
    held.summed(tasks, run.schedule)
    Leaving(spans, ledger, held.gone).sent()
    held.updated(optimizer_states)
    GradientResidency(spans, ledger, held.behind).gradients()
    return ledger.curves()


class _Values:
    """Writes into a ledger how long everything is held except gradients between operators."""

    def __init__(self, spans: TaskSpans, ledger: Ledger) -> None:
        self.spans, self.ledger, self.plan = spans, ledger, spans.plan
        self.hold = ledger.hold
        # ``behind``: see ``GradientResidency``. ``gone``: (tile, tensor that it makes) or (reduction, device) -> when that is let go.
        self.behind: dict[Sum, int] = {}
        self.gone: dict[tuple[int, str | int], int] = {}

    def always(self, optimizer_states: int) -> None:
        """Parameters, optimizer states, gradients that stay, and what of the batch the device is given."""
        for device, batch in enumerate(batch_bytes(self.plan)):
            self.hold(device, 0, self.spans.end_ns, batch, MemoryKind.BATCH)
        for device, size in enumerate(host_copies(self.plan)):
            self.hold(device, 0, self.spans.end_ns, size, MemoryKind.BUFFERS)
        alone = sums_of_one(self.plan)
        summed = (self.plan.synchronized - self.plan.dealt_out).union(idle_shards(self.plan))  # of the others methods tell
        for number, device, size, trainable in kept_shards(self.plan):
            states = optimizer_states if trainable and not is_away(self.plan, number, device) else 0
            self.hold(device, 0, self.spans.end_ns, size, MemoryKind.VALUES)
            self.hold(device, 0, self.spans.end_ns, states * size + (COUNT_BYTES if states > 1 else 0), MemoryKind.STATES)
            if number in summed:
                uses = self.plan.shards[number].uses
                begins = [self.spans.weighed(tile)[0] for tile, _ in uses if tile in self.spans.backward] if number in alone else [0]
                begun = min(begins, default=self.spans.end_ns)
                self.hold(device, begun, self.spans.end_ns, size, MemoryKind.GRADIENTS)

    def synchronized(self) -> None:
        """What methods of synchronization hold (``SyncMethod.holds``): copies of what others own, and buffers."""
        for sync in self.plan.syncs:
            for own in method_for(sync).holds(self.plan, sync):
                if own.size_bytes and (not own.since or own.since in self.spans.named or own.with_uses):
                    self._hold_for(sync, own)

    def _hold_for(self, sync: ShardSync, own: Hold) -> None:
        """Write down what a device holds for a synchronization."""
        begun = self.spans.named.get(own.since, (0, 0))[0]
        done = self.spans.named.get(own.until, (0, 0))[0 if own.before else 1] if own.until else self.spans.end_ns
        if sync.contract.gathers_values:  # ranks post what they send and receive at once, even if links are busy
            begun = self.spans.ready.get(own.since, begun)
            done = self.spans.ready.get(own.until, done) if own.before else done
        if own.used:
            self._hold_used(sync, own, begun)
        elif own.gradients_of:
            self._hold_gradients(sync, own, done)
        elif own.queue == "sent":
            update = self.spans.named.get(update_name(own.device), (0, 0))[0]  # what was sent before has left by then
            over = self.ledger.arrived(own.device, done)
            self.ledger.send(own.device, begun, max(done, min(over, update)) if begun < update else over, own.size_bytes)
        elif own.queue:
            self.ledger.receive(own.device, begun, done, own.size_bytes, few=own.queue == "few", sum_bytes=own.sum_bytes)
        else:
            last = max((self.spans.last(tile) for tile, _ in sync.uses), default=0) if own.with_uses else 0
            self.hold(own.device, begun, max(done, last), own.size_bytes, own.kind)

    def _hold_used(self, sync: ShardSync, own: Hold, begun: int) -> None:
        """What is there for passes that use it, or until the first of them has begun, or from then on to the last one."""
        assert own.used
        first, last = self.spans.passes({tile for tile, _ in sync.uses}, own.device, own.used)
        leaving = own.used != "forward"  # gradients may leave before what they are of is freed
        if own.throughout:
            self.hold(own.device, begun, max(begun, last), own.size_bytes, own.kind, early=True, freed=leaving)
        elif own.since:
            self.hold(own.device, begun, max(begun, first), own.size_bytes, own.kind, late=True)
        elif last >= first:
            self.hold(own.device, first, last, own.size_bytes, own.kind, early=True, freed=leaving)

    def _hold_gradients(self, sync: ShardSync, own: Hold, done: int) -> None:
        """Gradients of regions, from when a segment has made the first one: autograd adds up what its tiles give to one region."""
        made: dict[tuple[int, int], int] = {}
        for place in own.gradients_of:
            for tile, _ in sync.regions[place].uses:
                if tile in self.spans.backward and self.plan.tiles[tile].device == own.device:
                    key = self.spans.segment[tile], place
                    made[key] = max(made.get(key, 0), self.spans.weighed(tile)[1])
        if made:
            begun, counted = min(made.values()), 0
            if done > begun or not sync.contract.gathers_values:  # else it leaves at once, as part of what is under way
                self.hold(own.device, begun, max(begun, done), own.size_bytes, own.kind, early=True)
                counted = own.size_bytes
            first = [(segment, sync.regions[place]) for (segment, place), ended in made.items() if ended == begun]
            if own.copied:
                single = max(box_bytes(self.plan, region.parameter, region.box) for _, region in first)
                self.hold(own.device, begun, begun, single, MemoryKind.GRADIENTS, early=True)
                counted += single
            if len(first) == 1:  # a buffer may be there for another region before this one's gradients are added up
                ((segment, region),) = first
                self.behind[segment, region.parameter, region.box] = counted

    def values(self) -> None:
        """Outputs of tiles, what they keep, and their copies of parts of the batch."""
        plan, graph, spans = self.plan, self.plan.graph, self.spans
        self._settle()
        waits = self._waits()
        given = {t.name for t in graph.tensors.values() if t.kind in (TensorKind.INPUT, TensorKind.CONSTANT)}
        copies: dict[tuple[int, str, Box, int], Span] = {}
        for number, (tile, sizes) in enumerate(zip(plan.tiles, spans.sizes, strict=True)):
            op, kept = plan.operator(tile), sizes.kept - sum(sizes.made)
            lies = sizes.shares.lies.intersection(k for k, _ in self._views.get(number, ()))
            for k, (out, size) in enumerate(zip(op.outputs, sizes.made, strict=True)):
                copied = any(own == k and self._comes_again(number, place) for own, place in self._views.get(number, ()))
                self._hold_made(number, out.tensor, 0 if k in lies and not copied else size, waits)
            for start, end in spans.lives(number, spans.left(number)):
                self.hold(tile.device, start, end, kept, MemoryKind.KEPT, late=number in spans.away)
            if number in spans.away:
                self._offloaded(number)
            if number in spans.recomputation.light:
                self.hold(tile.device, spans.forward[number][0], spans.last(number), sizes.shares.product, MemoryKind.KEPT)
            if number not in spans.unread:
                for start, end in (spans.forward[number], spans.second_work.get(number, (0, 0))):
                    self.hold(tile.device, start, end, sizes.shares.forward, MemoryKind.WORKSPACE)
            reads = [(o.tensor, box) for o, box in zip(op.inputs, tile.inputs, strict=True) if o.tensor in given]
            for tensor, box in reads:
                for run, (start, own) in enumerate(spans.lives(number, spans.used(number, tensor))):
                    before = copies.get((tile.device, tensor, box, run), (start, own))
                    copies[tile.device, tensor, box, run] = (min(before[0], start), max(before[1], own))
        for (device, tensor, box, _), (start, end) in copies.items():
            if not in_one_piece(box, graph.tensors[tensor].shape):
                self.hold(device, start, end, box_bytes(plan, tensor, box), MemoryKind.BATCH)

    def _offloaded(self, number: int) -> None:
        """What a tile has back from its host, and on a CPU, until then, the copy there."""
        tile, (begun, _), (start, end) = self.plan.tiles[number], self.spans.away[number], self.spans.back[number]
        size = away_bytes(self.plan.graph, tile)
        self.hold(tile.device, start, self.spans.last(number), size, MemoryKind.KEPT, early=True)
        if tile.device not in self.plan.accelerators:
            self.hold(tile.device, begun, end, size, MemoryKind.KEPT, early=True, late=True)

    def _waits(self) -> dict[tuple[int, str], tuple[int, int]]:
        """(tile, tensor that it makes) -> until when its first run's output waits for others, and, of a recomputed tile, its second's."""
        plan, spans = self.plan, self.spans
        found: dict[tuple[int, str], tuple[int, int]] = {}
        for holding, held in enumerate(plan.holdings):
            if held.reduction is None:
                own = spans.read_until.get(holding, 0), spans.read_again_until.get(holding, 0)
                found[held.tile, held.tensor] = own
        for number, reduction in enumerate(plan.reductions):  # partial results wait for their sum alone
            tensor = plan.graph.operators[reduction.operator].outputs[reduction.output].tensor
            ends = spans.summed_from(reduction)[0], spans.summed_again.get(number, (0, 0))[0]
            found.update(dict.fromkeys(((tile, tensor) for tile in reduction.tiles), ends))
        return found

    def _hold_made(self, number: int, tensor: str, size: int, waits: Mapping[tuple[int, str], tuple[int, int]]) -> None:
        """Write down how long an output of a tile is there."""
        for start, over in self._made(number, tensor, waits):
            self.hold(self.plan.tiles[number].device, start, over, size, MemoryKind.KEPT, late=True)
            self.gone.setdefault((number, tensor), over)

    def _made(self, number: int, tensor: str, waits: Mapping[tuple[int, str], tuple[int, int]]) -> list[Span]:
        """When an output of a tile is there, of the first run and of the second. ``waits``: see ``_waits``. Of a tile that keeps its
        outputs, those of the first run are there as long as of any other."""
        used = self.spans.used(number, tensor)
        stays = number in self.spans.recomputation.light and (number, tensor) not in self._summands
        lives = zip(self.spans.lives(number, used), waits.get((number, tensor), (0, 0)), strict=False)
        return [(start, max(used if stays else end, until)) for (start, end), until in lives]

    def _settle(self) -> None:
        """Note when what tiles make in the memory of what they read has gone, until no more follows from that."""
        while True:
            waits, found = self._waits(), dict[tuple[int, str], Span]()
            for number, views in self._views.items():
                op = self.plan.operator(self.plan.tiles[number])
                for output, place in views:
                    over = [end for _, end in self._made(number, op.outputs[output].tensor, waits)]
                    first, second = found.get((number, op.inputs[place].tensor), (0, 0))
                    found[number, op.inputs[place].tensor] = max(first, over[0]), max(second, *over[1:], 0)
            if found == self.spans.views:
                return
            self.spans.view(found)

    @cached_property
    def _views(self) -> dict[int, list[tuple[int, int]]]:
        """Tile -> (output, input) of which the first may have the memory of the second."""
        found = dict[int, list[tuple[int, int]]]()
        for (tile, place), _ in self._fetch_of.items():
            found.setdefault(tile, []).extend(pair for pair in self.spans.sizes[tile].shares.views if pair[1] == place)
        return {tile: own for tile, own in found.items() if own}

    @cached_property
    def _fetch_of(self) -> dict[tuple[int, int], int]:
        """(tile, input) -> fetch."""
        return {consumer: number for number, fetch in enumerate(self.plan.fetches) for consumer in fetch.consumers}

    def _comes_again(self, tile: int, place: int) -> bool:
        """Whether what a tile reads comes a second time from elsewhere."""
        number = self._fetch_of[tile, place]
        return any((number, k) in self.spans.gathered for k in range(len(self.plan.fetches[number].pieces)))

    @cached_property
    def _summands(self) -> set[tuple[int, str]]:
        """(tile, tensor) of partial results."""
        graph = self.plan.graph
        outputs = [(own.tiles, graph.operators[own.operator].outputs[own.output].tensor) for own in self.plan.reductions]
        return {(tile, tensor) for tiles, tensor in outputs for tile in tiles}

    def assembled(self) -> None:
        """Regions of parameters that are assembled from several shards, or from rows."""
        compact = compact_parameters(self.plan)
        copies: dict[tuple[int, str, Box, int], tuple[int, int, int]] = {}
        for tile, tensor, box, size in assembled_regions(self.plan):
            of = tile if tensor in compact else self.spans.segment[tile]
            for run, (start, own) in enumerate(self.spans.lives(tile, self.spans.used(tile, tensor))):
                first, last, _ = copies.get((of, tensor, box, run), (start, own, size))
                copies[of, tensor, box, run] = (min(first, start), max(last, own), size)
        for (tile, *_), (start, end, size) in copies.items():
            self.hold(self.plan.tiles[tile].device, start, end, size, MemoryKind.VALUES)

    def fetched(self) -> None:
        """Fetched regions that are assembled or received, and pieces that are received in buffers of their own first."""
        plan, apart = self.plan, received_apart(self.plan)
        for number, fetch in enumerate(plan.fetches):
            size, ends = box_bytes(plan, fetch.tensor, fetch.box), [self.spans.needed(tile, fetch.tensor) for tile, _ in fetch.consumers]
            remote = [place for place, piece in enumerate(fetch.pieces) if is_remote(plan, fetch, piece)]
            if remote:
                arrivals = [self.spans.brought[number, place] for place in remote]
                begun = min(start for start, _ in arrivals)
                again = [own for place in remote if (own := self.spans.gathered.get((number, place))) is not None]
                first = max(self.spans.forward[tile][1] for tile, _ in fetch.consumers) if again else max(ends)
                self.hold(fetch.device, begun, first, size, MemoryKind.KEPT, late=True)
                if again:
                    begun, come = min(start for start, _ in again), max(end for _, end in again)
                    self.hold(fetch.device, begun, max(*ends, come), size, MemoryKind.KEPT, late=True)
                readers = [tile for tile, _ in fetch.consumers if tile in self.spans.backward]
                begins = [self.spans.second[t][0] if t in self.spans.second else self.spans.back_at([t], 0) for t in readers]
                joined = min(self.spans.forward[tile][0] for tile, _ in fetch.consumers)
                for place, (start, _) in zip(remote, arrivals, strict=True):
                    if (number, place) in apart:
                        piece_bytes = box_bytes(plan, fetch.tensor, fetch.pieces[place].box)
                        self.hold(fetch.device, start, joined, piece_bytes, MemoryKind.BUFFERS, late=True)
                        if again:
                            start = self.spans.gathered[number, place][0]
                            self.hold(fetch.device, start, min(begins, default=0), piece_bytes, MemoryKind.BUFFERS, late=True)
            elif len(fetch.pieces) > 1:
                for (tile, _), until in zip(fetch.consumers, ends, strict=True):
                    for start, end in self.spans.lives(tile, until):
                        self.hold(fetch.device, start, max(end, self.spans.passed(tile, fetch.tensor)), size, MemoryKind.KEPT)

    def summed(self, tasks: TaskGraph, schedule: Schedule) -> None:
        """Sums of partial results, or their cells. ``tasks``: without the waits that ranks add; ``schedule``: with them."""
        plan = self.plan
        ends: dict[int, int] = {}
        readers: set[tuple[int, int]] = set()
        for holding, until in self.spans.read_until.items():
            summed = plan.holdings[holding].reduction
            if summed is not None:
                ends[summed] = max(ends.get(summed, 0), until)
                readers.add((summed, plan.holdings[holding].device))
        pairs = ((number, device) for number, reduction in enumerate(plan.reductions) for device in reduction.devices)
        left = LeftSums(tasks, schedule, self.spans, [pair for pair in pairs if pair not in readers])
        again: dict[int, int] = {}
        for holding, until in self.spans.read_again_until.items():
            if (summed := plan.holdings[holding].reduction) is not None:
                again[summed] = max(again.get(summed, 0), until)
        for number, reduction in enumerate(plan.reductions):
            start, done = self.spans.summed_from(reduction)
            boxes = reduction.cells or [reduction.box] * len(reduction.devices)
            for device, box in zip(reduction.devices, boxes, strict=True):
                size = partial_bytes(plan, reduction, box)
                read = (number, device) in readers
                over = max(done, ends.get(number, done) if read else left.over(number, device, self._answered(number, device, done)))
                self.gone[number, device] = over
                lives = [(start, done, over)]
                if number in self.spans.summed_again:
                    begun, ended = self.spans.summed_again[number]
                    lives.append((begun, ended, max(ended, again.get(number, 0))))
                for life in lives:
                    self._hold_sum(reduction, device, size, *life)

    def _hold_sum(self, reduction: Reduction, device: int, size: int, start: int, done: int, over: int) -> None:
        """Write down a sum, or a cell of ``size`` bytes, from when it is begun and ``done`` on."""
        plan, scattered = self.plan, bool(reduction.cells)
        self.hold(device, start, over, size, MemoryKind.KEPT, early=not scattered, late=True, made=scattered)
        if scattered:  # the own sum is added up of partial results; when these have gone, it is cut and sent
            total = partial_bytes(plan, reduction, reduction.box)
            self.hold(device, start, start, total, MemoryKind.BUFFERS, early=True, over=True)
            held = sent_of_sum(plan, reduction, device)
            self.ledger.send(device, start, self.ledger.arrived(device, done), total - size, held=held, made=True)
            self.hold(device, start, done, (len(reduction.cells) - 1) * size, MemoryKind.BUFFERS, made=True)

    def _answered(self, number: int, device: int, done_ns: int) -> int:
        """When the gradient of a sum that a device does not read arrives, or the sum is over if there is none."""
        own = [tile for tile in self.plan.reductions[number].tiles if self.plan.tiles[tile].device == device]
        return self.spans.back_at(own, self.ledger.arrived(device, done_ns))

    def updated(self, optimizer_states: int) -> None:
        """What the optimizer takes for its step, which begins when all gradients are there, those of partitions included. On CPUs the
        optimizers of ``soap-run`` take nothing."""
        spans: dict[int, Span] = {}
        for sync in self.plan.syncs:
            for part in method_for(sync).updates(self.plan, sync):
                for device in self.plan.shards[part.shard].devices if part.name else ():
                    spans[device] = max(spans.get(device, (0, 0)), self.spans.named.get(part.name, (0, 0)))
        sizes = updating_bytes(self.plan, optimizer_states)
        for device in self.plan.accelerators:
            size = sizes[device]
            self.hold(device, *self.spans.named.get(update_name(device), spans.get(device, (0, 0))), size, MemoryKind.WORKSPACE)


def received_apart(plan: Plan) -> set[Part]:
    """Parts that are received into a buffer of their own and then copied into their region."""
    alone = {part for message in plan.messages if len(message.parts) == 1 for part in message.parts}
    alone |= {part for exchange in plan.exchanges if exchange.pattern is Pattern.BROADCAST for part in exchange.parts}
    found: set[Part] = set()
    for number, fetch in enumerate(plan.fetches):
        remote = {(number, k) for k, piece in enumerate(fetch.pieces) if is_remote(plan, fetch, piece)}
        if len(fetch.pieces) > 1 or not alone.issuperset(remote):
            found |= remote
    return found
