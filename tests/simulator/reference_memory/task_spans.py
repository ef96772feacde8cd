"""Times in a simulated iteration: when the tasks of tiles and transfers run, and how long values and gradients are needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from soap.model.graph import TensorKind
from soap.plan.departures import Route, sending_pass
from soap.plan.marks.offload import AWAY, BACK, NEED
from soap.plan.marks.seam import NOTHING
from soap.plan.plan import AGAIN, Exchange, Fetch, Message, Part, Reduction, exchange_name, message_name, reduce_name, tile_task_name
from soap.plan.recomputation import dropped_holdings, remade
from soap.plan.syncs.seam import Uses
from soap.simulator.memory.spans import unread_tiles
from soap.simulator.tasks import TaskGraph, TaskKind
from tests.simulator.reference_memory.as_run import AsRun
from tests.simulator.reference_memory.moving import waited_for
from tests.simulator.reference_memory.running import find_recomputation
from tests.simulator.reference_memory.sizes import is_remote, tile_sizes

Span = tuple[int, int]
"""(start, end) of a task, in nanoseconds."""


class TaskSpans:
    """Start and end of tasks, in nanoseconds.

    ``forward``, ``backward``: by tile; ``weights``: of the weight gradients of tiles whose backward pass is in two. ``second``: of second
    runs, by tile; ``second_work``: while they compute; a segment's tiles all begin when the first of them does, because the runtime runs
    them together. ``unread``: tiles that make nothing, as nobody reads it; they have no backward task here. ``away``, ``back``: by tile, of
    the copies of what it keeps to its host, and back (from its need on, when ranks allot the memory). ``sizes``: by tile. ``named``: by
    task name. ``ready``: by name of a synchronization, when all that it waits for is over. ``brought``, ``returned``: by part, of the
    transfer of the part and of its gradient; ``gathered``: of its second time; ``summed_again``: by reduction, of its second time.
    ``segment``: tile -> the first tile of its segment. ``begun``: first tile of a segment -> start of its backward pass. ``views``: (tile,
    tensor that it reads) -> when what it makes in that memory has gone, of the first run and of the second.
    """

    def __init__(self, tasks: TaskGraph, run: AsRun) -> None:
        """``run``: when the tasks run."""
        order, schedule = run.order, run.schedule
        self.plan, self.end_ns = tasks.plan, schedule.makespan_ns
        self.sizes = tile_sizes(tasks.plan)
        self._wanted: dict[int, Span] = {}
        self.views: dict[tuple[int, str], Span] = {}
        self.forward: dict[int, Span] = {}
        self.backward: dict[int, Span] = {}
        self.weights: dict[int, Span] = {}
        again: dict[int, Span] = {}
        passes = {TaskKind.FORWARD: self.forward, TaskKind.RECOMPUTE: again, TaskKind.BACKWARD: self.backward}
        passes[TaskKind.WEIGHTS] = self.weights
        self.named: dict[str, Span] = {}
        self.ready: dict[str, int] = {}
        ends = schedule.end_ns.tolist()
        for task, waits, start, end in zip(tasks.tasks, run.waits, schedule.start_ns.tolist(), ends, strict=True):
            if task.name not in self.named and task.kind is TaskKind.SYNC:
                self.ready[task.name] = max((ends[other] for other in waits), default=0)
            begun, _ = self.named.get(task.name, (start, end))  # chunks have one name
            self.named[task.name] = (begun, end)
            if task.tile is not None:
                passes[task.kind][task.tile] = (start, end)
        self.recomputation = find_recomputation(self.plan, self.backward)
        self.dropped = dropped_holdings(self.plan, self.recomputation.tiles, self.backward)
        self.unread = frozenset(unread_tiles(self.plan))
        self.away, self.back = self._copies()
        segments = order.segments
        self.segment = {tile: segments[own].tiles[0] for tile, own in order.segment_of.items()}
        self.begun: dict[int, int] = {}
        for tile, (start, _) in self.backward.items():
            self.begun[self.segment[tile]] = min(start, self.begun.get(self.segment[tile], start))
        self.brought: dict[Part, Span] = {}
        self.returned: dict[Part, Span] = {}
        self.gathered: dict[Part, Span] = {}
        for carrier in self.carriers():
            self.brought.update(dict.fromkeys(carrier.parts, self.named[self._name(carrier, gradient=False)]))
            if (back := self.named.get(self._name(carrier, gradient=True))) is not None:
                self.returned.update(dict.fromkeys(carrier.parts, back))
            if (later := self.named.get(self._name(carrier, gradient=False) + AGAIN)) is not None:
                self.gathered.update(dict.fromkeys(carrier.parts, later))
        self.summed_again: dict[int, Span] = {}
        for number, reduction in enumerate(self.plan.reductions):
            later = self.named.get(reduce_name(self.plan.graph.operators[reduction.operator], reduction) + AGAIN)
            if later is not None:
                self.summed_again[number] = later
        self.second: dict[int, Span] = {}
        self.second_work: dict[int, Span] = {}
        for tile, start, work_end, end in self._second(again):
            if tile not in self.unread:
                self.second[tile], self.second_work[tile] = (start, end), (start, work_end)
        self.backward = {tile: span for tile, span in self.backward.items() if tile not in self.unread}
        self.weights = {tile: span for tile, span in self.weights.items() if tile not in self.unread}

    def _second(self, again: Mapping[int, Span]) -> Iterator[tuple[int, int, int, int]]:
        """The second runs as the runtime takes them: when a segment's first one begins, all follow. (tile, start, end of its work, end as
        it is simulated)."""
        segments: dict[int, list[int]] = {}
        for tile in sorted(again, key=lambda tile: (self.forward[tile][0], tile)):
            segments.setdefault(self.segment[tile], []).append(tile)
        for tiles in segments.values():
            at = min(again[tile][0] for tile in tiles)
            for tile in tiles:
                start, end = again[tile]
                at, begun = min(at, start) + end - start, min(at, start)
                yield tile, begun, at, end

    def _copies(self) -> tuple[dict[int, Span], dict[int, Span]]:
        away: dict[int, Span] = {}
        back: dict[int, Span] = {}
        for number in self.backward if self.plan.marked else ():
            tile = self.plan.tiles[number]
            op = self.plan.operator(tile)
            if self.plan.marked.get(tile.operator, NOTHING).kept_until:
                away[number] = self.named[tile_task_name(AWAY.verb, op, tile)]
                back[number] = self.named[tile_task_name(NEED.verb, op, tile)][0], self.named[tile_task_name(BACK.verb, op, tile)][1]
        return away, back

    def left_by(self, message: Message, *, gradient: bool, otherwise: int) -> int:
        """When the sender of a message, or of the gradients that return, knows that it has left: it then sends for a later micro-batch.
        ``otherwise``: if it never waits for it."""
        sending = sending_pass(self.plan, message, gradient=gradient)
        waits = None if sending is None else self._waits.get(sending)
        return otherwise if waits is None else max(waits, (self.returned if gradient else self.brought)[message.parts[0]][1])

    @cached_property
    def _waits(self) -> Mapping[tuple[Route, int], int]:
        """``moving.waited_for`` of all messages that nothing answers."""
        sends = []
        for message in self.plan.messages:
            part = message.parts[0]
            back = part in self.returned
            sending = sending_pass(self.plan, message, gradient=back)
            if sending is not None:
                sends.append((*sending, (self.returned if back else self.brought)[part][0]))
        return waited_for(sends)

    def carriers(self) -> list[Message | Exchange]:
        """All messages and exchanges."""
        return [*self.plan.messages, *self.plan.exchanges]

    def _pieces(self) -> Iterator[tuple[Part, int]]:
        """Every piece of every fetch, with its holding."""
        for number, fetch in enumerate(self.plan.fetches):
            for place, piece in enumerate(fetch.pieces):
                yield (number, place), piece.holding

    def view(self, views: dict[tuple[int, str], Span]) -> None:
        """Note ``views``, and forget what depends on them."""
        self.views = views
        for name in ("read_until", "read_again_until"):
            self.__dict__.pop(name, None)

    @cached_property
    def read_until(self) -> dict[int, int]:
        """Holding -> until when its value is held for its readers. Of a recomputed tile's holdings this is said of what its first run has
        made."""
        found: dict[int, int] = {}
        for (number, place), holding in self._pieces():
            fetch = self.plan.fetches[number]
            linked = self._linked(number, holding) if holding in self.dropped else []
            read = self._read(fetch, (number, place), [tile for tile, _ in fetch.consumers if tile not in linked])
            read = max([read, *(self.passed(tile, fetch.tensor) for tile in linked)])
            gathered = 0 if holding in self.dropped else self._gathered(number)
            found[holding] = max(found.get(holding, 0), read, gathered)
        return found

    def _gathered(self, number: int) -> int:
        """Until when a fetch is gathered again; 0 if it is not."""
        places = range(len(self.plan.fetches[number].pieces))
        return max((self.gathered[number, place][1] for place in places if (number, place) in self.gathered), default=0)

    @cached_property
    def read_again_until(self) -> dict[int, int]:
        """``read_until`` of what second runs have made."""
        found: dict[int, int] = {}
        for (number, place), holding in self._pieces():
            tile = self.plan.holdings[holding].tile
            summed = self.plan.holdings[holding].reduction
            if summed in self.summed_again or (tile in self.second and summed is None):
                linked = self._linked(number, holding)
                apart = [reader for reader in linked if self.segment[reader] != self.segment[tile]]
                read = self._read(self.plan.fetches[number], (number, place), apart, again=True)
                here = [self.used(reader, self.plan.fetches[number].tensor) for reader in linked if reader not in apart]
                found[holding] = max([found.get(holding, 0), read, self._gathered(number), *here])
        return found

    def _linked(self, number: int, holding: int) -> list[int]:
        """The tiles that read a holding for a fetch, and read it again as its tile's second run makes it."""
        held = self.plan.holdings[holding]
        if held.reduction in self.summed_again:
            return [tile for tile, _ in self.plan.fetches[number].consumers if tile in self.second]
        if held.reduction is not None or held.tile not in self.second or not remade(self.plan, number, self.recomputation.tiles):
            return []
        return [tile for tile, _ in self.plan.fetches[number].consumers if tile in self.second]

    def _read(self, fetch: Fetch, part: Part, readers: Sequence[int], *, again: bool = False) -> int:
        """The last time a holding is read for a piece: by these local tiles, by the assembly of the region, or by the task that sends it.
        ``again``: by second runs alone."""
        brought = self.brought.get(part)
        if brought is not None:
            return 0 if again else brought[1]
        if any(is_remote(self.plan, fetch, piece) for piece in fetch.pieces):  # put together once, for the first reader, and kept so
            return 0 if again else min(self.forward[tile][0] for tile, _ in fetch.consumers)
        if len(fetch.pieces) > 1:
            ends = (self.last(t) if t in self.weights else self.second.get(t, self.forward[t])[1] for t in readers)  # see ``needed``
            return max(ends, default=0)
        return max((self.needed(tile, fetch.tensor) for tile in readers), default=0)

    def lives(self, number: int, until: int) -> list[Span]:
        """When something is there that a tile has from its forward task to ``until``; of a recomputed tile during its first run, and again
        from its second one on."""
        start, end = self.forward[number]
        return [(start, end), (self.second[number][0], until)] if number in self.second else [(start, until)]

    def needed(self, number: int, tensor: str) -> int:
        """Until when a tile needs its region of an operand: the end of its backward task if autograd keeps it, or of the copy to its host,
        else of its last run forward. What waits for weight gradients keeps inputs that get gradients."""
        viewed = max(self.views.get((number, tensor), (0, 0)))
        if number in self.weights and self.plan.graph.tensors[tensor].requires_grad:
            return max(viewed, self.last(number))
        run_end = self.second.get(number, self.forward[number])[1]
        return max(viewed, self.left(number, tensor) if self._keeps(number, tensor) else run_end)

    def passed(self, number: int, tensor: str) -> int:
        """``needed`` in the tile's first run."""
        return max(self.forward[number][1], self.views.get((number, tensor), (0, 0))[0])

    def used(self, number: int, tensor: str) -> int:
        """``needed`` of what a tile's segment makes by itself. It is gone when its tiles have computed, one after the other."""
        viewed = self.views.get((number, tensor), (0, 0))[1]
        computed = self.second_work.get(number, self.forward[number])[1]
        return max(viewed, self.left(number, tensor) if self._keeps(number, tensor) else computed)

    def left(self, number: int, tensor: str = "") -> int:
        """Until when a tile holds what it keeps, beside what comes back from its host; of a ``tensor``, unless that is never offloaded."""
        offloads = not tensor or self.plan.graph.tensors[tensor].kind is TensorKind.ACTIVATION
        return self.away[number][1] if offloads and number in self.away else self.last(number)

    def _keeps(self, number: int, tensor: str) -> bool:
        """Whether autograd keeps a tile's region of an operand."""
        places = self.sizes[number].shares.keeps
        return places is None or not places.isdisjoint(self._places[self.plan.tiles[number].operator].get(tensor, ()))

    @cached_property
    def _places(self) -> list[dict[str, list[int]]]:
        """Operator -> tensor -> its places among the operator's operands."""
        found = list[dict[str, list[int]]]()
        for op in self.plan.graph.operators:
            found.append({})
            for place, operand in enumerate((*op.inputs, *op.parameters, *op.outputs)):
                found[-1].setdefault(operand.tensor, []).append(place)
        return found

    def summed_from(self, reduction: Reduction) -> Span:
        """When the devices of a reduction sum; with a single device, when its last tile runs."""
        name = reduce_name(self.plan.graph.operators[reduction.operator], reduction)
        return self.named.get(name, max((self.forward[tile] for tile in reduction.tiles), key=lambda span: span[1]))

    def last(self, tile: int) -> int:
        """End of a tile's last task: weight gradients, backward pass, or forward pass."""
        return self.weights.get(tile, self.backward.get(tile, self.forward[tile]))[1]

    def weighed(self, tile: int) -> Span:
        """When a tile that has a backward pass makes the gradients of its parameters."""
        return self.weights.get(tile, self.backward[tile])

    def wanted(self, holding: int) -> Span:
        """(when a holding's gradient is added up, until when it is held)."""
        found = self._wanted.get(holding)
        if found is None:
            found = self._wanted[holding] = self._when_wanted(holding)
        return found

    def _when_wanted(self, holding: int) -> Span:
        held = self.plan.holdings[holding]
        makers = [held.tile] if held.reduction is None else self.plan.reductions[held.reduction].tiles
        own = [tile for tile in makers if self.plan.tiles[tile].device == held.device and tile in self.backward]
        begun = self.back_at(own, self.end_ns)
        end = max((self.last(tile) for tile in own), default=self.end_ns)
        if held.reduction is not None:
            reduction = self.plan.reductions[held.reduction]
            name = reduce_name(self.plan.graph.operators[reduction.operator], reduction, gradient=True)
            if name in self.named:
                start = self.named[name][0]
                return start, start
        return begun, end

    def passes(self, tiles: Iterable[int], device: int, uses: Uses) -> Span:
        """(start of the first, end of the last) of these tiles' passes on a device; (end of the step, 0) if there are none. A backward pass
        is that of its whole segment, which runs at once, and the second run before it."""
        own = [tile for tile in tiles if self.plan.tiles[tile].device == device]
        spans = [self.forward[tile] for tile in own] if uses != "backward" else []
        if uses != "forward":
            spans += [self.segment_spans[segment] for segment in {self.segment[tile] for tile in own if tile in self.backward}]
            spans += [self.second[tile] for tile in own if tile in self.second]
        return min((start for start, _ in spans), default=self.end_ns), max((end for _, end in spans), default=0)

    @cached_property
    def segment_spans(self) -> dict[int, Span]:
        """First tile of a segment -> (start, end) of its backward pass."""
        found: dict[int, Span] = {}
        for tile, (start, end) in self.backward.items():
            first, last = found.get(self.segment[tile], (start, end))
            found[self.segment[tile]] = (min(first, start), max(last, end))
        return found

    def back_at(self, tiles: Iterable[int], default: int) -> int:
        """The earliest start of a backward pass among these tiles' segments; ``default`` if none of the tiles has a backward pass."""
        return min((self.begun[self.segment[tile]] for tile in tiles if tile in self.backward), default=default)

    def taken(self, number: int) -> int:
        """When the last part of a fetched region's gradient has been taken."""
        fetch = self.plan.fetches[number]
        remote = [self.returned[number, k][0] for k in range(len(fetch.pieces)) if (number, k) in self.returned]
        local = [self.wanted(piece.holding)[0] for piece in fetch.pieces if not is_remote(self.plan, fetch, piece)]
        return max([*remote, *local], default=0)

    def _name(self, carrier: Message | Exchange, *, gradient: bool) -> str:
        if isinstance(carrier, Exchange):
            return exchange_name(self.plan, carrier, gradient=gradient)
        return message_name(self.plan, carrier, gradient=gradient)
