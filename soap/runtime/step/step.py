"""One training step of one rank: the program's actions, forward and backward, in order.

The program decides where gradients flow: a rank that has none sends zeros. Contributions are added in the program's order, never in the
order of arrival, so that equal runs give equal bits.

A backward pass may be in two halves. Autograd makes the gradients of the leaves that it is asked for, and goes through no node that leads
to none of them. What it has saved stays for the second half, and so do the gradients of the segment's outputs; the outputs themselves do
not, unless it has saved them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

import torch

from soap.model.graph import TensorKind
from soap.model.regions import Box
from soap.plan.departures import sending_pass
from soap.plan.division import weights_name
from soap.plan.plan import (
    AGAIN,
    Exchange,
    Part,
    Pattern,
    Plan,
    ShardSync,
    backward_name,
    exchange_name,
    message_name,
    reduce_name,
    remote_parts,
)
from soap.plan.running.activity import ValueKey
from soap.plan.samples import label_counts
from soap.plan.syncs.seam import How
from soap.runtime.comm.position import HERE
from soap.runtime.comm.redistribute import Communicator, Pending
from soap.runtime.compression.peer import AS_IT_IS, CompressedTraining
from soap.runtime.marks import ON_RANKS
from soap.runtime.marks.seam import OnRank
from soap.runtime.program.actions import LEAVING, WHOLE_STEP, Action, ActionKind, MicroBatch, part_of
from soap.runtime.program.prepared import PreparedTile, PreparedTiles, StepInputs, units_of
from soap.runtime.program.program import Program, task_name
from soap.runtime.program.sync_actions import is_last_only, rows_of
from soap.runtime.step.early_start import Key, SyncSchedule
from soap.runtime.step.forward import ForwardPass
from soap.runtime.step.gradients import Gradients
from soap.runtime.step.state import Output, StepState, ValueStore
from soap.runtime.sync.look_ups import LookUps
from soap.runtime.sync.shards import ShardStore
from soap.runtime.system.memory_room import MemoryRoom
from soap.runtime.trace import Recorder
from soap.simulator.tasks import TaskKind
from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel, given


class Halves:
    """Of one step. ``parameters``: the leaves of parameters; all others are values."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = frozenset(map(id, parameters))
        self._left: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def inputs(self, number: int, gradients: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Make the gradients of a segment's inputs. ``gradients``: of its outputs, in their order."""
        first, second = (given(list(gradients), outputs) for _ in range(2))
        leaves = list(_leaves(first))
        values = [leaf for leaf in leaves if id(leaf) not in self._parameters]
        weights = [leaf for leaf in leaves if id(leaf) in self._parameters]
        if weights:
            self._left[number] = second, weights
        if values:
            torch.autograd.backward(first, retain_graph=bool(weights), inputs=values)

    def weights(self, number: int) -> None:
        """Make the gradients of its parameters, and free what was kept for them. Nothing, if no gradient has reached it."""
        if number in self._left:
            root, leaves = self._left.pop(number)
            torch.autograd.backward(root, inputs=leaves)


def _leaves(root: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaves from which a tensor was computed, and that take gradients, each once."""
    todo = [root.grad_fn]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node is None:
            continue
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        for other, _ in node.next_functions:
            if other not in seen:
                seen.add(other)
                todo.append(other)


Room = tuple[int, Box, torch.Tensor]
"""Where a part's gradient is received: (holding, region, tensor of that region)."""


class BackwardPass:
    """The backward pass of one micro-batch; one method per action."""

    def __init__(
        self, state: StepState, gradients: Gradients, prepared: PreparedTiles, marks: Mapping[str, OnRank], halves: Halves
    ) -> None:
        self.state, self.program, self.plan = state, state.program, state.plan
        self._early, self._values, self._marks, self._halves = gradients.early, gradients.of, marks, halves
        self._tiles = prepared.tiles
        self._needs, self._frees = prepared.needed, prepared.freed
        self._returning: dict[int, list[tuple[Box, torch.Tensor, Pending]]] = {}
        self._reduced: dict[int, Pending] = {}
        self._waiting: dict[int, int] = {}

    def run_segment(self, number: int) -> None:
        """Run a segment backward, from its outputs to its inputs, with the parameters' values that are gathered for it."""
        for sync in self._needs.get((ActionKind.SEGMENT, number), ()):
            self._values[sync].need(sync)
        self._run(number)
        if self.plan.tiles[self.program.segments[number].tiles[0]].operator not in self.plan.divided:
            self._is_back(number)
        for sync in self._frees.get((ActionKind.SEGMENT, number), ()):
            self._values[sync].free(sync)

    def run_weights(self, number: int) -> None:
        """Make the weight gradients of a segment whose backward pass is in two; some of them need other parameters' values."""
        first = self.plan.tiles[self.program.segments[number].tiles[0]]
        with self.state.task(weights_name(self.plan.operator(first), first), TaskKind.WEIGHTS), self._early.segment(number):
            self._halves.weights(number)
        self._is_back(number)
        for sync in self._frees.get((ActionKind.WEIGHTS, number), ()):
            self._values[sync].free(sync)

    def _marked(self, number: int) -> Iterator[tuple[int, OnRank]]:
        """A segment's tiles for whose marks the rank does something, and what does it."""
        tiles = self.program.segments[number].tiles
        return ((tile, self._marks[mark]) for tile in tiles if (mark := self._tiles[tile].mark))

    def _is_back(self, number: int) -> None:
        for tile, own in self._marked(number):
            own.is_back(tile)

    def _run(self, number: int) -> None:
        outputs, gradients = [], []
        first = self.plan.tiles[self.program.segments[number].tiles[0]]
        divided = first.operator in self.plan.divided
        for output in self.state.outputs.pop(number, ()):
            gradient = self._gradient(output)
            if gradient is not None and output.root.requires_grad:
                outputs.append(output.root)
                gradients.append(gradient)
            del gradient, output  # only the lists hold them now
        if not outputs:
            return
        for tile, own in self._marked(number) if self.state.is_traced else ():  # else when autograd asks for what it keeps
            own.goes_back(tile, self.state.task)
        name = backward_name(self.plan.operator(first), first)
        if divided:
            with self.state.task(name, TaskKind.BACKWARD):
                self._halves.inputs(number, gradients, outputs)
            return
        root = given(gradients, outputs)
        outputs.clear()
        with self.state.task(name, TaskKind.BACKWARD), self._early.segment(number):
            torch.autograd.backward(root)

    def return_message(self, number: int) -> None:
        """Send the gradients of a message back to its source, or receive them there."""
        message = self.plan.messages[number]
        parts = self._active(message.parts)
        tag, name = self.program.tags[number] + 1, message_name(self.plan, message, gradient=True)
        if message.target == self.state.rank:
            sending = sending_pass(self.plan, message, gradient=True)
            self.state.send([self._part_gradient(part) for part in parts], message.source, tag, name, sending)
            self._done_with(parts)
            return
        room = [self._room(part) for part in parts]
        pending = self.state.receive([place for _, _, place in room], message.target, tag, name)
        for sent in (self.state.sent.pop(number), self.state.sent_again.pop(number, None)):
            if sent is not None:  # this answer proves that the message has arrived
                pending.then(partial(self.state.comm.release, sent))
        self._expect(room, pending)

    def return_exchange(self, number: int) -> None:
        """Take part in the transpose of an exchange."""
        exchange = self.plan.exchanges[number]
        name = exchange_name(self.plan, exchange, gradient=True)
        if exchange.pattern is Pattern.BROADCAST:
            self._sum_at_source(exchange, name)
            return
        given: dict[int, list[torch.Tensor]] = {device: [] for device in exchange.devices}
        expected: dict[int, list[Room]] = {device: [] for device in exchange.devices}
        parts = self._active(exchange.parts)
        for part, (source, target, _, _) in zip(parts, remote_parts(self.plan, parts), strict=True):
            if target == self.state.rank:
                given[source].append(self._part_gradient(part))
            elif source == self.state.rank:
                expected[target].append(self._room(part))
        places = [[place for _, _, place in room] for room in expected.values()]
        pending = self.state.exchange(exchange.tensor, list(given.values()), places, exchange.devices, name)
        self._expect([own for room in expected.values() for own in room], pending)
        self._done_with(part for part in parts if self.plan.fetches[part[0]].device == self.state.rank)

    def _sum_at_source(self, exchange: Exchange, name: str) -> None:
        """The transpose of a broadcast: a sum at the source. A rank without gradient adds zeros."""
        source, _, box, holding = remote_parts(self.plan, exchange.parts)[0]
        if self.state.rank == source:
            room = self.state.regions.zeros(("holding", holding), box)
            self._expect([(holding, box, room)], self.state.sum_at(room, source, exchange.devices, name))
            return
        own = [part for part in exchange.parts if self.plan.fetches[part[0]].device == self.state.rank]
        gradient = self._part_gradient(own[0]) if self._active(own) else self.state.regions.zeros(("fetch", own[0][0]), box)
        self.state.sum_at(gradient.clone(memory_format=torch.contiguous_format), source, exchange.devices, name)
        self._done_with(self._active(own))

    def reduce_gradient(self, number: int) -> None:
        """Combine the group's gradients of a sum: gather the members' cells, or add up whole gradients."""
        reduction = self.plan.reductions[number]
        holding = self.program.index.reduced.get((number, self.state.rank))
        own = None if holding is None else self._collect(holding)
        name = reduce_name(self.state.graph.operators[reduction.operator], reduction, gradient=True)
        if own is None:
            place = reduction.devices.index(self.state.rank)
            own = self.state.regions.zeros(("sum", number), reduction.cells[place] if reduction.cells else None)
        elif len(reduction.devices) > 1 and not reduction.cells:
            own = own.clone(memory_format=torch.contiguous_format)  # it is summed in place, and may share memory with another gradient
        if reduction.cells:
            self._reduced[number] = self.state.gather_cells(own, number, name)
        else:
            self._reduced[number] = self.state.sum_over(own, reduction.devices, name)
        self._waiting[number] = sum(self.plan.tiles[tile].device == self.state.rank for tile in reduction.tiles)

    def _gradient(self, output: Output) -> torch.Tensor | None:
        """The gradient that one output of a segment gets from outside; None stands for zeros."""
        if output.holding is not None:
            total = self._collect(output.holding)
        else:
            assert output.reduction is not None
            total = self._sum_gradient(output.reduction)
            total = None if total is None else total.to(output.root.dtype)  # partial results may have a wider type
        if output.seed is None:
            return total
        one = torch.full(output.root.shape, self.state.share * output.seed, dtype=output.root.dtype, device=output.root.device)
        return one if total is None else total + one

    def _sum_gradient(self, reduction: int) -> torch.Tensor | None:
        """The gradient of a sum, for one of this rank's tiles; it is dropped after the last of them. None stands for zeros."""
        pending = self._reduced.get(reduction)
        if pending is None:
            return None
        self._waiting[reduction] -= 1
        if self._waiting[reduction] == 0:
            del self._reduced[reduction]
        return pending.wait()

    def _collect(self, holding: int) -> torch.Tensor | None:
        """Add up all gradients for a holding: from this rank's segments, from mixed fetches (see ``_parts_of``), then from other ranks."""
        key: ValueKey = ("holding", holding)
        regions = self.state.regions
        total = self.state.values.gradient(key)
        self.state.values.taken(key)
        parts = self._parts_of(holding)
        returned = self._returning.pop(holding, ())
        if parts or returned:  # they are added in place: copy first, as autograd's tensor may share memory with another gradient
            total = regions.zeros(key) if total is None else total.clone(memory_format=torch.contiguous_format)
        for part in parts:
            assert total is not None
            box = self.plan.fetches[part[0]].pieces[part[1]].box
            regions.add(key, total, box, self._part_gradient(part))
        self._done_with(parts)
        for box, place, pending in returned:
            assert total is not None
            pending.wait()
            regions.add(key, total, box, place)
        return total

    def _parts_of(self, holding: int) -> list[Part]:
        """The parts of a holding in this rank's mixed fetches: regions that also have parts from other ranks."""
        index, fetches = self.program.index, self.plan.fetches
        found = [f for f in index.fetches_from[holding] if f in index.carriers and fetches[f].device == self.state.rank]
        return self._active((f, k) for f in found for k, piece in enumerate(fetches[f].pieces) if piece.holding == holding)

    def _active(self, parts: Iterable[Part]) -> list[Part]:
        return [part for part in parts if part[0] in self.program.activity.fetches]

    def _part_gradient(self, part: Part) -> torch.Tensor:
        """This rank's gradient of a part that it has fetched."""
        key: ValueKey = ("fetch", part[0])
        box = self.plan.fetches[part[0]].pieces[part[1]].box
        gradient, regions = self.state.values.gradient(key), self.state.regions
        return regions.zeros(key, box) if gradient is None else regions.cut(key, gradient, box)

    def _done_with(self, parts: Iterable[Part]) -> None:
        """Note that one taker has used the gradients of these fetches. After the last taker, gradients and values are dropped."""
        for fetch in {fetch for fetch, _ in parts}:
            self.state.values.taken(("fetch", fetch))

    def _room(self, part: Part) -> Room:
        """Allocate the tensor that receives the gradient of a part of this rank's holding."""
        piece = self.plan.fetches[part[0]].pieces[part[1]]
        return piece.holding, piece.box, self.state.regions.empty(("holding", piece.holding), piece.box)

    def _expect(self, room: Iterable[Room], pending: Pending) -> None:
        for holding, box, place in room:
            self._returning.setdefault(holding, []).append((box, place, pending))


class LabelCounts:
    """What one rank counts, in the order of the plan's sums, which is the same on all ranks."""

    def __init__(self, prepared: PreparedTiles, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._counts = [own for own in label_counts(plan) if rank in own.devices]
        self._tiles = [[prepared.tiles[tile] for tile in own.tiles if tile in prepared.tiles] for own in self._counts]

    def begin(self, model: TracedModel, given: StepInputs, state: StepState) -> Callable[[str], torch.Tensor | None]:
        """Count this rank's labels, and begin to sum the counts. Returns ``TileContext.counts``, which waits for a sum."""
        found: dict[str, Pending] = {}
        for own, tiles in zip(self._counts, self._tiles, strict=True):
            total = torch.zeros((), dtype=torch.float64, device=state.comm.device)
            names = [self._count(total, model, tile, given) for tile in tiles if not tile.empty]
            pending = state.sum_over(total, own.devices, own.name)
            found.update(dict.fromkeys(names, pending))
            if not names:  # fewer samples than tiles: no tile here will ask
                state.comm.leave(pending)
        return lambda call: found[call].wait() if call in found else None

    def _count(self, total: torch.Tensor, model: TracedModel, tile: PreparedTile, given: StepInputs) -> str:
        """Add what a tile counts. Returns the call that divides."""
        with torch.no_grad():
            name, count = model.labels_counted(tile.tile, self._labels(tile, given))
            total.add_(count)
        return name

    def _labels(self, tile: PreparedTile, given: StepInputs) -> Sequence[torch.Tensor | None]:
        tensors = self._plan.graph.tensors
        return [None if tensors[source.tensor].kind is TensorKind.ACTIVATION else given.read(source) for source in tile.inputs]


_NUMBERS = count()
"""A number for each runner: none is given twice."""


class StepRunner:
    """Executes a program on one rank, step after step. After a step's last micro-batch, ``gradients`` holds the complete gradients.

    ``gradients``: another runner's, if both have the same shards and work on the same steps. ``compiled``: fuse tiles by ``torch.compile``.
    ``recorder``: times every task. ``room``: looked at between actions, where memory is short.
    """

    def __init__(
        self,
        program: Program,
        model: TracedModel,
        comm: Communicator,
        shards: ShardStore,
        dtype_of: Callable[[str], torch.dtype],
        recorder: Recorder | None = None,
        gradients: Gradients | None = None,
        compiled: bool = False,
        compressing: CompressedTraining = AS_IT_IS,
        room: MemoryRoom | None = None,
    ) -> None:
        self.program, self.model, self.comm, self.shards = program, model, comm, shards
        self.dtype_of, self.recorder = dtype_of, recorder
        self.gradients = gradients or Gradients(program, shards, comm, dtype_of, compressing, room, model.read_apart)
        self._room, self._number = room, next(_NUMBERS)
        self._units = units_of(program, model, comm.rank) if compiled else {}
        self._prepared = PreparedTiles(program, shards, comm.rank, dtype_of)
        self._schedule = sync_schedule(program, comm.rank, early=recorder is None, messages_apart=comm.messages_apart)
        self._forward, self._backward = _calls(program.forward, comm.rank), _calls(program.backward, comm.rank)
        if program.interleaved:  # there is no moment between both passes
            self._forward, self._backward = [], _calls(program.interleaved, comm.rank)
        self._marks = {field: kind(program, comm) for field, kind in ON_RANKS.items()}
        self._look_ups = LookUps(self._prepared, program.plan, comm.rank)
        self._labels = LabelCounts(self._prepared, program.plan, comm.rank)
        self._task_name = partial(task_name, program)
        self._without_sync = [(kind, own) for kind, own in self._backward if not is_last_only(program.plan, ActionKind[kind], own)]

    def run(
        self,
        inputs: StepInputs,
        context: TileContext,
        part: MicroBatch = WHOLE_STEP,
    ) -> Callable[[], float]:
        """Run forward and backward pass. Returns a function that waits for the loss, so that the parameters can be updated meanwhile."""
        prepared, program = self._prepared, self.program
        values = ValueStore(prepared.readers, prepared.takers, prepared.second_readers, program.dropped, program.gathered_again)
        state = StepState(program, values, self.comm, self.dtype_of, self.recorder, part.share)
        gradients = self.gradients
        marks, asked = self._marks, self._look_ups
        if inputs.own is not None:
            context = replace(context, counts=self._labels.begin(self.model, inputs, state))
        forward = ForwardPass(state, self.model, prepared, self.shards, inputs, context, asked, gradients, marks, self._units)
        halves = Halves(self.shards.leaves.values() if program.plan.divided else ())
        backward = BackwardPass(state, gradients, prepared, marks, halves)
        handlers = _handlers(forward, backward, gradients)
        if self._room is not None:
            self._room.begin((self._number, part.last))
            handlers = {kind: _looking(self._room, handler) for kind, handler in handlers.items()}
        HERE.name = self._task_name
        served = gradients.serves_early and part.last and self.recorder is None
        with gradients.step(self._schedule, part, state.watch, served=served):
            for call in self._forward:
                HERE.call = call
                handlers[call[0]](call[1])
            forward.release()
            for call in self._backward if part.last else self._without_sync:
                HERE.call = call
                handlers[call[0]](call[1])
            HERE.call = None
            if not served:  # else when this rank receives what its sends are answered with
                self.comm.finish_sends()  # gradients are still being summed meanwhile
        return forward.loss_value


def _looking(room: MemoryRoom, handler: Callable[[int], None]) -> Callable[[int], None]:
    """A handler that looks at the memory first."""

    def run(subject: int) -> None:
        room.look()
        handler(subject)

    return run


def _calls(actions: Sequence[Action], rank: int) -> list[tuple[str, int]]:
    """The rank's actions as (name of the kind, subject): enum members are slow dictionary keys."""
    return [(action.kind.name, action.subject) for action in part_of(actions, rank)]


def _handlers(forward: ForwardPass, backward: BackwardPass, gradients: Gradients) -> dict[str, Callable[[int], None]]:
    def run_segment(number: int) -> None:
        forward.release()
        forward.gather_for(number)
        backward.run_segment(number)

    handlers: dict[ActionKind, Callable[[int], None]] = {
        ActionKind.TILE: forward.run_tile,
        ActionKind.TRANSFER: forward.transfer,
        ActionKind.EXCHANGE: forward.exchange,
        ActionKind.REDUCE: forward.reduce,
        ActionKind.REDUCE_NUMBERS: forward.reduce_numbers,
        ActionKind.LOSS: forward.tell_loss,
        ActionKind.TRANSFER_AGAIN: forward.transfer_again,
        ActionKind.EXCHANGE_AGAIN: forward.exchange_again,
        ActionKind.REDUCE_AGAIN: partial(forward.reduce, again=AGAIN),
        ActionKind.RECOMPUTE: forward.recompute,
        ActionKind.SEGMENT: run_segment,
        ActionKind.WEIGHTS: backward.run_weights,
        ActionKind.RETURN: backward.return_message,
        ActionKind.RETURN_EXCHANGE: backward.return_exchange,
        ActionKind.REDUCE_GRADIENT: backward.reduce_gradient,
        ActionKind.ASK: forward.ask,
        ActionKind.BRING: lambda number: gradients.of[number].bring(number),
        ActionKind.BRING_BACK: lambda number: gradients.of[number].bring_back(number),
        ActionKind.HAND_ON: lambda number: gradients.of[number].hand_on(number),
        ActionKind.COLLECT: partial(gradients.start, ActionKind.COLLECT),
        ActionKind.SYNC: partial(gradients.start, ActionKind.SYNC),
    }
    return {kind.name: handler for kind, handler in handlers.items()}


def sync_schedule(program: Program, rank: int, early: bool = True, *, messages_apart: bool = False) -> SyncSchedule:
    """When a rank's gradients are complete. Not ``early``: each exchange waits for its own action. ``messages_apart``: ``Communicator``."""
    actions = part_of(program.interleaved or program.backward, rank)
    waiting = {action.subject for action in actions if action.kind in LEAVING}
    contributions = {number: _contributions(program, rank, program.plan.syncs[number]) for number in waiting}
    follow = _followers(program.plan, actions, messages_apart) if early else {}
    always = {segment: [key for key in keys if not is_last_only(program.plan, *key)] for segment, keys in follow.items()}
    return SyncSchedule(contributions, follow, always)


def _contributions(program: Program, rank: int, sync: ShardSync) -> int:
    """How many gradients this rank's segments contribute to a synchronization: one per segment and leaf. Each region is a leaf."""
    return sum(len({program.segment_of[tile] for tile in _active(program, rank, region.uses)}) for region in sync.regions)


def _active(program: Program, rank: int, uses: Sequence[tuple[int, int]]) -> Iterator[int]:
    return (tile for tile, _ in uses if tile in program.activity.tiles and program.plan.tiles[tile].device == rank)


def _followers(plan: Plan, actions: Sequence[Action], messages_apart: bool) -> dict[int, tuple[Key, ...]]:
    """Segment -> the exchanges that may start right after it: they wait for nothing else and overtake nothing that comes first."""
    collected = {action.subject for action in actions if action.kind is ActionKind.COLLECT}

    def starts(action: Action) -> bool:
        return action.kind is ActionKind.COLLECT or (action.kind is ActionKind.SYNC and action.subject not in collected)

    def behind(following: Iterable[Action]) -> Iterator[Key]:
        passed = False
        for action in following:
            if starts(action) and (not passed or _is_collective(plan, action)):
                yield action.kind, action.subject
            elif messages_apart and _is_of_messages(plan, action):
                passed = True
            else:
                return

    passes = (ActionKind.SEGMENT, ActionKind.WEIGHTS)  # of a segment in two the second one counts
    segments = {action.subject: place for place, action in enumerate(actions) if action.kind in passes}
    return {number: tuple(behind(actions[place + 1 :])) for number, place in segments.items()}


def _is_collective(plan: Plan, action: Action) -> bool:
    """Whether an action is one sum as it stands, which may overtake messages."""
    if action.kind is not ActionKind.SYNC:
        return False
    return any(row.how is How.SUM for row in rows_of(plan, action.kind, plan.syncs[action.subject])[:1])


def _is_of_messages(plan: Plan, action: Action) -> bool:
    """Whether an action returns gradients of activations by point-to-point messages alone."""
    match action.kind:
        case ActionKind.RETURN:
            return True
        case ActionKind.RETURN_EXCHANGE:
            return plan.exchanges[action.subject].pattern is not Pattern.BROADCAST
        case ActionKind.REDUCE_GRADIENT:
            return bool(plan.reductions[action.subject].cells)
    return False
