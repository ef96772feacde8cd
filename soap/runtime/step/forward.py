"""The forward pass of one step on one rank: it computes tiles, receives what they read, and sends what other ranks read of them.

Inside a segment, autograd links the tiles. What comes from outside (an earlier segment, another rank, a sum over a group) enters as a
value of its own, with a leaf behind it. It is dropped after its last reader on this rank; autograd keeps what the backward pass needs.

A recomputed segment runs twice: first without autograd, so that it keeps nothing, and again (``recompute``) right before its backward pass
needs it, from the same leaves, with the same random numbers. It notes statistics only the first time. ``light`` tiles keep their
outputs, and do not compute their products again (``KeptProducts``).

What ranks do for other marks is in ``runtime.marks``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from soap.model.regions import lengths
from soap.plan.departures import sending_pass
from soap.plan.plan import AGAIN, ASK_NAME, message_name, recompute_name, reduce_name, remote_parts
from soap.plan.plan import Part as MessagePart
from soap.plan.running.activity import ValueKey
from soap.runtime.comm.redistribute import Pending
from soap.runtime.marks.seam import OnRank
from soap.runtime.program.actions import ActionKind
from soap.runtime.program.prepared import Fetched, Outputs, Parameter, Piece, PreparedTile, PreparedTiles, Source, StepInputs, Unit
from soap.runtime.step.arrivals import Arrivals
from soap.runtime.step.gradients import Gradients
from soap.runtime.step.routed import Ids, RegionKey
from soap.runtime.step.state import Output, StepState, leaf
from soap.runtime.sync.look_ups import Asked, LookUps, rows_for
from soap.runtime.sync.shards import ShardStore, keep_memory
from soap.simulator.tasks import TaskKind
from soap.strategy.recomputation import has_product
from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel, root_of
from soap.tracing.products import Made, first_run, second_run


class ForwardPass:
    """The forward pass of a micro-batch, one method per action. ``given``: inputs and constants. ``units``: first tile -> fused tiles."""

    def __init__(
        self,
        state: StepState,
        model: TracedModel,
        prepared: PreparedTiles,
        shards: ShardStore,
        given: StepInputs,
        context: TileContext,
        look_ups: LookUps,
        gradients: Gradients,
        marks: Mapping[str, OnRank],
        units: Mapping[int, Unit] | None = None,
    ) -> None:
        self.state, self.program, self.plan = state, state.program, state.plan
        self.model, self.shards, self.given = model, shards, given
        self.context = context
        self._prepared, self._marks = prepared, marks
        self._units = units or {}
        self._look_ups, self._by_rows = look_ups, gradients.by_rows
        self._sync_context, self._values = gradients.context, gradients.of
        self._asked: Asked = {}
        self._computed: dict[int, Outputs] = {}
        self._loss: Callable[[], float] = lambda: 0.0
        self._numbers: dict[int, torch.Tensor] = {}
        self._segment = -1
        self._second = False
        self._attached: dict[int, torch.Tensor] = {}
        self._fetched: dict[int, torch.Tensor] = {}
        self._regions: dict[int, torch.Tensor] = {}
        self._partials: dict[tuple[int, int], torch.Tensor] = {}
        self._products = KeptProducts(state)
        self._arrivals = Arrivals(state)
        self._reducing: dict[int, Pending] = {}
        self._gathered = self.program.gathered_again
        self._coming: dict[int, int] = {}
        state.regions.ids_of = self._ids_of

    def run_tile(self, number: int) -> None:
        """Compute a tile."""
        tile = self._prepared.tiles[number]
        if tile.segment != self._segment:
            self._segment = tile.segment
            self._forget_segment()
        for sync in () if self._second else tile.needs:
            self._values[sync].need(sync)
        outputs = self._outputs(tile)
        gathered = [own.key for own in tile.leaves if own.number in self._gathered] if self._gathered and not self._second else []
        if tile.gathered or gathered:
            outputs = self._without_values(tile, outputs, gathered)
        tile.check(outputs)
        if tile.routed is not None:
            self._note_rows(tile, tile.routed)
        if tile.held:
            self._keep_held(tile, outputs)
        if tile.summands:
            self._keep_summands(tile, outputs)
        for fetch in tile.leaves:
            self._leave_fetch(fetch)
        for sync in () if self._second else tile.frees:
            self._values[sync].free(sync)

    def _note_rows(self, tile: PreparedTile, ids: int) -> None:
        """Note where routed rows that a tile makes are, by its input with the experts' numbers."""
        source = tile.inputs[ids]
        if source.empty:
            return
        own = Ids(self._input(source), source.box[0][0])
        for held in tile.held:
            if self.state.regions.is_routed(("holding", held.holding)):
                self.state.regions.note(("holding", held.holding), own)
        for summand in tile.summands:
            self.state.regions.note(("sum", summand.reduction), own)
            holding = self.program.index.reduced.get((summand.reduction, self.state.rank))
            if holding is not None:
                self.state.regions.note(("holding", holding), own)

    def _ids_of(self, key: RegionKey) -> Ids:
        """The experts' numbers for routed rows that this rank fetches: those of a tile that reads them."""
        assert key[0] == "fetch", "of routed rows that a rank makes, the numbers are noted"
        fetch = self.plan.fetches[key[1]]
        tile = self._prepared.tiles[fetch.consumers[0][0]]
        ids = self.state.graph.routed[fetch.tensor]
        source = next(source for source in tile.inputs if source.tensor == ids)
        return Ids(self._input(source), source.box[0][0])

    def _without_values(self, tile: PreparedTile, outputs: Outputs, gathered: Iterable[ValueKey]) -> Outputs:
        """The outputs; those that are views of values which are gathered for their uses, or again, become copies."""
        leaves = [*(self.shards.leaves[piece] for piece in tile.gathered), *map(self.state.values.__getitem__, gathered)]
        places = {leaf.untyped_storage().data_ptr() for leaf in leaves if leaf.numel()}
        with torch.set_grad_enabled(tile.active):
            return [
                own.clone() if own is not None and own.numel() and own.untyped_storage().data_ptr() in places else own for own in outputs
            ]

    def recompute(self, segment: int) -> None:
        """Run a segment's tiles again, so that autograd keeps what their backward pass needs. Gathered parameters stay till then."""
        self.gather_for(segment)
        for sync in self._prepared.needed.get((ActionKind.RECOMPUTE, segment), ()):
            self._values[sync].need(sync)
        context, self.context = self.context, replace(self.context, update_buffers=False)
        self._second, self._segment = True, -1
        for number in self.program.segments[segment].tiles:
            self.run_tile(number)
        self._second, self._segment, self.context = False, -1, context
        self._forget_segment()

    def _outputs(self, tile: PreparedTile) -> Outputs:
        if self._units:
            if tile.number in self._units:
                unit = self._units[tile.number]
                self._computed.update(zip(unit.tiles, unit.run(self._unit_input, self._unit_parameter, self.context.counts), strict=True))
            if tile.number in self._computed:
                return self._computed.pop(tile.number)
        if tile.empty:  # fewer samples than tiles: an empty output, or zeros for a sum
            return [torch.zeros(shape, dtype=dtype, device=self.state.comm.device) for shape, dtype in tile.made]
        if tile.rows:
            return self._look_up(tile)
        inputs = [self._input(source) for source in tile.inputs]
        parameters = [self._parameter(parameter) for parameter in tile.parameters]
        if tile.mark:
            return self._run_marked(tile, inputs, parameters)
        if tile.light:
            run = self._products.second if self._second else self._products.first
            return run(tile, inputs, lambda given: self.model.run_tile(tile.tile, given, parameters, self.context))
        records = tile.active and tile.again is self._second
        if not self.state.is_traced and torch.is_grad_enabled() is records:
            return self.model.run_tile(tile.tile, inputs, parameters, self.context)
        kind = TaskKind.RECOMPUTE if self._second else TaskKind.FORWARD
        name = recompute_name(tile.operator, tile.tile) if self._second else tile.name
        with self.state.task(name, kind), torch.set_grad_enabled(records):
            return self.model.run_tile(tile.tile, inputs, parameters, self.context)

    def _run_marked(self, tile: PreparedTile, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> Outputs:
        """Compute a tile, and do what its mark asks for."""
        stays = [*parameters, *(own for own, source in zip(inputs, tile.inputs, strict=True) if source.fetch is None)]
        task, own = self.state.task, self._marks[tile.mark]
        with own.running(tile.number, stays, task), task(tile.name, TaskKind.FORWARD), torch.set_grad_enabled(True):
            outputs = self.model.run_tile(tile.tile, inputs, parameters, self.context)
        own.has_run(tile.number, outputs, task)
        return outputs

    def _look_up(self, tile: PreparedTile) -> Outputs:
        """Compute a tile with a sparse lookup."""
        inputs = [self._input(source) for source in tile.inputs]
        given = {own.place: rows_for(tile.number, own, self._asked, self._by_rows, self.shards) for own in tile.rows}
        parameters = [given[k][0] if k in given else self._parameter(parameter) for k, parameter in enumerate(tile.parameters)]
        rows = {place: own for place, (_, own) in given.items()}
        with self.state.task(tile.name, TaskKind.FORWARD), torch.set_grad_enabled(tile.active):
            return self.model.run_sparse_lookup(tile.tile, inputs, parameters, rows, self.context)

    def ask(self, _: int) -> None:
        """Send requests for the rows that this rank's tiles look up."""
        requests = self._sync_context.requests
        with self.state.task(ASK_NAME, TaskKind.SYNC) if requests.asks_others else nullcontext():
            self._asked = self._look_ups.asked(self.model, self.given, self.context)
            requests.ask(self._look_ups.by_sync(self._asked, self.state.comm.device))

    def transfer(self, number: int) -> None:
        """Send or receive a message."""
        message = self.plan.messages[number]
        if message.target == self.state.rank:
            self._arrivals.expect_message(number)
            return
        parts = remote_parts(self.plan, message.parts)
        values = [self.state.regions.cut(("holding", holding), self._held(holding), box) for _, _, box, holding in parts]
        answered = any(fetch in self.program.activity.fetches for fetch, _ in message.parts)
        sending = None if answered else sending_pass(self.plan, message, gradient=False)
        pending = self.state.send(values, message.target, self.program.tags[number], message_name(self.plan, message), sending)
        if answered:
            self.state.sent[number] = pending
        self._leave_holdings({holding for *_, holding in parts})

    def exchange(self, number: int) -> None:
        """Take part in an exchange."""
        self._arrivals.exchange(number, self._held)
        parts = remote_parts(self.plan, self.plan.exchanges[number].parts)
        self._leave_holdings({holding for source, _, _, holding in parts if source == self.state.rank})

    def transfer_again(self, number: int) -> None:
        """Send or receive a message a second time."""
        message = self.plan.messages[number]
        if message.target == self.state.rank:
            self._expect_again(message.parts)
            self._arrivals.expect_message(number, AGAIN)
            self._has_come(message.parts)
            return
        parts = remote_parts(self.plan, message.parts)
        values = [self.state.regions.cut(("holding", holding), self._held(holding), box) for _, _, box, holding in parts]
        name = message_name(self.plan, message) + AGAIN
        self.state.sent_again[number] = self.state.send(values, message.target, self.program.tags[number], name)
        self._leave_again({holding for *_, holding in parts})

    def exchange_again(self, number: int) -> None:
        """Take part in an exchange a second time."""
        exchange = self.plan.exchanges[number]
        mine = [part for part in exchange.parts if self.plan.fetches[part[0]].device == self.state.rank]
        self._expect_again(mine)
        self._arrivals.exchange(number, self._held, AGAIN)
        parts = remote_parts(self.plan, exchange.parts)
        self._leave_again({holding for source, _, _, holding in parts if source == self.state.rank})
        self._has_come(mine)

    def _expect_again(self, parts: Iterable[MessagePart]) -> None:
        """Give regions whose parts come a second time their memory back."""
        for fetch in dict.fromkeys(fetch for fetch, _ in parts):
            if fetch in self._coming:
                continue
            self._coming[fetch] = len(self.program.index.carriers[fetch])
            key: ValueKey = ("fetch", fetch)
            if key in self.state.values:
                region = self.state.values[key]
                keep_memory(region, kept=True)
                self._arrivals.put_into(fetch, region.data)

    def _has_come(self, parts: Iterable[MessagePart]) -> None:
        """Note that all parts of a message or exchange have been asked for. A region that nobody reads again is taken at once."""
        for fetch in dict.fromkeys(fetch for fetch, _ in parts):
            self._coming[fetch] -= 1
            if not self._coming[fetch] and ("fetch", fetch) not in self.state.values:
                self._take_again(self._prepared.fetches[fetch])

    def _take_again(self, fetch: Fetched) -> None:
        self._arrivals.take(fetch.number, self._held)
        self.state.values.drop(fetch.key)
        self._leave_again(fetch.holdings)
        del self._coming[fetch.number]

    def gather_for(self, segment: int) -> None:
        """Wait for what a segment's tiles read of regions that are gathered again."""
        if not self._coming:
            return
        for number in self.program.segments[segment].tiles:
            for fetch in self._prepared.tiles[number].leaves:
                if fetch.number in self._coming:
                    self._take_again(fetch)

    def _leave_again(self, holdings: Iterable[int]) -> None:
        for holding in holdings:
            self.state.values.leave_again(("holding", holding))

    def reduce(self, number: int, again: str = "") -> None:
        """Sum this rank's partial results, then begin to sum over the group. ``again``: behind the name of its task, if it is the second
        time."""
        reduction, total = self.plan.reductions[number], self._own_sum(number)
        name = reduce_name(self.state.graph.operators[reduction.operator], reduction) + again
        state = self.state
        pending = state.scatter_sum(total, number, name) if reduction.cells else state.sum_over(total, reduction.devices, name)
        self._round(pending, number)
        holding = self.program.index.reduced.get((number, state.rank))
        if holding is not None and state.values.has_readers(("holding", holding)):
            self._reducing[number] = pending
        else:
            state.comm.leave(pending)

    def reduce_numbers(self, together: int) -> None:
        """Begin several reductions of one number each as a single sum."""
        numbers = self.program.number_sums[together]
        reduction = self.plan.reductions[numbers[0]]
        totals = torch.stack([self._own_number(number) for number in numbers])
        pending = self.state.sum_over(totals, reduction.devices, reduce_name(self.state.graph.operators[reduction.operator], reduction))
        if self.program.known:
            shares = [self.program.seeds[self.state.reduced_tensor(number)] for number in numbers]
            self._loss = lambda: sum(share * number for share, number in zip(shares, pending.wait().tolist(), strict=True))
            return
        for place, number in enumerate(numbers):
            one = totals[place].reshape(lengths(self.plan.reductions[number].box))
            self._reducing[number] = Pending((), one, pending.wait)
            self._round(self._reducing[number], number)

    def _round(self, pending: Pending, number: int) -> None:
        """Once a sum of partial results is complete, convert it to the dtype that its readers expect."""
        dtype = self.state.dtype_of(self.state.reduced_tensor(number))
        if pending.tensor.dtype != dtype:

            def rounded() -> None:
                pending.tensor = pending.tensor.to(dtype)

            pending.then(rounded)

    def _own_sum(self, number: int) -> torch.Tensor:
        first, *others = self._own_partials(number)
        total = first.clone(memory_format=torch.contiguous_format)
        for partial in others:
            total.add_(partial)
        return total

    def _own_number(self, number: int) -> torch.Tensor:
        first, *others = self._own_partials(number)
        return sum(others, first).reshape(())

    def _own_partials(self, number: int) -> list[torch.Tensor]:
        reduction = self.plan.reductions[number]
        own = [tile for tile in reduction.tiles if self.plan.tiles[tile].device == self.state.rank]
        return [self._partials.pop((tile, reduction.output)) for tile in own]

    def tell_loss(self, holding: int) -> None:
        """Make the loss known to every rank: broadcast it from the holding's device unless all ranks know it already."""
        comm = self.state.comm
        if self.program.known:
            if comm.world_size > self.plan.device_count:  # ranks without a device
                known = self._loss() if self.state.rank < self.plan.device_count else 0.0
                self._broadcast_loss(torch.tensor(known, dtype=torch.float64, device=comm.device), 0)
            return
        own = self.program.losses.get(self.state.rank)
        if own is not None:
            reduction = self.plan.holdings[own].reduction
            loss = (self._numbers[own] if reduction is None else self._reducing[reduction].wait()).reshape(())
        else:
            loss = torch.zeros((), dtype=self.state.dtype_of(self.state.graph.loss), device=comm.device)
        if self.program.loss_count == comm.world_size:
            self._loss = lambda: float(loss)
            return
        self._broadcast_loss(loss.clone(), self.plan.holdings[holding].device)

    def _broadcast_loss(self, loss: torch.Tensor, source: int) -> None:
        telling = self.state.comm.broadcast(loss, source)
        self._loss = lambda: float(telling.wait())

    def loss_value(self) -> float:
        """The loss. Waits until it is here: ask late."""
        return self._loss()

    def release(self) -> None:
        """Drop what the last segment has used."""
        self._forget_segment()

    def _forget_segment(self) -> None:
        self._attached, self._fetched, self._regions = {}, {}, {}

    def _keep_held(self, tile: PreparedTile, outputs: Outputs) -> None:
        """Store a tile's outputs for their readers, and note those whose gradients will come from outside of the segment."""
        for held in tile.held:
            tensor = outputs[held.output]
            if tensor is None:
                continue
            if held.read:
                self._attached[held.holding] = tensor
            if held.late and not self._second:
                self._numbers[held.holding] = tensor.detach()
            if held.kept and (not self._second or self.state.values.reads_again(("holding", held.holding))):
                self.state.values.put(("holding", held.holding), tensor, held.takes_gradient)
            if held.answered and tile.again is self._second:
                self._note(Output(root_of(tensor), held.holding, None, held.seed))

    def _keep_summands(self, tile: PreparedTile, outputs: Outputs) -> None:
        for summand in tile.summands:
            tensor = outputs[summand.output]
            if tensor is None:
                continue
            if not self._second or summand.reduction in self.program.summed_again:
                self._partials[tile.number, summand.output] = tensor.detach()
            if summand.answered and tile.again is self._second:
                self._note(Output(root_of(tensor), None, summand.reduction, summand.seed))

    def _note(self, output: Output) -> None:
        self.state.outputs.setdefault(self._segment, []).append(output)

    def _held(self, holding: int) -> torch.Tensor:
        """The detached value of a holding of this rank."""
        reduction = self.plan.holdings[holding].reduction
        if reduction is not None:
            return self._reducing[reduction].wait()
        return self._numbers[holding] if holding in self._numbers else self.state.values["holding", holding].detach()

    def _unit_input(self, number: int, place: int) -> torch.Tensor:
        return self._input(self._prepared.tiles[number].inputs[place])

    def _unit_parameter(self, number: int, place: int) -> torch.Tensor:
        return self._parameter(self._prepared.tiles[number].parameters[place])

    def _input(self, source: Source) -> torch.Tensor:
        """An input region of a tile."""
        fetch = source.fetch
        if fetch is None:
            return self.state.empty(source.box, source.tensor) if source.empty else self.given.read(source)
        if fetch.sole is not None:
            attached = self._attached.get(fetch.sole)
            return self._holding_leaf(fetch.sole) if attached is None else attached
        if fetch.carried:
            return self._arrived(fetch)
        if fetch.number not in self._fetched:
            values = [self._piece(piece) for piece in fetch.pieces]
            self._fetched[fetch.number] = self.state.regions.assemble(fetch.key, [piece.box for piece in fetch.pieces], values)
        return self._fetched[fetch.number]

    def _arrived(self, fetch: Fetched) -> torch.Tensor:
        """A region with parts from other ranks: one leaf for the whole region."""
        values, key = self.state.values, fetch.key
        if key not in values:
            region = self._arrivals.take(fetch.number, self._held)
            carries = fetch.number in self.program.activity.fetches and self.state.graph.tensors[fetch.tensor].requires_grad
            values.put(key, region, carries)
            self._leave_holdings(fetch.holdings)
        return values[key]

    def _piece(self, piece: Piece) -> torch.Tensor:
        """One piece of a fetch: linked by autograd if this segment made it, else cut from a leaf."""
        attached = self._attached.get(piece.holding)
        tensor = self._holding_leaf(piece.holding) if attached is None else attached
        return self.state.regions.cut(("holding", piece.holding), tensor, piece.box)

    def _holding_leaf(self, holding: int) -> torch.Tensor:
        """The leaf of a holding that comes from another segment or from a sum."""
        values = self.state.values
        key: ValueKey = ("holding", holding)
        if key not in values:
            tensor = self.state.graph.tensors[self.plan.holdings[holding].tensor]
            values.put(key, self._held(holding), holding in self.program.activity.holdings and tensor.requires_grad)
        return values[key]

    def _leave_fetch(self, fetch: Fetched) -> None:
        """Note that one consumer has read a fetch; after the last one, drop it, or let its memory go until it is gathered again."""
        if not self._leave(fetch.key):
            return
        if fetch.number in self._gathered and not self._second and fetch.key in self.state.values:
            keep_memory(self.state.values[fetch.key], kept=False)
        self._fetched.pop(fetch.number, None)
        if not fetch.carried:
            self._leave_holdings(fetch.holdings)

    def _leave_holdings(self, holdings: Iterable[int]) -> None:
        """Note that one reader has read these holdings of this rank, each named once; drop those that it was the last reader of."""
        for holding in holdings:
            if self._leave(("holding", holding)):
                self._attached.pop(holding, None)
                reduction = self.plan.holdings[holding].reduction
                if reduction is not None and (not self._second or reduction in self.program.summed_again):
                    self._reducing.pop(reduction)

    def _leave(self, key: ValueKey) -> bool:
        values = self.state.values
        return values.leave_again(key) if self._second else values.leave(key)

    def _parameter(self, parameter: Parameter) -> torch.Tensor:
        """A tile's parameter region, assembled once per segment."""
        if parameter.sole is not None:
            return self.shards.leaves[parameter.sole]
        region = self._regions.get(parameter.place)
        if region is None:
            build = self.state.empty(parameter.region.box, parameter.tensor) if parameter.empty else self.shards.build(parameter.region)
            region = self._regions[parameter.place] = build
        return region


Compute = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""Computes a tile from its inputs."""


class KeptProducts:
    """Keeps what products of ``light`` tiles make in the first runs of a micro-batch, for their second runs (``tracing.products``)."""

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._made: dict[int, Made | None] = {}

    def first(self, tile: PreparedTile, inputs: Sequence[torch.Tensor], run: Compute) -> Sequence[torch.Tensor]:
        """Run a tile, and keep of its products what its second run needs."""
        needed = [self._state.graph.tensors[own.tensor].requires_grad for own in tile.inputs]
        leaves = [leaf(own, takes) for own, takes in zip(inputs, needed, strict=True)]
        with self._state.task(tile.name, TaskKind.FORWARD):
            outputs, self._made[tile.number] = first_run(lambda: run(leaves), whole=not has_product(tile.operator))
        return outputs

    def second(self, tile: PreparedTile, inputs: Sequence[torch.Tensor], run: Compute) -> Sequence[torch.Tensor]:
        """Run a tile again, if it has products without these."""
        with self._state.task(recompute_name(tile.operator, tile.tile), TaskKind.RECOMPUTE):
            return second_run(lambda: run(inputs), self._made.pop(tile.number))
