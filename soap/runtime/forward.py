"""The forward pass of one step on one rank: its tiles, what they need from elsewhere, and what others need of them.

Inside a segment, tiles are linked by autograd. What comes from outside (an earlier segment, another rank, a sum over a group) enters
as a detached leaf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from soap.errors import RuntimeFailure
from soap.graph import Operator, TensorKind
from soap.regions import lengths, volume, whole
from soap.runtime.redistribute import Pending, assemble, cut
from soap.runtime.shards import Region, ShardStore
from soap.runtime.state import LeafKey, Output, StepState
from soap.simulator.plan import forward_name, reduce_name, transfer_name
from soap.simulator.tasks import TaskKind
from soap.simulator.tiling import Tile
from soap.tracing.model import TileContext, TracedModel


class ForwardPass:
    """One method per action. ``tensors``: full inputs and constants by name."""

    def __init__(
        self, state: StepState, model: TracedModel, shards: ShardStore, tensors: Mapping[str, torch.Tensor], context: TileContext
    ) -> None:
        self.state, self.program, self.plan = state, state.program, state.plan
        self.model, self.shards, self.tensors = model, shards, tensors
        self.context = context
        self.loss = torch.zeros((), dtype=state.dtype_of(state.graph.loss), device=state.comm.device)
        self._found_loss = self.loss
        self._segment = -1
        self._attached: dict[int, torch.Tensor] = {}
        self._fetched: dict[int, torch.Tensor] = {}
        self._regions: dict[tuple[str, Region], torch.Tensor] = {}
        self._partials: dict[tuple[int, int], torch.Tensor] = {}
        self._arriving: dict[int, Pending] = {}
        self._reducing: dict[int, Pending] = {}

    def run_tile(self, number: int) -> None:
        """Compute a tile."""
        if self.program.segment_of[number] != self._segment:
            self._segment = self.program.segment_of[number]
            self._attached, self._fetched, self._regions = {}, {}, {}
        tile, active = self.plan.tiles[number], number in self.program.activity.tiles
        op = self.plan.operator(tile)
        inputs = [self._input(number, k) for k in range(len(op.inputs))]
        parameters = [self._parameter(number, k) for k in range(len(op.parameters))]
        with self.state.task(forward_name(op, tile), TaskKind.FORWARD), torch.set_grad_enabled(active):
            if tile.size:
                outputs = self.model.run_tile(tile, inputs, parameters, self.context)
            else:  # fewer samples than tiles: nothing, or nothing to be added to a sum
                outputs = tuple(self.state.empty(box, out.tensor).zero_() for out, box in zip(op.outputs, tile.outputs, strict=True))
        self._check_outputs(op, tile, outputs)
        self._keep_held(number, outputs)
        self._keep_partial(number, outputs)

    def transfer(self, number: int) -> None:
        """Send or receive a piece of a fetch."""
        transfer = self.program.transfers[number]
        tensor = self.plan.fetches[transfer.fetch].tensor
        name = transfer_name(tensor, transfer.box, transfer.source, transfer.target)
        if transfer.target == self.state.rank:
            self._arriving[number] = self.state.receive(transfer.box, tensor, transfer.source, number, name)
            return
        held = self._held(transfer.holding)
        self.state.send(cut(held, self.plan.holdings[transfer.holding].box, transfer.box), transfer.target, number, name)

    def reduce(self, number: int) -> None:
        """Sum this rank's partial results, then those of the group."""
        reduction = self.plan.reductions[number]
        own = [tile for tile in reduction.tiles if self.plan.tiles[tile].device == self.state.rank]
        partials = [self._partials.pop((tile, reduction.output)) for tile in own]
        total = partials[0].clone(memory_format=torch.contiguous_format)
        for partial in partials[1:]:
            total.add_(partial)
        name = reduce_name(self.state.graph.operators[reduction.operator], reduction)
        self._reducing[number] = self.state.sum_over(total, reduction.devices, name)

    def tell_loss(self, holding: int) -> None:
        """Bring the loss to every rank: from the holding's device, unless all have it already."""
        own = self.program.losses.get(self.state.rank)
        if own is not None:
            reduction = self.plan.holdings[own].reduction
            self.loss = (self._found_loss if reduction is None else self._reducing[reduction].wait()).reshape(()).clone()
        if len(self.program.losses) < self.state.comm.world_size:
            self.state.comm.broadcast(self.loss, self.plan.holdings[holding].device).wait()

    def _check_outputs(self, op: Operator, tile: Tile, outputs: Sequence[torch.Tensor]) -> None:
        for operand, box, output in zip(op.outputs, tile.outputs, outputs, strict=True):
            expected = (lengths(box), self.state.dtype_of(operand.tensor))
            if (tuple(output.shape), output.dtype) != expected:
                raise RuntimeFailure(
                    f"tile {tile.index} of operator {op.name!r} made {operand.tensor!r} as {tuple(output.shape)} {output.dtype}; "
                    f"expected {expected[0]} {expected[1]}: this is a defect of the operator's rule, please report it"
                )

    def _keep_held(self, number: int, outputs: Sequence[torch.Tensor]) -> None:
        """Put a tile's outputs where their consumers look for them, and note those whose gradients will come from outside."""
        activity = self.program.activity
        for output, holding in self.program.index.direct.get(number, ()):
            tensor, name = outputs[output], self.plan.holdings[holding].tensor
            self._attached[holding] = tensor
            if self.program.losses.get(self.state.rank) == holding:
                self._found_loss = tensor.detach()
            if holding in self.program.kept:
                self.state.leaves["holding", holding] = self._leaf(tensor, name, holding in activity.holdings)
            seed = number in activity.seeds and name == self.state.graph.loss
            if seed or holding in self.program.answered:
                self._note(Output(tensor, holding, None, seed))

    def _keep_partial(self, number: int, outputs: Sequence[torch.Tensor]) -> None:
        activity = self.program.activity
        for output, tensor in enumerate(outputs):
            reduction = self.program.index.partial.get((number, output))
            if reduction is None:
                continue
            self._partials[number, output] = tensor.detach()
            seed = number in activity.seeds and self.state.reduced_tensor(reduction) == self.state.graph.loss
            if seed or reduction in activity.reductions:
                self._note(Output(tensor, None, reduction, seed))

    def _note(self, output: Output) -> None:
        self.state.outputs.setdefault(self._segment, []).append(output)

    def _held(self, holding: int) -> torch.Tensor:
        """The detached value of a holding of this rank."""
        reduction = self.plan.holdings[holding].reduction
        return self.state.leaves["holding", holding].detach() if reduction is None else self._reducing[reduction].wait()

    def _input(self, number: int, place: int) -> torch.Tensor:
        """An input region of a tile."""
        name, box = self.plan.operator(self.plan.tiles[number]).inputs[place].tensor, self.plan.tiles[number].inputs[place]
        tensor = self.state.graph.tensors[name]
        if tensor.kind is not TensorKind.ACTIVATION:
            return cut(self.tensors[name], whole(tensor.shape), box)
        if volume(box) == 0:
            return self.state.empty(box, name)
        fetch = self.program.index.fetch_of[number, place]
        pieces = self.plan.fetches[fetch].pieces
        values = [self._piece(fetch, k) for k in range(len(pieces))]
        if fetch not in self._fetched:
            self._fetched[fetch] = assemble(box, [piece.box for piece in pieces], values)
        return self._fetched[fetch]

    def _piece(self, fetch: int, place: int) -> torch.Tensor:
        """One piece of a fetch: attached if this segment made it, else a leaf."""
        piece = self.plan.fetches[fetch].pieces[place]
        box = self.plan.holdings[piece.holding].box
        transfer = self.program.transfer_of.get((fetch, place))
        if transfer is None and piece.holding in self._attached:
            return cut(self._attached[piece.holding], box, piece.box)
        key: LeafKey = ("holding", piece.holding) if transfer is None else ("transfer", transfer)
        leaves, name = self.state.leaves, self.plan.fetches[fetch].tensor
        if key not in leaves and transfer is not None:
            leaves[key] = self._leaf(self._arriving[transfer].wait(), name, fetch in self.program.activity.fetches)
        elif key not in leaves:
            leaves[key] = self._leaf(self._held(piece.holding), name, piece.holding in self.program.activity.holdings)
        return leaves[key] if transfer is not None else cut(leaves[key], box, piece.box)

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
