"""The backward pass of one step on one rank: it runs segments in the program's order and exchanges gradients with other ranks.

The program decides where gradients flow: a rank that has none sends zeros. Contributions are added in the program's order, never in the
order of arrival, so that equal runs give equal bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from soap.model.regions import Box
from soap.plan.departures import sending_pass
from soap.plan.division import weights_name
from soap.plan.plan import (
    Exchange,
    Part,
    Pattern,
    backward_name,
    exchange_name,
    message_name,
    reduce_name,
    remote_parts,
)
from soap.runtime.comm.assembling import cut
from soap.runtime.comm.redistribute import Pending
from soap.runtime.program.actions import ActionKind
from soap.runtime.program.prepared import PreparedTiles
from soap.runtime.step.gradients import Gradients
from soap.runtime.step.halves import Halves
from soap.runtime.step.kept_on_host import KeptOnHost
from soap.runtime.step.state import Output, StepState
from soap.simulator.tasks import TaskKind
from soap.tracing.given import Awaited, given

Room = tuple[int, Box, torch.Tensor]
"""Where a part's gradient is received: (holding, region, tensor of that region)."""


class BackwardPass:
    """The backward pass of one micro-batch; one method per action."""

    def __init__(self, state: StepState, gradients: Gradients, prepared: PreparedTiles, on_host: KeptOnHost, halves: Halves) -> None:
        self.state, self.program, self.plan = state, state.program, state.plan
        self._early, self._values, self._on_host, self._halves = gradients.early, gradients, on_host, halves
        self._needs, self._frees = prepared.needed, prepared.freed
        self._returning: dict[int, list[tuple[Box, torch.Tensor, Pending]]] = {}
        self._reduced: dict[int, Pending] = {}
        self._waiting: dict[int, int] = {}

    def run_segment(self, number: int) -> None:
        """Run a segment backward, from its outputs to its inputs, with the parameters' values that are gathered for it."""
        for sync in self._needs.get((ActionKind.SEGMENT, number), ()):
            self._values.need(sync)
        self._run(number)
        for sync in self._frees.get((ActionKind.SEGMENT, number), ()):
            self._values.free(sync)

    def run_weights(self, number: int) -> None:
        """Make the weight gradients of a segment whose backward pass is in two; some of them need other parameters' values."""
        first = self.plan.tiles[self.program.segments[number].tiles[0]]
        with self.state.task(weights_name(self.plan.operator(first), first), TaskKind.WEIGHTS), self._early.segment(number):
            self._halves.weights(number)
        for sync in self._frees.get((ActionKind.WEIGHTS, number), ()):
            self._values.free(sync)

    def _run(self, number: int) -> None:
        outputs, gradients = [], []
        first = self.plan.tiles[self.program.segments[number].tiles[0]]
        divided = first.operator in self.plan.divided
        passes = 2 if divided else 1
        for output in self.state.outputs.pop(number, ()):
            gradient, tensor = self._gradient(output), output.tensor
            if isinstance(tensor, Awaited):
                gradient = None if gradient is None else tensor.answer(gradient, passes)
                tensor = tensor.stand
            if gradient is not None and tensor.requires_grad:
                outputs.append(tensor)
                gradients.append(gradient)
            del gradient, tensor, output  # only the lists hold them now
        if not outputs:
            return
        for tile in self.program.segments[number].tiles if self.state.is_traced else ():  # else it comes back when autograd asks for it
            self._on_host.need(tile, self.state.task)
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
        sent = self.state.sent.pop(number)
        pending.then(lambda: self.state.comm.release(sent))  # this answer proves that the message has arrived
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
            room = self.state.zeros(box, exchange.tensor)
            self._expect([(holding, box, room)], self.state.sum_at(room, source, exchange.devices, name))
            return
        own = [part for part in exchange.parts if self.plan.fetches[part[0]].device == self.state.rank]
        gradient = self._part_gradient(own[0]) if self._active(own) else self.state.zeros(box, exchange.tensor)
        self.state.sum_at(gradient.clone(memory_format=torch.contiguous_format), source, exchange.devices, name)
        self._done_with(self._active(own))

    def reduce_gradient(self, number: int) -> None:
        """Combine the group's gradients of a sum: gather the members' cells, or add up whole gradients."""
        reduction, tensor = self.plan.reductions[number], self.state.reduced_tensor(number)
        holding = self.program.index.reduced.get((number, self.state.rank))
        own = None if holding is None else self._collect(holding)
        name = reduce_name(self.state.graph.operators[reduction.operator], reduction, gradient=True)
        if own is None:
            place = reduction.devices.index(self.state.rank)
            own = self.state.zeros(reduction.cells[place] if reduction.cells else reduction.box, tensor)
        elif len(reduction.devices) > 1 and not reduction.cells:
            own = own.clone(memory_format=torch.contiguous_format)  # it is summed in place, and may share memory with another gradient
        if reduction.cells:
            self._reduced[number] = self.state.gather_cells(own, self.state.empty(reduction.box, tensor), reduction, name)
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
            total = None if total is None else total.to(output.tensor.dtype)  # partial results may have a wider type
        if output.seed is None:
            return total
        assert isinstance(output.tensor, torch.Tensor)
        one = torch.full_like(output.tensor, self.state.share * output.seed)
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
        held = self.plan.holdings[holding]
        total = self.state.values.gradient(("holding", holding))
        self.state.values.taken(("holding", holding))  # its value is not needed any more
        parts = self._parts_of(holding)
        returned = self._returning.pop(holding, ())
        if parts or returned:  # they are added in place: copy first, as autograd's tensor may share memory with another gradient
            total = self.state.zeros(held.box, held.tensor) if total is None else total.clone(memory_format=torch.contiguous_format)
        for part in parts:
            assert total is not None
            box = self.plan.fetches[part[0]].pieces[part[1]].box
            cut(total, held.box, box).add_(self._part_gradient(part))
        self._done_with(parts)
        for box, place, pending in returned:
            assert total is not None
            pending.wait()
            cut(total, held.box, box).add_(place)
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
        fetch = self.plan.fetches[part[0]]
        box = fetch.pieces[part[1]].box
        gradient = self.state.values.gradient(("fetch", part[0]))
        return self.state.zeros(box, fetch.tensor) if gradient is None else cut(gradient, fetch.box, box)

    def _done_with(self, parts: Iterable[Part]) -> None:
        """Note that one taker has used the gradients of these fetches. After the last taker, gradients and values are dropped."""
        for fetch in {fetch for fetch, _ in parts}:
            self.state.values.taken(("fetch", fetch))

    def _room(self, part: Part) -> Room:
        """Allocate the tensor that receives the gradient of a part of this rank's holding."""
        fetch = self.plan.fetches[part[0]]
        piece = fetch.pieces[part[1]]
        return piece.holding, piece.box, self.state.empty(piece.box, fetch.tensor)

    def _expect(self, room: Iterable[Room], pending: Pending) -> None:
        for holding, box, place in room:
            self._returning.setdefault(holding, []).append((box, place, pending))
