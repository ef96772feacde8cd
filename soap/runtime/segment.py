"""One training step of one rank: its tiles forward, its segments backward, with real tensors.

Inside a segment, tiles are linked by autograd. What comes from outside (an earlier segment, another rank, a sum over a group) enters as a
detached leaf; the gradients of the leaves are collected in the program's order and handed to whoever made the value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

import torch

from soap.errors import RuntimeFailure
from soap.graph import TensorKind
from soap.regions import Box, lengths, volume, whole
from soap.runtime.program import Action, ActionKind, Program, Transfer, part_of
from soap.runtime.redistribute import Communicator, Pending, assemble, cut
from soap.runtime.shards import Region, ShardStore
from soap.runtime.sync import GradientSync
from soap.runtime.trace import Recorder
from soap.simulator.plan import backward_name, forward_name, reduce_name, sync_name, transfer_name
from soap.simulator.tasks import TaskKind
from soap.tracing.model import TileContext, TracedModel

LeafKey = tuple[Literal["holding", "transfer", "shard"], int]
"""Where a segment's input comes from: a holding of this rank, a transfer, or a parameter shard."""


class _Output(NamedTuple):
    """A tensor of a segment whose gradient comes from outside: one that is held, or a partial result. ``seed``: it is the loss."""

    tensor: torch.Tensor
    holding: int | None
    reduction: int | None
    seed: bool


class StepRun:
    """Executes a program once. ``tensors``: the full inputs and constants by name."""

    def __init__(
        self,
        program: Program,
        model: TracedModel,
        comm: Communicator,
        shards: ShardStore,
        gradients: GradientSync,
        tensors: Mapping[str, torch.Tensor],
        context: TileContext,
        dtype_of: Callable[[str], torch.dtype],
        recorder: Recorder | None = None,
    ) -> None:
        self.program, self.plan, self.graph = program, program.plan, program.plan.graph
        self.model, self.comm, self.shards, self.gradients = model, comm, shards, gradients
        self.tensors, self.context, self.dtype_of, self.recorder = tensors, context, dtype_of, recorder
        self.rank, self.device = comm.rank, comm.device
        self.loss = torch.zeros((), dtype=dtype_of(self.graph.loss), device=self.device)
        self._loss_told: Pending | None = None
        self._segment = -1
        self._attached: dict[int, torch.Tensor] = {}
        self._fetched: dict[int, torch.Tensor] = {}
        self._regions: dict[tuple[str, Region], torch.Tensor] = {}
        self._leaves: dict[LeafKey, torch.Tensor] = {}
        self._used: dict[int, dict[LeafKey, torch.Tensor]] = {}
        self._outputs: dict[int, list[_Output]] = {}
        self._partials: dict[tuple[int, int], torch.Tensor] = {}
        self._arriving: dict[int, Pending] = {}
        self._reducing: dict[int, Pending] = {}
        self._contributions: dict[LeafKey, torch.Tensor] = {}
        self._returning: dict[int, list[tuple[int, Pending]]] = {}
        self._reduced_gradients: dict[int, Pending] = {}
        self._handlers: dict[ActionKind, Callable[[int], None]] = {
            ActionKind.TILE: self._run_tile,
            ActionKind.TRANSFER: self._transfer,
            ActionKind.REDUCE: self._reduce,
            ActionKind.LOSS: self._tell_loss,
            ActionKind.SEGMENT: self._run_backward,
            ActionKind.RETURN: self._return,
            ActionKind.REDUCE_GRADIENT: self._reduce_gradient,
            ActionKind.SYNC: self._synchronize,
        }

    def run(self, parts: Sequence[Sequence[Action]] | None = None) -> float:
        """Forward and backward; afterwards the gradients are complete. Returns the loss."""
        self.gradients.begin()
        for part in parts or (part_of(self.program.forward, self.rank), part_of(self.program.backward, self.rank)):
            for action in part:
                self._handlers[action.kind](action.subject)
        self.gradients.finish()
        self.comm.finish_sends()
        if self._loss_told is not None:
            self._loss_told.wait()
        return float(self.loss)

    # Forward

    def _run_tile(self, number: int) -> None:
        if self.program.segment_of[number] != self._segment:
            self._segment = self.program.segment_of[number]
            self._attached, self._fetched, self._regions = {}, {}, {}
        tile, active = self.plan.tiles[number], number in self.program.activity.tiles
        op = self.plan.operator(tile)
        inputs = [self._input(number, k, active) for k in range(len(op.inputs))]
        parameters = [self._parameter(number, k, active) for k in range(len(op.parameters))]
        with self._task(forward_name(op, tile), TaskKind.FORWARD), torch.set_grad_enabled(active):
            outputs = self.model.run_tile(tile, inputs, parameters, self.context)
        for operand, box, output in zip(op.outputs, tile.outputs, outputs, strict=True):
            expected = (lengths(box), self.dtype_of(operand.tensor))
            if (tuple(output.shape), output.dtype) != expected:
                raise RuntimeFailure(
                    f"tile {tile.index} of operator {op.name!r} made {operand.tensor!r} as {tuple(output.shape)} {output.dtype}; "
                    f"expected {expected[0]} {expected[1]}: this is a defect of the operator's rule, please report it"
                )
        self._keep(number, outputs)

    def _keep(self, number: int, outputs: Sequence[torch.Tensor]) -> None:
        """Put a tile's outputs where their consumers look for them, and note those whose gradients will come from outside."""
        activity, index = self.program.activity, self.program.index
        explicit = self._outputs.setdefault(self._segment, [])
        for output, holding in index.direct.get(number, ()):
            tensor, name = outputs[output], self.plan.holdings[holding].tensor
            self._attached[holding] = tensor
            self._leaves["holding", holding] = self._leaf(tensor, name, holding in activity.holdings)
            seed = number in activity.seeds and name == self.graph.loss
            if seed or (holding in activity.holdings and self._consumed_outside(holding)):
                explicit.append(_Output(tensor, holding, None, seed))
        for output, tensor in enumerate(outputs):
            reduction = index.partial.get((number, output))
            if reduction is not None:
                self._partials[number, output] = tensor.detach()
                seed = number in activity.seeds and self._reduced_tensor(reduction) == self.graph.loss
                if seed or reduction in activity.reductions:
                    explicit.append(_Output(tensor, None, reduction, seed))

    def _consumed_outside(self, holding: int) -> bool:
        """Whether an active consumer of the holding lies in another segment than the one under way."""
        program = self.program
        return any(
            program.segment_of[tile] != self._segment
            for fetch in program.index.fetches_from[holding]
            for tile, _ in self.plan.fetches[fetch].consumers
            if tile in program.activity.tiles
        )

    def _input(self, number: int, place: int, active: bool) -> torch.Tensor:
        """An input region of a tile."""
        name, box = self.plan.operator(self.plan.tiles[number]).inputs[place].tensor, self.plan.tiles[number].inputs[place]
        tensor = self.graph.tensors[name]
        if tensor.kind is not TensorKind.ACTIVATION:
            return cut(self.tensors[name], whole(tensor.shape), box)
        if volume(box) == 0:
            return torch.empty(lengths(box), dtype=self.dtype_of(name), device=self.device)
        fetch = self.program.index.fetch_of[number, place]
        pieces = self.plan.fetches[fetch].pieces
        values = [self._piece(fetch, k, active) for k in range(len(pieces))]
        if fetch not in self._fetched:
            self._fetched[fetch] = assemble(box, [piece.box for piece in pieces], values)
        return self._fetched[fetch]

    def _piece(self, fetch: int, place: int, active: bool) -> torch.Tensor:
        """One piece of a fetch: attached if this segment made it, else a leaf."""
        piece = self.plan.fetches[fetch].pieces[place]
        transfer = self.program.transfer_of.get((fetch, place))
        if transfer is None and piece.holding in self._attached:
            return cut(self._attached[piece.holding], self.plan.holdings[piece.holding].box, piece.box)
        key: LeafKey = ("holding", piece.holding) if transfer is None else ("transfer", transfer)
        if key not in self._leaves:
            carries = fetch in self.program.activity.fetches
            reduction = self.plan.holdings[piece.holding].reduction
            if transfer is not None:
                self._leaves[key] = self._leaf(self._arriving[transfer].wait(), self.plan.fetches[fetch].tensor, carries)
            elif reduction is not None:
                carries = piece.holding in self.program.activity.holdings
                self._leaves[key] = self._leaf(self._reducing[reduction].wait(), self.plan.fetches[fetch].tensor, carries)
        leaf = self._leaves[key]
        if active and leaf.requires_grad:
            self._used.setdefault(self._segment, {})[key] = leaf
        return leaf if transfer is not None else cut(leaf, self.plan.holdings[piece.holding].box, piece.box)

    def _parameter(self, number: int, place: int, active: bool) -> torch.Tensor:
        """A parameter region of a tile, assembled once per segment."""
        name = self.plan.operator(self.plan.tiles[number]).parameters[place].tensor
        region = self.shards.region(number, place)
        if active:
            for shard in region.shards:
                if self.plan.shards[shard].trainable:
                    self._used.setdefault(self._segment, {})["shard", shard] = self.shards.tensors[shard]
        key = (name, region)
        if key not in self._regions:
            self._regions[key] = self.shards.build(region, self.dtype_of(name), self.device)
        return self._regions[key]

    def _leaf(self, tensor: torch.Tensor, name: str, carries_gradient: bool) -> torch.Tensor:
        wanted = carries_gradient and self.graph.tensors[name].requires_grad and tensor.is_floating_point()
        return tensor.detach().requires_grad_(wanted)

    def _transfer(self, number: int) -> None:
        transfer = self.program.transfers[number]
        tensor = self.plan.fetches[transfer.fetch].tensor
        if transfer.source == self.rank:
            pending = self.comm.send(self._held(transfer), transfer.target, number)
        else:
            pending = self.comm.receive(self._empty(transfer.box, tensor), transfer.source, number)
            self._arriving[number] = pending
        self._count(pending, sent=transfer.source == self.rank)
        self._watch([transfer_name(tensor, transfer.box, transfer.source, transfer.target)], TaskKind.TRANSFER, pending)

    def _held(self, transfer: Transfer) -> torch.Tensor:
        holding = self.plan.holdings[transfer.holding]
        if holding.reduction is None:
            value = self._leaves["holding", transfer.holding].detach()
        else:
            value = self._reducing[holding.reduction].wait()
        return cut(value, holding.box, transfer.box)

    def _reduce(self, number: int) -> None:
        reduction = self.plan.reductions[number]
        own = [tile for tile in reduction.tiles if self.plan.tiles[tile].device == self.rank]
        partials = [self._partials.pop((tile, reduction.output)) for tile in own]
        total = partials[0].clone(memory_format=torch.contiguous_format)
        for partial in partials[1:]:
            total.add_(partial)
        if len(reduction.devices) > 1:
            self.comm.traffic.reduced_bytes += total.numel() * total.element_size()
        self._reducing[number] = self.comm.all_reduce(total, reduction.devices)
        if len(reduction.devices) > 1:
            op = self.graph.operators[reduction.operator]
            self._watch([reduce_name(op, reduction)], TaskKind.REDUCE, self._reducing[number])

    def _tell_loss(self, holding: int) -> None:
        held = self.plan.holdings[holding]
        if held.device == self.rank:
            value = self._leaves["holding", holding].detach() if held.reduction is None else self._reducing[held.reduction].wait()
            self.loss.copy_(value.detach().reshape(()))
        if self.comm.world_size > 1:
            self._loss_told = self.comm.broadcast(self.loss, held.device)

    # Backward

    def _run_backward(self, number: int) -> None:
        outputs, gradients = [], []
        for output in self._outputs.pop(number, ()):
            gradient = self._gradient(output)
            if gradient is not None and output.tensor.requires_grad:
                outputs.append(output.tensor)
                gradients.append(gradient)
        used = self._used.pop(number, {})
        if not outputs or not used:
            return
        tiles = [self.plan.tiles[tile] for tile in self.program.segments[number].tiles]
        with self._task(backward_name(self.plan.operator(tiles[0]), tiles[0]), TaskKind.BACKWARD):
            results: Sequence[torch.Tensor | None] = torch.autograd.grad(outputs, list(used.values()), gradients, allow_unused=True)
        for key, result in zip(used, results, strict=True):
            if result is None:
                continue
            if key[0] == "shard":
                self.gradients.add(key[1], result)
            else:
                self._contribute(key, result)

    def _gradient(self, output: _Output) -> torch.Tensor | None:
        """What comes from outside for one output of a segment; None stands for zeros."""
        if output.holding is not None:
            total = self._collect(output.holding)
        else:
            assert output.reduction is not None
            pending = self._reduced_gradients.get(output.reduction)
            total = None if pending is None else pending.wait()
        if not output.seed:
            return total
        one = torch.ones_like(output.tensor)
        return one if total is None else total + one

    def _collect(self, holding: int) -> torch.Tensor | None:
        """All gradients that this rank has for a holding: from its own segments, then from other ranks in the order of the transfers."""
        held = self.plan.holdings[holding]
        total = self._contributions.pop(("holding", holding), None)
        returned = self._returning.pop(holding, ())
        if returned:  # a copy: autograd may have handed out one tensor twice
            total = self._empty(held.box, held.tensor).zero_() if total is None else total.clone()
            for number, pending in returned:
                cut(total, held.box, self.program.transfers[number].box).add_(pending.wait())
        return total

    def _contribute(self, key: LeafKey, gradient: torch.Tensor) -> None:
        other = self._contributions.get(key)
        self._contributions[key] = gradient if other is None else other + gradient

    def _return(self, number: int) -> None:
        transfer = self.program.transfers[number]
        tensor = self.plan.fetches[transfer.fetch].tensor
        tag = len(self.program.transfers) + number
        if transfer.target == self.rank:
            gradient = self._contributions.pop(("transfer", number), None)
            if gradient is None:
                gradient = self._empty(transfer.box, tensor).zero_()
            pending = self.comm.send(gradient, transfer.source, tag)
            self._leaves.pop(("transfer", number), None)
        else:
            pending = self.comm.receive(self._empty(transfer.box, tensor), transfer.target, tag)
            self._returning.setdefault(transfer.holding, []).append((number, pending))
        self._count(pending, sent=transfer.target == self.rank)
        name = transfer_name(tensor, transfer.box, transfer.target, transfer.source, gradient=True)
        self._watch([name], TaskKind.TRANSFER, pending)

    def _reduce_gradient(self, number: int) -> None:
        reduction = self.plan.reductions[number]
        own = self._collect(self.program.index.reduced[number, self.rank])
        if own is None:
            own = self._empty(reduction.box, self._reduced_tensor(number)).zero_()
        if len(reduction.devices) > 1:
            own = own.clone(memory_format=torch.contiguous_format)
            self.comm.traffic.reduced_bytes += own.numel() * own.element_size()
        self._reduced_gradients[number] = self.comm.all_reduce(own, reduction.devices)
        if len(reduction.devices) > 1:
            op = self.graph.operators[reduction.operator]
            self._watch([reduce_name(op, reduction, gradient=True)], TaskKind.REDUCE, self._reduced_gradients[number])

    def _synchronize(self, bucket: int) -> None:
        pending = self.gradients.start(bucket)
        names = [sync_name(self.plan.shards[shard]) for shard in self.program.buckets[bucket].shards]
        self._watch(names, TaskKind.SYNC, pending)

    # Both

    def _reduced_tensor(self, reduction: int) -> str:
        found = self.plan.reductions[reduction]
        return self.graph.operators[found.operator].outputs[found.output].tensor

    def _empty(self, box: Box, tensor: str) -> torch.Tensor:
        return torch.empty(lengths(box), dtype=self.dtype_of(tensor), device=self.device)

    def _count(self, pending: Pending, *, sent: bool) -> None:
        size = pending.tensor.numel() * pending.tensor.element_size()
        if sent:
            self.comm.traffic.sent_bytes += size
        else:
            self.comm.traffic.received_bytes += size

    def _task(self, name: str, kind: TaskKind) -> AbstractContextManager[None]:
        return nullcontext() if self.recorder is None else self.recorder.task(name, kind)

    def _watch(self, names: Sequence[str], kind: TaskKind, pending: Pending) -> None:
        if self.recorder is not None:
            self.recorder.watch(names, kind, pending)
