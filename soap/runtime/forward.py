"""The forward pass of one step on one rank: its tiles, what they need from elsewhere, and what others need of them.

Inside a segment, tiles are linked by autograd. What comes from outside (an earlier segment, another rank, a sum over a group) enters
as a detached leaf. Values are let go as soon as their last reader on this rank has had them; what the backward pass needs, autograd keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from soap.errors import RuntimeFailure
from soap.graph import Operator, TensorKind
from soap.regions import lengths, volume, whole
from soap.runtime.activity import ValueKey
from soap.runtime.arrivals import Arrivals
from soap.runtime.redistribute import Pending, assemble, cut
from soap.runtime.shards import Region, ShardStore
from soap.runtime.state import Output, StepState
from soap.runtime.units import Outputs, Unit
from soap.simulator.plan import forward_name, local_pieces, message_name, reduce_name, remote_parts
from soap.simulator.tasks import TaskKind
from soap.simulator.tiling import Tile
from soap.tracing.model import TileContext, TracedModel


class ForwardPass:
    """One method per action. ``tensors``: full inputs and constants by name. ``units``: first tile -> tiles that are computed together."""

    def __init__(
        self,
        state: StepState,
        model: TracedModel,
        shards: ShardStore,
        tensors: Mapping[str, torch.Tensor],
        context: TileContext,
        units: Mapping[int, Unit] | None = None,
    ) -> None:
        self.state, self.program, self.plan = state, state.program, state.plan
        self.model, self.shards, self.tensors = model, shards, tensors
        self.context = context
        self._units = units or {}
        self._computed: dict[int, Outputs] = {}
        self.loss = torch.zeros((), dtype=state.dtype_of(state.graph.loss), device=state.comm.device)
        self._numbers: dict[int, torch.Tensor] = {}
        self._segment = -1
        self._attached: dict[int, torch.Tensor] = {}
        self._fetched: dict[int, torch.Tensor] = {}
        self._regions: dict[tuple[str, Region], torch.Tensor] = {}
        self._partials: dict[tuple[int, int], torch.Tensor] = {}
        self._arrivals = Arrivals(state)
        self._reducing: dict[int, Pending] = {}
        self._readers = dict(self.program.readers(state.rank))

    def run_tile(self, number: int) -> None:
        """Compute a tile."""
        if self.program.segment_of[number] != self._segment:
            self._segment = self.program.segment_of[number]
            self._attached, self._fetched, self._regions = {}, {}, {}
        tile = self.plan.tiles[number]
        op = self.plan.operator(tile)
        outputs = self._outputs(number)
        self._check_outputs(op, tile, outputs)
        self._keep_held(number, outputs)
        self._keep_partial(number, outputs)
        for k in range(len(op.inputs)):
            self._leave_fetch(self.program.index.fetch_of.get((number, k)))

    def _outputs(self, number: int) -> Outputs:
        if number in self._units:
            unit = self._units[number]
            self._computed.update(zip(unit.tiles, unit.run(self._input, self._parameter), strict=True))
        if number in self._computed:
            return self._computed.pop(number)
        tile = self.plan.tiles[number]
        op = self.plan.operator(tile)
        if not tile.size:  # fewer samples than tiles: nothing, or nothing to be added to a sum
            return [self.state.empty(box, out.tensor).zero_() for out, box in zip(op.outputs, tile.outputs, strict=True)]
        inputs = [self._input(number, k) for k in range(len(op.inputs))]
        parameters = [self._parameter(number, k) for k in range(len(op.parameters))]
        active = number in self.program.activity.tiles
        if not self.state.is_traced:
            with torch.set_grad_enabled(active):
                return list(self.model.run_tile(tile, inputs, parameters, self.context))
        with self.state.task(forward_name(op, tile), TaskKind.FORWARD), torch.set_grad_enabled(active):
            return list(self.model.run_tile(tile, inputs, parameters, self.context))

    def transfer(self, number: int) -> None:
        """Send or receive a message."""
        message = self.plan.messages[number]
        if message.target == self.state.rank:
            self._arrivals.expect_message(number)
            return
        parts = remote_parts(self.plan, message.parts)
        values = [cut(self._held(holding), self.plan.holdings[holding].box, box) for _, _, box, holding in parts]
        self.state.sent[number] = self.state.send(values, message.target, number, message_name(self.plan, message))
        self._leave_holdings(holding for *_, holding in parts)

    def exchange(self, number: int) -> None:
        """Take part in an exchange."""
        self._arrivals.exchange(number, self._held)
        parts = remote_parts(self.plan, self.plan.exchanges[number].parts)
        self._leave_holdings(holding for source, _, _, holding in parts if source == self.state.rank)

    def reduce(self, number: int) -> None:
        """Sum this rank's partial results, then those of the group."""
        reduction, total = self.plan.reductions[number], self._own_sum(number)
        name = reduce_name(self.state.graph.operators[reduction.operator], reduction)
        if reduction.cells:
            self._reducing[number] = self.state.scatter_sum(total, reduction, name)
        else:
            self._reducing[number] = self.state.sum_over(total, reduction.devices, name)

    def reduce_numbers(self, together: int) -> None:
        """Sum several reductions of one number each at once."""
        numbers = self.program.number_sums[together]
        reduction = self.plan.reductions[numbers[0]]
        totals = torch.stack([self._own_sum(number).reshape(()) for number in numbers])
        pending = self.state.sum_over(totals, reduction.devices, reduce_name(self.state.graph.operators[reduction.operator], reduction))
        for place, number in enumerate(numbers):
            one = totals[place].reshape(lengths(self.plan.reductions[number].box))
            self._reducing[number] = Pending((), one, pending.wait)

    def _own_sum(self, number: int) -> torch.Tensor:
        reduction = self.plan.reductions[number]
        own = [tile for tile in reduction.tiles if self.plan.tiles[tile].device == self.state.rank]
        partials = [self._partials.pop((tile, reduction.output)) for tile in own]
        total = partials[0].clone(memory_format=torch.contiguous_format)
        for partial in partials[1:]:
            total.add_(partial)
        return total

    def tell_loss(self, holding: int) -> None:
        """Bring the loss to every rank: from the holding's device, unless all have it already."""
        own = self.program.losses.get(self.state.rank)
        if own is not None:
            reduction = self.plan.holdings[own].reduction
            self.loss = (self._numbers[own] if reduction is None else self._reducing[reduction].wait()).reshape(()).clone()
        if len(self.program.losses) < self.state.comm.world_size:
            self.state.comm.broadcast(self.loss, self.plan.holdings[holding].device).wait()

    def release(self) -> None:
        """Let go of what the last segment has used."""
        self._attached, self._fetched, self._regions = {}, {}, {}

    def _check_outputs(self, op: Operator, tile: Tile, outputs: Outputs) -> None:
        for operand, box, output in zip(op.outputs, tile.outputs, outputs, strict=True):
            if output is None:
                continue
            expected = (lengths(box), self.state.dtype_of(operand.tensor))
            if (output.shape, output.dtype) != expected:
                raise RuntimeFailure(
                    f"tile {tile.index} of operator {op.name!r} made {operand.tensor!r} as {tuple(output.shape)} {output.dtype}; "
                    f"expected {expected[0]} {expected[1]}: this is a defect of the operator's rule, please report it"
                )

    def _keep_held(self, number: int, outputs: Outputs) -> None:
        """Put a tile's outputs where their consumers look for them, and note those whose gradients will come from outside."""
        activity = self.program.activity
        for output, holding in self.program.index.direct.get(number, ()):
            tensor, name = outputs[output], self.plan.holdings[holding].tensor
            if tensor is None:
                continue
            read = ("holding", holding) in self._readers
            if read:
                self._attached[holding] = tensor
            if name in self.program.seeds or name == self.state.graph.loss:  # read when the backward pass is over
                self._numbers[holding] = tensor.detach()
            if read and holding in self.program.kept:
                self.state.leaves["holding", holding] = self._leaf(tensor, name, holding in activity.holdings)
            seed = self.program.seeds.get(name) if number in activity.seeds else None
            if seed is not None or holding in self.program.answered:
                self._note(Output(tensor, holding, None, seed))

    def _keep_partial(self, number: int, outputs: Outputs) -> None:
        activity = self.program.activity
        for output, tensor in enumerate(outputs):
            reduction = self.program.index.partial.get((number, output))
            if reduction is None or tensor is None:
                continue
            self._partials[number, output] = tensor.detach()
            seed = self.program.seeds.get(self.state.reduced_tensor(reduction)) if number in activity.seeds else None
            if seed is not None or reduction in activity.reductions:
                self._note(Output(tensor, None, reduction, seed))

    def _note(self, output: Output) -> None:
        self.state.outputs.setdefault(self._segment, []).append(output)

    def _held(self, holding: int) -> torch.Tensor:
        """The detached value of a holding of this rank."""
        reduction = self.plan.holdings[holding].reduction
        if reduction is not None:
            return self._reducing[reduction].wait()
        return self._numbers[holding] if holding in self._numbers else self.state.leaves["holding", holding].detach()

    def _input(self, number: int, place: int) -> torch.Tensor:
        """An input region of a tile."""
        name, box = self.plan.operator(self.plan.tiles[number]).inputs[place].tensor, self.plan.tiles[number].inputs[place]
        tensor = self.state.graph.tensors[name]
        if tensor.kind is not TensorKind.ACTIVATION:
            return cut(self.tensors[name], whole(tensor.shape), box)
        if volume(box) == 0:
            return self.state.empty(box, name)
        fetch = self.program.index.fetch_of[number, place]
        if fetch in self.program.index.carriers:
            return self._arrived(fetch)
        pieces = self.plan.fetches[fetch].pieces
        values = [self._piece(fetch, k) for k in range(len(pieces))]
        if fetch not in self._fetched:
            self._fetched[fetch] = assemble(box, [piece.box for piece in pieces], values)
        return self._fetched[fetch]

    def _arrived(self, fetch: int) -> torch.Tensor:
        """A region of which a part lies elsewhere: a leaf as a whole."""
        leaves = self.state.leaves
        key: ValueKey = ("fetch", fetch)
        if key not in leaves:
            region = self._arrivals.take(fetch, self._held)
            leaves[key] = self._leaf(region, self.plan.fetches[fetch].tensor, fetch in self.program.activity.fetches)
            self._leave_holdings(self._local_holdings(fetch))
        return leaves[key]

    def _piece(self, fetch: int, place: int) -> torch.Tensor:
        """One piece of a fetch: attached if this segment made it, else of a leaf."""
        piece = self.plan.fetches[fetch].pieces[place]
        box = self.plan.holdings[piece.holding].box
        if piece.holding in self._attached:
            return cut(self._attached[piece.holding], box, piece.box)
        leaves = self.state.leaves
        key: ValueKey = ("holding", piece.holding)
        if key not in leaves:
            name = self.plan.fetches[fetch].tensor
            leaves[key] = self._leaf(self._held(piece.holding), name, piece.holding in self.program.activity.holdings)
        return cut(leaves[key], box, piece.box)

    def _local_holdings(self, fetch: int) -> set[int]:
        return {piece.holding for piece in local_pieces(self.plan, self.plan.fetches[fetch])}

    def _leave_fetch(self, fetch: int | None) -> None:
        """One of a fetch's consumers has had it."""
        if fetch is None or not self._is_last(("fetch", fetch)):
            return
        self._fetched.pop(fetch, None)
        if fetch not in self.program.index.carriers:
            self._leave_holdings(self._local_holdings(fetch))

    def _leave_holdings(self, holdings: Iterable[int]) -> None:
        """A reader has had these holdings of this rank, each once."""
        for holding in set(holdings):
            if self._is_last(("holding", holding)):
                self._attached.pop(holding, None)
                reduction = self.plan.holdings[holding].reduction
                if reduction is not None:
                    self._reducing.pop(reduction)

    def _is_last(self, key: ValueKey) -> bool:
        """Count down the readers of a value. After the last one its leaf goes, unless a gradient will be left on it."""
        left = self._readers[key] = self._readers[key] - 1
        if left == 0 and key in self.state.leaves and not self.state.leaves[key].requires_grad:
            del self.state.leaves[key]
        return left == 0

    def _parameter(self, number: int, place: int) -> torch.Tensor:
        """A parameter region of a tile, assembled once per segment."""
        name = self.plan.operator(self.plan.tiles[number]).parameters[place].tensor
        region = self.shards.region(number, place)
        key = (name, region)
        if key not in self._regions:
            self._regions[key] = self.shards.build(region) if volume(region.box) else self.state.empty(region.box, name)
        return self._regions[key]

    def _leaf(self, tensor: torch.Tensor, name: str, carries_gradient: bool) -> torch.Tensor:
        wanted = carries_gradient and self.state.graph.tensors[name].requires_grad and tensor.is_floating_point()
        return tensor.detach().requires_grad_(wanted)
